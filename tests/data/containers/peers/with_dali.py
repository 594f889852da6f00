"""Read ours.rec, ours.tfrecord and ours.tar with DALI on the CPU; print digests of images, and
labels, as JSON."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import nvidia.dali as dali
from nvidia.dali import fn
from nvidia.dali import tfrecord as features


def run(images: int, reader: Callable[[], tuple[object, object]]) -> list[list[object]]:
    """Return digest and label of every image; for a tar, the bytes of `.cls` as label."""
    pipeline = dali.Pipeline(batch_size=images, num_threads=1, device_id=None)
    with pipeline:
        pipeline.set_outputs(*reader())
    pipeline.build()
    data, labels = pipeline.run()
    return [
        [hashlib.sha256(data.at(i).tobytes()).hexdigest(), labels.at(i).reshape(-1).tolist()]
        for i in range(images)
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    images = int(sys.argv[2])

    def recordio() -> tuple[object, object]:
        return tuple(
            fn.readers.mxnet(path=[str(folder / "ours.rec")], index_path=[str(folder / "ours.idx")])
        )

    def tfrecord() -> tuple[object, object]:
        read = fn.readers.tfrecord(
            path=[str(folder / "ours.tfrecord")],
            index_path=[str(folder / "idx" / "ours.tfrecord")],
            features={
                "image/encoded": features.FixedLenFeature((), features.string, ""),
                "image/class/label": features.FixedLenFeature([1], features.int64, -1),
            },
        )
        return read["image/encoded"], read["image/class/label"]

    def webdataset() -> tuple[object, object]:
        return tuple(
            fn.readers.webdataset(
                paths=[str(folder / "ours.tar")],
                ext=["jpeg;jpg", "cls"],
                missing_component_behavior="error",
            )
        )

    items = {reader.__name__: run(images, reader) for reader in (recordio, tfrecord, webdataset)}
    print(json.dumps(items | {"version": dali.__version__}))


main()
