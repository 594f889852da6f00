"""Measure what a change of the size of training images costs: the first step at each size, which
compiles, next to the steps after it.

In processor seconds of this process and of its compilers, because they stay comparable on a
machine that also does other things.
"""

import os

from lockstep.recipes import Execution
from measuring import BATCH, describe_load, engine, make_batch, make_parser, median, recipe, record

SIZES = (160, 192)
STEPS = 3


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"))
    arguments = parser.parse_args()
    how = {"backend": arguments.backend, "compile": arguments.compile}
    settings = recipe(precision="fp32", image_sizes=[[0, SIZES[0]], [1, SIZES[1]]])
    built, _ = engine(settings, Execution.of(how))
    result: dict[str, object] = {"images": BATCH, "steps": STEPS}
    for size in SIZES:
        batch = make_batch(size)
        seconds = []
        for step in range(1 + STEPS):
            began = measure_processor_sec()
            built.fetch(built.train([batch], step))
            seconds.append(measure_processor_sec() - began)
        result[f"first step at {size} px"] = round(seconds[0], 2)
        result[f"later steps at {size} px"] = round(median(seconds[1:]), 2)
    name = f"image_sizes_{arguments.backend}_compile_{arguments.compile}"
    record(name, result | describe_load(), arguments.backend)


def measure_processor_sec() -> float:
    """Return the processor time of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
