"""Short runs for any number of processes, for example:

    python -m tests.backends.workers BACKEND HOW tests.backends.ranks BACKEND HOW FOLDER [NAME...]

HOW is native or horovod.

Every process writes its results to FOLDER/<rank>.pickle.
"""

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.backends import Backend, World
from lockstep.data import Batch
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import BatchPlan, evaluation_plans, training_plans
from tests.backends.cases import BINARY, RATES, WEIGHTED
from tests.backends.drawing import draw_images, draw_state
from tests.conftest import TINY
from tests.processes import listening, wait_until
from tests.soak import SOAK

IMAGES = draw_images(64)
LABELS = np.random.default_rng(3).integers(0, 10, 64)
SIZES = np.full((64, 2), 32)
TO_EVALUATE = 13
STEPS = 4
RECIPE = TINY.replace(
    global_batch_images=16,
    mixup_alpha=0.4,
    cutmix_alpha=1.0,
    mixup_coefficient="sample",
    mixup_pairing="reverse",
    seed=1,
)
"""Mixing by reversal pairs the same images for any number of ranks."""


@dataclass(frozen=True)
class Scenario:
    """A run of `STEPS` steps, with an evaluation in the middle and at the end."""

    recipe: Recipe
    execution: dict[str, Any] = field(default_factory=dict)
    poisoned: bool = False
    """Whether rank 1 has infinite coefficients in step 1."""


SCENARIOS = {
    "local": Scenario(RECIPE.replace(ema_decay=0.9, **BINARY)),
    "local in parts": Scenario(RECIPE, {"accumulation_steps": 2}),
    "synchronised": Scenario(
        RECIPE.replace(
            batch_norm="synchronised", dropout=0.25, stochastic_depth=0.5, clip_norm=1.0, **WEIGHTED
        )
    ),
    "sent in bf16": Scenario(RECIPE.replace(**BINARY), {"all_reduce_precision": "bf16"}),
    "synchronised bf16 in parts": Scenario(
        RECIPE.replace(batch_norm="synchronised", precision="bf16"), {"accumulation_steps": 2}
    ),
    "overflow": Scenario(
        RECIPE.replace(precision="fp16", loss_scaling="dynamic", loss_scale=64.0, optimizer="lamb"),
        poisoned=True,
    ),
    "compiled": Scenario(RECIPE, {"compile": "on", "accumulation_steps": 2}),
}
LEFT_OUT = () if SOAK else ("local in parts", "synchronised bf16 in parts")
"""Scenarios whose properties others have, too."""
UNCOMPILED = tuple(name for name in SCENARIOS if name not in ("compiled", *LEFT_OUT))


def carry_out(scenario: Scenario, backend: Backend, world: World, **changes: Any) -> dict[str, Any]:
    """Return the intervals, the state and the scores of a run, as this rank sees them."""
    execution = Execution.of({"compile": "off"} | scenario.execution | changes)
    recipe = scenario.recipe
    share = {"rank": world.rank, "ranks": world.ranks}
    parts = execution.accumulation_steps
    plans = islice(training_plans(recipe, SIZES, 0, **share, parts=parts), STEPS)
    batches = (
        _poison(batch, scenario, world, step) for step, batch in enumerate(map(_batch, plans))
    )
    with backend.engine(recipe, np.asarray(RATES), world, execution) as engine:
        engine.write(draw_state(recipe))
        first = engine.train(islice(batches, 2), 0)
        engine.evaluate(images_to_evaluate(recipe, world))
        middle = engine.read()
        rest = list(batches)
        intervals = [engine.fetch(first), engine.fetch(engine.train(rest, 2))]
        state = engine.read()
        engine.write(middle)
        engine.train(rest, 2)
        return {
            "resumed": engine.read(),
            "intervals": intervals,
            "state": state,
            "scores": engine.evaluate(images_to_evaluate(recipe, world), with_logits=True),
            "ema scores": (
                engine.evaluate(images_to_evaluate(recipe, world), ema=True, with_logits=True)
                if recipe.ema_decay
                else None
            ),
        }


def _batch(plan: BatchPlan) -> Batch:
    return Batch(
        IMAGES[plan.samples],
        np.where(plan.samples < 0, -1, LABELS[plan.samples]),
        **plan.batch_columns(),
    )


def _poison(batch: Batch, scenario: Scenario, world: World, step: int) -> Batch:
    if not scenario.poisoned or step != 1 or world.rank == 0:
        return batch
    infinite = np.full(len(batch.labels), np.inf, np.float32)
    return replace(batch, coefficients=infinite, target_coefficients=infinite)


def images_to_evaluate(recipe: Recipe, world: World) -> Iterator[Batch]:
    return map(
        _batch, evaluation_plans(recipe, SIZES[:TO_EVALUATE], 4, rank=world.rank, ranks=world.ranks)
    )


def main(name: str, distributed: str, folder: Path, names: list[str]) -> None:
    """Run scenarios, and exchange questions with all ranks."""
    backend = backends.load(name)
    world = backend.world(Execution.of({"device": "cpu", "distributed": distributed}))
    results: dict[str, Any] = {name: carry_out(SCENARIOS[name], backend, world) for name in names}
    world.wait()
    results["answers"] = {
        "nobody says yes": world.any(False),
        "the last says yes": world.any(world.rank == world.ranks - 1),
        "all say yes": world.any(True),
        "all say the same": world.same(-7),
        "each says its own": world.same(world.rank),
    }
    results["listening"] = listening(os.getpid())
    world.close()
    with suppress(AssertionError):  # a thread that has ended may be listed a moment longer
        wait_until(lambda: not threads_of_gloo(), 60)
    results["threads of gloo"] = threads_of_gloo()
    (folder / f"{world.rank}.pickle").write_bytes(pickle.dumps(results))


def threads_of_gloo() -> list[str]:
    """Return the names of this process's threads that exchange tensors through gloo; none without
    /proc."""
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            names.append(file.read_text().strip())
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
