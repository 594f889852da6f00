"""Compare the host loader with DALI's random-crop decoder, a DataLoader with Pillow and tf.data, on
1 and 2 cores; with RandAugment, with a DataLoader in which Pillow does the same operations.

    python -m benchmarks.loaders --data DIR

With --loaders, compare only these, print JSON and record nothing.
"""

import json
from typing import Any

from benchmarks.loaders.contenders import AUGMENTATIONS, CONTENDERS, PROGRAM, check_images
from benchmarks.measuring import make_parser, record
from lockstep.benchmark.loader import Work, compare


def main(words: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "Folder of JPEGs by class, in RGB or greyscale, not CMYK.")
    add = parser.add_argument
    add("--augmented", action="store_true", help="Measure the loaders with RandAugment alone.")
    add("--loaders", type=lambda text: text.split(","), metavar="A,B", help="Compare only these.")
    add("--threads", type=int, default=2, help="Cores of the loaders of --loaders.")
    add("--batch", type=int, default=64, help="Images in each batch.")
    add("--size", type=int, default=224, help="Height and width of the output images, in pixels.")
    add("--turns", type=int, default=3, help="Measurements of each loader; the loaders alternate.")
    add("--seconds", type=float, default=5.0, help="Length of one measurement.")
    options = parser.parse_args(words)

    def measure(names: list[str], threads: int) -> dict[str, Any]:
        shape = (options.batch, options.size, options.seconds)
        work = Work(str(options.data), threads, *shape)
        check_images(work)
        return compare(names, work, options.turns, loaders=CONTENDERS, program=PROGRAM)

    if options.loaders is not None:
        print(json.dumps(measure(options.loaders, options.threads), indent=1))
        return
    augmented = [name for name in CONTENDERS if name.endswith(tuple(AUGMENTATIONS))]
    plain = [name for name in CONTENDERS if name not in augmented]
    names = augmented if options.augmented else plain
    results = {f"{threads} threads": measure(names, threads)["results"] for threads in (1, 2)}
    what = (
        f"images a second, {options.size} px random crops in batches of {options.batch}; medians of"
        f" {options.turns} turns of {options.seconds:g} s"
    )
    if options.augmented:
        record("loaders_randaugment", {"what": what, **results, **divide_augmented(results)})
    else:
        record("loaders", {"what": what, **results, **divide_plain(results)})


def divide_plain(results: dict[str, Any]) -> dict[str, Any]:
    both = results["2 threads"]
    rates = {name: result["images_per_sec"] for name, result in both.items()}
    return {
        "host_over": {
            name: round(rates["host"] / rate, 2) for name, rate in rates.items() if name != "host"
        },
        "host_2_threads_over_1": round(
            rates["host"] / results["1 threads"]["host"]["images_per_sec"], 2
        ),
    }


def divide_augmented(results: dict[str, Any]) -> dict[str, Any]:
    """Return the host loader over the DataLoader in images a second, and the reverse in processor
    time of an image."""
    over: dict[str, Any] = {}
    for threads, result in results.items():
        for name in AUGMENTATIONS:
            host = result[f"host-{name}"]
            peer = result[f"torch-pillow-{name}"]
            over[f"{name}, {threads}"] = {
                "images_per_sec": round(host["images_per_sec"] / peer["images_per_sec"], 2),
                "cpu_ms": round(peer["cpu_ms"] / host["cpu_ms"], 2),
            }
    return {"host_over_torch_pillow": over}


if __name__ == "__main__":
    main()
