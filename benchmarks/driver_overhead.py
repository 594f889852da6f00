"""Compare the training loop of a run, with its log, TensorBoard and stop requests, with the same
compiled step in a bare loop."""

import itertools
import tempfile
from pathlib import Path

import numpy as np

from lockstep.data.index import open_index
from lockstep.data.split import Sets
from lockstep.data.textures import draw_data_set
from lockstep.recipes import Execution
from lockstep.runs.context import RunContext
from lockstep.runs.loop import TrainingLoop
from lockstep.runs.recorder import Recorder
from lockstep.system.signals import StopRequests
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
ROUNDS = 12


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backend", default="torch")
    backend = parser.parse_args().backend
    settings = recipe()
    execution = Execution(backend=backend, log_every_steps=2)
    built, world = engine(settings, execution)
    batch = make_batch()
    built.fetch(built.train([batch] * 4, 0))
    with (
        tempfile.TemporaryDirectory() as folder,
        Recorder(lambda event: None) as recorder,
        StopRequests() as stop,
    ):
        out = Path(folder)
        draw_data_set(out / "data", train_images=8000, val_images=10)
        train, val = (open_index(out / "data" / split) for split in ("train", "val"))
        rates = np.full(100_000, 0.001)
        recorder.open(out, 0, rates)
        sets = Sets(train, val, out / "data", [])
        run = RunContext(settings, execution, world, built, sets, out, stop, recorder, rates)
        loop = TrainingLoop(run, itertools.repeat(batch))
        done = 0

        def training_loop() -> float:
            nonlocal done
            done += STEPS
            run.total_steps = done
            return seconds(lambda: (loop.train(done - STEPS), built.read())) / STEPS

        def bare() -> float:
            return (
                seconds(lambda: (built.fetch(built.train([batch] * STEPS, 0)), built.read()))
                / STEPS
            )

        # Both end by reading the state, because the loop returns before the device has finished
        # the last interval.

        full, plain = alternate(training_loop, bare, ROUNDS)
    record(
        "driver_overhead" if backend == "torch" else f"driver_overhead_{backend}",
        {
            "what": (
                f"seconds a step, ResNet-50, 224 px, batch {BATCH}, bf16; {ROUNDS} turns of {STEPS}"
                " steps"
            ),
            "driver_sec": round_all(full),
            "bare_loop_sec": round_all(plain),
            "driver_over_bare_loop": round(
                median(a / b for a, b in zip(full, plain, strict=True)), 4
            ),
        },
        backend,
    )


if __name__ == "__main__":
    main()
