"""Measure what comparing the checksum of each image costs the host loader: batches from an index
with checksums and from the same without, alternately.

In processor seconds of this process, because they stay comparable on a machine that also does other
things.
"""

import time
from dataclasses import replace

from lockstep.data.index import Index, open_index
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.data.sources import find_source
from lockstep.recipes import Execution
from lockstep.system.crc import compute_crc
from measuring import describe_load, make_parser, median, recipe, record

ROUNDS = 15
BATCH = 32


def main() -> None:
    data = make_parser(__doc__, "Folder of images by class.").parse_args().data
    with_checksums = open_index(find_source(data))
    without = replace(with_checksums, checksums=with_checksums.checksums[:0])
    turns: dict[str, list[float]] = {"checksum": [], "with": [], "without": []}
    for _ in range(ROUNDS):
        turns["checksum"].append(measure_checksum_us(without))
        turns["with"].append(measure_image_us(with_checksums))
        turns["without"].append(measure_image_us(without))
    image_us = median(turns["without"])
    checksum_us = median(turns["checksum"])
    result = {
        "images": len(without),
        "mean_bytes": int(without.rows["length"].mean()),
        "image_us": round(image_us, 1),
        "checksum_us": round(checksum_us, 2),
        "share": round(checksum_us / image_us, 5),
        "with_over_without": round(median(turns["with"]) / image_us, 4),
    }
    record("checksums", result | describe_load())


def measure_checksum_us(index: Index) -> float:
    """Return the processor time of the checksum of an image that was just read, in microseconds."""
    spent = 0
    for i in range(len(index)):
        image = index.read(i)
        began = time.thread_time_ns()
        compute_crc(image)
        spent += time.thread_time_ns() - began
    return spent / len(index) / 1e3


def measure_image_us(index: Index) -> float:
    """Return the processor time of an image at 224 px, in microseconds, over an epoch."""
    settings = recipe(epochs=1, global_batch_images=BATCH)
    count = 0
    with make_loader(index, settings, Execution()) as loader:
        began = time.process_time()
        for batch in loader.batches(plan_training(index, settings, 0)):
            count += len(batch.labels)
        return (time.process_time() - began) / count * 1e6


if __name__ == "__main__":
    main()
