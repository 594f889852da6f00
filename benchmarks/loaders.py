"""Compare the host loader with DALI's random-crop decoder, a DataLoader with Pillow and tf.data, on
1 and 2 cores."""

from lockstep.benchmark.loader import CONTENDERS, Work, compare
from measuring import make_parser, record

TURNS = 3
SECONDS = 5.0


def main() -> None:
    parser = make_parser(__doc__, "Folder of JPEGs by class, in RGB or greyscale, not CMYK.")
    data = parser.parse_args().data
    results = {
        f"{threads} threads": compare(
            list(CONTENDERS), Work(str(data), threads, 64, 224, SECONDS), TURNS
        )["results"]
        for threads in (1, 2)
    }
    both = results["2 threads"]
    rates = {name: result["images_per_sec"] for name, result in both.items()}
    record(
        "loaders",
        {
            "what": (
                f"images a second, 224 px random crops in batches of 64; medians of {TURNS} turns"
                f" of {SECONDS:g} s"
            ),
            **results,
            "host_over": {
                name: round(rates["host"] / rate, 2)
                for name, rate in rates.items()
                if name != "host"
            },
            "host_2_threads_over_1": round(
                rates["host"] / results["1 threads"]["host"]["images_per_sec"], 2
            ),
        },
    )


if __name__ == "__main__":
    main()
