"""Compare an engine's results with the reference's, with definitions and with bounds."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lockstep.models.architectures import model_spec, tensors
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, angle, distance, largest
from lockstep.verification.workload import DECAY, Arrays, Workload, part


@dataclass(frozen=True)
class Row:
    """One quantity of one engine."""

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
    def passed(self) -> bool:
        """Whether the relative difference is within the bound; NaN and infinity are not."""
        return bool(self.relative <= self.bound)

    def fields(self) -> dict[str, Any]:
        """Return the row as plain values. None stands for NaN and infinity, which JSON does not
        have."""
        return {name: finite(value) for name, value in asdict(self).items()} | {
            "passed": self.passed
        }


def finite(value: Any) -> Any:
    """Return a value, or None for infinity or NaN."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


Measure = Callable[[Arrays, Arrays], float]
VALUE = "of the largest value"
DIRECTION = "1 - cosine"
_MEASURES: dict[str, Measure] = {VALUE: distance, DIRECTION: angle}


def compare(found: Arrays, reference: Arrays, workload: Workload, full: bool) -> list[Row]:
    """Return a row for every quantity of an engine; `found` and `reference` are what workers wrote."""
    recipe = workload.recipe
    rate = workload.large_rates[workload.telling_step]
    low = _low_precision(recipe)
    kind = _kind(recipe, full)
    # These follow from the engine's own results, so that the rounding of a gradient does not hide
    # them.
    decay = {
        tensor.name: DECAY * recipe.decays(tensor) * workload.state.tensors[tensor.name]
        for tensor in tensors(model_spec(recipe.model), recipe.logits)
        if tensor.is_trained
    }
    left = recipe.momentum or 0.5
    momentum = {name: left * value for name, value in part(found, "gradient").items()}
    # It is the first step, so that v = g, and Nesterov's g + m * v is (1 + m) * v.
    move = rate * (1 + recipe.momentum if recipe.nesterov else 1)
    update = {name: -move * value for name, value in part(found, "velocity").items()}
    images = len(workload.batches[0].labels)
    classes = np.arange(images) % recipe.logits
    counts = np.array(
        [(classes < 1).sum(), (classes < 5).sum(), images, *classes[:-1], *[0] * (images - 1)]
    )

    def row(quantity: str, bound: str, measure: str, expected: Arrays | None = None) -> Row:
        """Compare the arrays of a quantity, or the one array, with the reference's."""
        actual = part(found, quantity) or {"": found[quantity]}
        expected = expected or part(reference, quantity) or {"": reference[quantity]}
        limit = BOUNDS[bound]
        shapes = [
            {name: value.shape for name, value in arrays.items()} for arrays in (actual, expected)
        ]
        if shapes[0] != shapes[1]:
            return Row(
                quantity,
                np.inf,
                np.inf,
                measure,
                limit.value,
                "there are more or fewer values than expected",
            )
        off = max(largest(actual[name] - value) for name, value in expected.items())
        return Row(
            quantity, off, _MEASURES[measure](actual, expected), measure, limit.value, limit.why
        )

    direction = f"{low} direction" if low else "direction"
    sharp = DIRECTION if low else VALUE
    return [
        row("logits", f"{kind}logits", VALUE),
        row("evaluation", f"{_kind(recipe.evaluation_recipe(), full)}loss", VALUE),
        row("loss", f"{kind}loss", VALUE),
        row("statistics", f"{kind}statistics", VALUE),
        row("gradient", direction if low else "steady gradient", sharp),
        row("two parts", direction if low else "steady gradient", sharp),
        row("initial gradient", direction, DIRECTION),
        row("weights", direction if low else "weights", sharp),
        row("moving average", f"{kind}statistics", VALUE),
        row("losses", f"{kind}loss", VALUE),
        row("decay", "decay", VALUE, decay),
        row("momentum", "momentum", VALUE, momentum),
        row("update", "update", VALUE, update),
        row("counts", "exact", VALUE, {"": counts}),
        row("state", "exact", VALUE, {"": np.zeros_like(found.get("state", counts))}),
    ]


def _low_precision(recipe: Recipe) -> str:
    """Return the precision whose bounds apply, or "" for fp32. TensorFloat-32 has the 11 bits of
    fp16."""
    return {"fp32": "", "tf32": "fp16"}.get(recipe.precision, recipe.precision)


def _kind(recipe: Recipe, full: bool) -> str:
    """Return the prefix of those bounds' names that depend on precision or size."""
    low = _low_precision(recipe)
    return f"{low} " if low else "full " if full else ""


def between(found: dict[str, Arrays], recipe: Recipe, full: bool) -> Row:
    """Return how far the logits of two engines are apart, for the two engines that differ most."""
    limit = BOUNDS[f"{_kind(recipe, full)}logits"]
    names = list(found)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    a, b = max(pairs, key=lambda pair: distance(found[pair[0]]["logits"], found[pair[1]]["logits"]))
    off = found[a]["logits"] - found[b]["logits"]
    apart = distance(found[a]["logits"], found[b]["logits"])
    return Row(f"logits of {a} and {b}", largest(off), apart, VALUE, 2 * limit.value, limit.why)


def compare_loaders(found: Arrays, expected: Arrays) -> dict[str, Any]:
    """Return whether a loader takes the same images, windows and flips, and how far its pixels are
    off (0 to 255)."""
    planned = ("samples", "windows", "flips")
    same = {
        name: np.array_equal(found[f"loader {name}"], expected[f"loader {name}"])
        for name in planned
    }
    pixels = [arrays["loader pixels"] for arrays in (found, expected)]
    alike = pixels[0].shape == pixels[1].shape
    off = int(np.abs(pixels[0].astype(np.int16) - pixels[1]).max()) if alike else 255
    return same | {
        "largest_pixel_difference": off,
        "passed": all(same.values()) and off <= BOUNDS["pixels"].value,
    }
