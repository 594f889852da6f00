"""Read ours.rec with MXNet and write theirs.rec and several.rec; print what was read as JSON.

The script runs in MXNet's own environment, without lockstep.
"""

import hashlib
import json
import sys
from pathlib import Path

import mxnet as mx


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_with_index(folder: Path) -> dict[str, object]:
    record = mx.recordio.MXIndexedRecordIO(str(folder / "ours.idx"), str(folder / "ours.rec"), "r")
    items = {}
    for key in record.keys:
        header, image = mx.recordio.unpack(record.read_idx(key))
        items[key] = [header.flag, header.label, header.id, header.id2, digest(image)]
    return items


def read_in_order(folder: Path) -> list[str]:
    record = mx.recordio.MXRecordIO(str(folder / "ours.rec"), "r")
    payloads = iter(record.read, None)
    return [digest(mx.recordio.unpack(payload)[1]) for payload in payloads]


def read_batches(folder: Path) -> dict[str, object]:
    """Return labels and number of decoded images, as MXNet's training scripts get them."""
    batches = mx.io.ImageRecordIter(
        path_imgrec=str(folder / "ours.rec"),
        path_imgidx=str(folder / "ours.idx"),
        data_shape=(3, 16, 16),
        resize=16,
        batch_size=3,
        preprocess_threads=1,
    )
    labels = []
    images = 0
    for batch in batches:
        whole = batch.label[0].shape[0] - batch.pad
        labels += batch.label[0].asnumpy()[:whole].tolist()
        images += whole
    return {"labels": labels, "images": images}


def write(folder: Path, name: str, more_labels: list[float]) -> None:
    record = mx.recordio.MXIndexedRecordIO(
        str(folder / f"{name}.idx"), str(folder / f"{name}.rec"), "w"
    )
    for number, label, path in json.loads((folder / "samples.json").read_text()):
        labels = [label, *more_labels] if more_labels else label
        header = mx.recordio.IRHeader(0, labels, number, 0)
        record.write_idx(number, mx.recordio.pack(header, (folder / "images" / path).read_bytes()))
    record.close()


def main() -> None:
    folder = Path(sys.argv[1])
    write(folder, "theirs", [])
    write(folder, "several", [0.5, 7.0])
    items = {
        "version": mx.__version__,
        "by index": read_with_index(folder),
        "in order": read_in_order(folder),
        "batches": read_batches(folder),
    }
    print(json.dumps(items))


main()
