"""Compare the host loader with DALI's random-crop decoder, a DataLoader with Pillow and tf.data, on
1 and 2 cores; with RandAugment, with a DataLoader in which Pillow does the same operations."""

from typing import Any

from lockstep.benchmark.loader import AUGMENTATIONS, CONTENDERS, Work, compare
from measuring import make_parser, record

TURNS = 3
SECONDS = 5.0


def main() -> None:
    parser = make_parser(__doc__, "Folder of JPEGs by class, in RGB or greyscale, not CMYK.")
    parser.add_argument(
        "--augmented", action="store_true", help="Measure the loaders with RandAugment alone."
    )
    arguments = parser.parse_args()
    augmented = [name for name in CONTENDERS if name.endswith(tuple(AUGMENTATIONS))]
    plain = [name for name in CONTENDERS if name not in augmented]
    names = augmented if arguments.augmented else plain
    results = {
        f"{threads} threads": compare(
            names, Work(str(arguments.data), threads, 64, 224, SECONDS), TURNS
        )["results"]
        for threads in (1, 2)
    }
    what = (
        f"images a second, 224 px random crops in batches of 64; medians of {TURNS} turns of"
        f" {SECONDS:g} s"
    )
    if arguments.augmented:
        record("loaders_randaugment", {"what": what, **results, **_divide_augmented(results)})
    else:
        record("loaders", {"what": what, **results, **_divide_plain(results)})


def _divide_plain(results: dict[str, Any]) -> dict[str, Any]:
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


def _divide_augmented(results: dict[str, Any]) -> dict[str, Any]:
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
