"""Measure how rounding grows during training.

The reference engine trains in float64, and again ten times with initial weights that are changed by
half a unit of float32. For every peak rate, the script records 1 - cosine between the velocities of
such a run and the first one after some of the twenty steps, and the largest difference of their
losses: the smallest and the largest of the ten values. No framework is involved: the growth comes
from the mathematics of the network, not from an engine.
"""

import numpy as np

from lockstep import backends
from lockstep.data import Batch
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.recipes.schedule import learning_rates
from lockstep.verification.bounds import angle
from measuring import recipe, record

STEPS = 20
BATCH = 16
CONTROLS = 10
SHOWN = (0, 1, 2, 5, 10, 19)
Arrays = dict[str, np.ndarray]


def run(recipe: Recipe, state: State, batches: list[Batch]) -> tuple[list[Arrays], np.ndarray]:
    """Train, and return the velocities after every step and the losses."""
    backend = backends.load("reference")
    execution = Execution(backend="reference")
    world = backend.world(execution)
    velocities = []
    losses = []
    with backend.engine(
        recipe, learning_rates(recipe, steps_per_epoch=1), world, execution
    ) as engine:
        engine.write(state)
        for step, batch in enumerate(batches):
            losses.append(engine.fetch(engine.train([batch], step)).losses[0])
            velocities.append(engine.read().momentum)
    return velocities, np.array(losses)


def change_weights(state: State, seed: int) -> State:
    """Return the state with every weight changed by up to half a unit in float32's last place."""
    random = np.random.default_rng(seed)
    tensors = {
        name: (value * (1 + random.uniform(-6e-8, 6e-8, value.shape))).astype(np.float32)
        for name, value in state.tensors.items()
    }
    return State(0, tensors, state.momentum)


def ends(values: list[float]) -> list[float]:
    """Return the smallest and the largest value, rounded."""
    return [float(f"{value:.1e}") for value in (min(values), max(values))]


def main() -> None:
    random = np.random.default_rng(1)
    batches = []
    for _ in range(STEPS):
        patches = (
            random.integers(0, 256, (BATCH, 8, 8, 3), dtype=np.uint8)
            .repeat(8, axis=1)
            .repeat(8, axis=2)
        )
        batches.append(Batch(patches, random.integers(0, 1000, BATCH)))
    rows = {}
    for peak in (1e-5, 1e-4, 1e-3, 1e-2):
        narrow = recipe(
            model=narrow_model(MODELS["resnet50"]),
            precision="fp32",
            image_size=64,
            epochs=STEPS,
            lr=peak,
            warmup_epochs=5.0,
        )
        state = initial_state(narrow)
        one = run(narrow, state, batches)
        others = [run(narrow, change_weights(state, seed), batches) for seed in range(CONTROLS)]
        rows[f"{peak:.0e}"] = {
            "1 - cosine after step": {
                s: ends([angle(other[0][s], one[0][s]) for other in others]) for s in SHOWN
            },
            "losses": ends([float(np.abs(other[1] / one[1] - 1).max()) for other in others]),
        }
    what = f"narrow resnet50 at 64 px, {BATCH} images, {STEPS} steps, by peak rate"
    record("rounding", {"what": f"{what}: smallest and largest of {CONTROLS} controls", **rows})


if __name__ == "__main__":
    main()
