"""Compare `Model.predict`, from image files to classes, with the loop of `lockstep benchmark
inference` with data.

Both decode the same files to 224 px on all cores, alternately. The network is so narrow that
decoding is most of the work: with a slower engine the ratio is nearer to 1.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lockstep
from lockstep.data.decoding.augment import resampling
from lockstep.data.index import open_index
from lockstep.data.loading.host import HostLoader
from lockstep.models.architectures import ModelSpec
from lockstep.recipes.initial_weights import initial_state
from lockstep.recipes.order import evaluation_plans
from lockstep.weights.checkpoint import write_weights
from measuring import alternate, engine, make_parser, median, recipe, record, round_all

NARROW = ModelSpec(
    block="bottleneck",
    layers=(1, 1, 1, 1),
    stem_width=8,
    widths=(8, 8, 16, 16),
    groups=2,
    expansion=2,
)
RECIPE = recipe(precision="fp32", model=NARROW)
BATCH = 32


def main() -> None:
    parser = make_parser(__doc__, "A folder of class folders, of some hundreds of images.")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    index, (computed, _) = open_index(arguments.data), engine(RECIPE)
    paths = [index.path(sample) for sample in range(len(index))]

    def benchmark() -> None:
        with HostLoader(index, **resampling(RECIPE, evaluation=True)) as loader:
            for batch in loader.batches(evaluation_plans(RECIPE, index.sizes, BATCH)):
                computed.predict(batch.images)

    def milliseconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
        began = clock()
        work()
        return 1000 * (clock() - began) / len(paths)

    result = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "weights.safetensors"
        write_weights(
            source, initial_state(RECIPE).tensors, {"recipe": RECIPE.fields(), "classes": []}
        )
        with lockstep.load(source).on(batch=BATCH) as predictor:

            def predict() -> None:
                list(predictor.predict(paths))

            benchmark()
            predict()
            for name, clock in (("wall", time.perf_counter), ("processor", time.process_time)):
                ours, theirs = alternate(
                    lambda clock=clock: milliseconds(predict, clock),
                    lambda clock=clock: milliseconds(benchmark, clock),
                    arguments.rounds,
                )
                result[f"predict_{name}_ms_per_image"] = round_all(ours)
                result[f"benchmark_{name}_ms_per_image"] = round_all(theirs)
                result[f"{name}_ratio"] = round(
                    median(b / a for a, b in zip(ours, theirs, strict=True)), 3
                )
    record("predict", {"images": len(paths)} | result)


if __name__ == "__main__":
    main()
