"""Compare a backend's results with the reference's, with definitions and with bounds."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from lockstep.backends.reference import update
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.schedule import find_corrections
from lockstep.recipes.trained_tensors import rate_factors
from lockstep.verification.bounds import BOUNDS, Bound, angle, distance, largest
from lockstep.verification.workload import (
    DECAY,
    FINE_TUNING,
    OPTIMIZER_RATE,
    OPTIMIZER_STEP,
    SHOWN_OPTIMIZERS,
    Arrays,
    Workload,
    add_prefix,
    part,
)


@dataclass(frozen=True)
class Row:
    """One quantity of one backend."""

    quantity: str
    largest: float
    """Largest absolute difference of any value."""
    relative: float
    """The difference relative to the expected values, as `measure` says."""
    measure: str
    bound: float
    why: str
    """Why the bound is what it is."""

    @property
    def is_within_bound(self) -> bool:
        """Whether the relative difference is within the bound; NaN and infinity are not."""
        return bool(self.relative <= self.bound)

    def fields(self) -> dict[str, Any]:
        """Return the row as plain values. None stands for NaN and infinity, which JSON does not
        have."""
        values = {name: make_finite(value) for name, value in asdict(self).items()}
        return values | {"passed": self.is_within_bound}


def make_finite(value: Any) -> Any:
    """Return a value, or None for infinity or NaN."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


Measure = Callable[[Arrays, Arrays], float]
VALUE = "of the largest value"
DIRECTION = "1 - cosine"
_MEASURES: dict[str, Measure] = {VALUE: distance, DIRECTION: angle}


def compare(actual: Arrays, reference: Arrays, workload: Workload, full: bool) -> list[Row]:
    """Return a row for every quantity of a backend. Both arguments are what workers wrote."""
    recipe = workload.recipe
    low = _choose_precision(recipe)
    kind = _choose_bounds(recipe, full)
    direction = f"{low} direction" if low else "direction"
    sharp = DIRECTION if low else VALUE
    rows = [
        ("logits", f"{kind}logits", VALUE),
        ("evaluation", f"{_choose_bounds(recipe.evaluation_recipe(), full)}loss", VALUE),
        ("loss", f"{kind}loss", VALUE),
        ("statistics", f"{kind}statistics", VALUE),
        ("gradient", direction if low else "steady gradient", sharp),
        ("two parts", direction if low else "steady gradient", sharp),
        ("weighted loss", f"{kind}loss", VALUE),
        ("binary loss", f"{kind}loss", VALUE),
        ("initial gradient", direction, DIRECTION),
        ("frozen gradient", direction if low else "steady gradient", sharp),
        ("frozen statistics", f"{kind}statistics", VALUE),
        ("rates by tensor", "update", VALUE),
        ("weights", direction if low else "weights", sharp),
        ("moving average", f"{kind}statistics", VALUE),
        ("losses", f"{kind}loss", VALUE),
        ("decay", "decay", VALUE),
        ("momentum", "momentum", VALUE),
        ("update", "update", VALUE),
        *((f"{name} velocity", "optimizer", VALUE) for name in SHOWN_OPTIMIZERS),
        *(
            (f"{name} moments", "optimizer", VALUE)
            for name in SHOWN_OPTIMIZERS
            if OPTIMIZERS[name].has_second_moments
        ),
        *((f"{name} update", "update", VALUE) for name in SHOWN_OPTIMIZERS),
        ("counts", "exact", VALUE),
        ("state", "exact", VALUE),
    ]
    definitions = _compute_definitions(actual, workload)
    compared = []
    for quantity, bound, measure in rows:
        values = _select(actual, quantity)
        expected = definitions.get(quantity) or _select(reference, quantity)
        compared.append(_compare_quantity(quantity, values, expected, measure, BOUNDS[bound]))
    return compared


def _compute_definitions(actual: Arrays, workload: Workload) -> dict[str, Arrays]:
    """Return the quantities that follow from a definition and the backend's results, so that the
    rounding of a gradient does not hide them."""
    recipe = workload.recipe
    decay = {}
    for tensor in recipe.list_tensors():
        if tensor.is_trained:
            value = workload.state.tensors[tensor.name]
            decay[tensor.name] = DECAY * recipe.decays(tensor) * value
    left = recipe.momentum or 0.5
    # It is the first step, so that v = g, and Nesterov's g + m * v is (1 + m) * v.
    move = workload.large_rates[workload.telling_step]
    of_frozen = 1.0  # at a rate of 1
    if recipe.nesterov:
        move = move * (1 + recipe.momentum)
        of_frozen = 1 + left
    factors = rate_factors(recipe.replace(**FINE_TUNING))
    by_tensor = {
        name: -of_frozen * factors.get(name, 0.0) * value
        for name, value in part(actual, "frozen gradient").items()
    }
    images = len(workload.batches[0].labels)
    classes = np.arange(images) % recipe.logits
    hits = [(classes < 1).sum(), (classes < 5).sum(), images]
    counts = np.array([*hits, *classes[:-1], *[0] * (images - 1)])
    return {
        "decay": decay,
        "momentum": {name: left * value for name, value in part(actual, "gradient").items()},
        "rates by tensor": by_tensor,
        "update": {name: -move * value for name, value in part(actual, "velocity").items()},
        "counts": {"": counts},
        "state": {"": np.zeros_like(actual.get("state", counts))},
    } | _define_optimizer_steps(actual, workload)


def _define_optimizer_steps(actual: Arrays, workload: Workload) -> dict[str, Arrays]:
    """Return the quantities of the steps that show an optimizer, by its formulas."""
    before = workload.optimizer_state
    definitions = {}
    for name in SHOWN_OPTIMIZERS:
        recipe = workload.optimizer_recipe(name)
        velocities = part(actual, f"{name} velocity")
        moments = part(actual, f"{name} moments")
        after = replace(before, momentum=velocities, second_moments=moments)
        limited = update.clip(part(actual, "gradient"), recipe.clip_norm)
        own = find_gradients(recipe, before, after, OPTIMIZER_RATE)
        by_limited = take_step(recipe, before, limited, OPTIMIZER_STEP, OPTIMIZER_RATE)
        by_own = take_step(recipe, before, own, OPTIMIZER_STEP, OPTIMIZER_RATE)
        moves = {key: value - before.tensors[key] for key, value in by_own.tensors.items()}
        keep = 1.0 if OPTIMIZER_STEP % recipe.ema_every_steps else recipe.ema_decay
        averages = {key: (1 - keep) * value for key, value in moves.items()}
        definitions[f"{name} velocity"] = by_limited.momentum
        definitions[f"{name} moments"] = by_own.second_moments
        definitions[f"{name} update"] = moves | add_prefix("average", averages)
    return definitions


def _select(arrays: Arrays, quantity: str) -> Arrays:
    """Return the arrays of a quantity, or its only array."""
    return part(arrays, quantity) or {"": arrays[quantity]}


def _compare_quantity(
    quantity: str, actual: Arrays, expected: Arrays, measure: str, bound: Bound
) -> Row:
    if _list_shapes(actual) != _list_shapes(expected):
        why = "the number of values is not the expected one"
        return Row(quantity, np.inf, np.inf, measure, bound.value, why)
    difference = max(largest(actual[name] - value) for name, value in expected.items())
    relative = _MEASURES[measure](actual, expected)
    return Row(quantity, difference, relative, measure, bound.value, bound.why)


def _list_shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in arrays.items()}


def _choose_precision(recipe: Recipe) -> str:
    """Return the precision whose bounds apply, or "" for fp32. TensorFloat-32 has the 11 bits of
    fp16."""
    return {"fp32": "", "tf32": "fp16"}.get(recipe.precision, recipe.precision)


def _choose_bounds(recipe: Recipe, full: bool) -> str:
    """Return the prefix of those bounds' names that depend on precision or size."""
    low = _choose_precision(recipe)
    if low:
        return f"{low} "
    return "full " if full else ""


def compare_backends(results: dict[str, Arrays], recipe: Recipe, full: bool) -> Row:
    """Return how far the logits of two backends are apart, for the two that differ most."""
    limit = BOUNDS[f"{_choose_bounds(recipe, full)}logits"]
    apart = -1.0
    for (name, arrays), (other, other_arrays) in combinations(results.items(), 2):
        relative = distance(arrays["logits"], other_arrays["logits"])
        if relative > apart:
            apart = relative
            names = f"{name} and {other}"
            difference = largest(arrays["logits"] - other_arrays["logits"])
    return Row(f"logits of {names}", difference, apart, VALUE, 2 * limit.value, limit.why)


def compare_loaders(actual: Arrays, expected: Arrays) -> dict[str, Any]:
    """Return whether a loader takes the same images, windows and flips, whether all else that is
    drawn is the same and augmentations give the same pixels, and how far its pixels are off without
    them (0 to 255)."""
    same = {}
    for name in ("samples", "windows", "flips", "draws", "augmentations"):
        same[name] = np.array_equal(actual[f"loader {name}"], expected[f"loader {name}"])
    pixels = actual["loader pixels"].astype(np.int16)
    off = 255
    if pixels.shape == expected["loader pixels"].shape:
        off = int(np.abs(pixels - expected["loader pixels"]).max())
    passed = all(same.values()) and off <= BOUNDS["pixels"].value
    return same | {"largest_pixel_difference": off, "passed": passed}


def take_step(
    recipe: Recipe, before: State, gradients: Mapping[str, np.ndarray], step: int, rate: float
) -> State:
    """Return the trained tensors, their velocities and second moments after a step with number
    `step`, from 0, and limited gradients: float64."""
    after = State(step + 1, {}, {})
    tables = find_corrections(recipe, step + 1)
    corrections = {name: float(table[step]) for name, table in tables.items()}
    decays = find_decays(recipe)
    for name, factor in rate_factors(recipe).items():
        kept = (before.tensors, before.momentum, before.second_moments)
        values = update.Values(*(arrays[name].astype(np.float64) for arrays in kept if arrays))
        pace = update.Pace(rate * factor, decays[name], corrections)
        moved = update.step(recipe, values, gradients[name].astype(np.float64), pace)
        after.tensors[name] = moved.weight
        after.momentum[name] = moved.velocity
        if moved.second_moment is not None:
            after.second_moments[name] = moved.second_moment
    return after


def find_gradients(recipe: Recipe, before: State, after: State, rate: float) -> Arrays:
    """Return the limited gradients, without decay, that follow from the velocities that an engine
    computed: float64. A velocity is a mean of gradients, or the moves of RMSProp."""
    gradients = {}
    decays = find_decays(recipe)
    for name, factor in rate_factors(recipe).items():
        old = before.momentum[name].astype(np.float64)
        new = after.momentum[name].astype(np.float64)
        if OPTIMIZERS[recipe.optimizer].velocity == "mean":
            gradients[name] = (new - recipe.beta1 * old) / (1 - recipe.beta1)
        else:
            squares = after.second_moments[name].astype(np.float64)
            root = np.sqrt(squares + recipe.optimizer_epsilon)
            move = (new - recipe.momentum * old) / (rate * factor)
            gradients[name] = move * root - decays[name] * before.tensors[name]
    return gradients


def find_decays(recipe: Recipe) -> dict[str, float]:
    """Return the weight decay of every tensor."""
    table = recipe.list_tensors()
    return {tensor.name: recipe.weight_decay * recipe.decays(tensor) for tensor in table}
