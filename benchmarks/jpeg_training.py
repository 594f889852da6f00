"""Compare training from JPEGs through the loader with training on one batch held in memory, on the
same engine."""

import itertools

from lockstep.data.index import open_index
from lockstep.data.loading.host import HostLoader
from lockstep.recipes.order import training_plans
from measuring import (
    BATCH,
    alternate,
    engine,
    make_batch,
    make_parser,
    median,
    recipe,
    record,
    round_all,
    seconds,
)

STEPS = 6
ROUNDS = 10


def main() -> None:
    parser = make_parser(__doc__, "Folder with images as <class>/<image>.")
    index = open_index(parser.parse_args().data)
    settings = recipe(epochs=1000)
    built, _ = engine(settings)
    held = make_batch()
    with HostLoader(index, antialias=settings.antialias) as loader:
        batches = loader.batches(training_plans(settings, index.sizes, 0))

        def train_on_jpegs() -> float:
            return (
                seconds(lambda: built.fetch(built.train(itertools.islice(batches, STEPS), 0)))
                / STEPS
            )

        def train_in_memory() -> float:
            return seconds(lambda: built.fetch(built.train([held] * STEPS, 0))) / STEPS

        train_on_jpegs()
        jpegs, memory = alternate(train_on_jpegs, train_in_memory, ROUNDS)
    record(
        "jpeg_training",
        {
            "what": (
                f"seconds a step, ResNet-50, 224 px, batch {BATCH}, bf16; {ROUNDS} turns of {STEPS}"
                " steps"
            ),
            "images": len(index),
            "from_jpegs_sec": round_all(jpegs),
            "held_batch_sec": round_all(memory),
            "speed_from_jpegs_over_held": round(
                median(b / a for a, b in zip(jpegs, memory, strict=True)), 4
            ),
        },
    )


if __name__ == "__main__":
    main()
