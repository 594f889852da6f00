"""What an engine found against what the reference found, against definitions and against bounds."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lockstep.models import model_spec, tensors
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, angle, deviation, distance, largest
from lockstep.verification.workload import DECAY, Arrays, Workload, part


@dataclass(frozen=True)
class Row:
    """One quantity of one engine."""

    quantity: str
    largest: float
    """Largest absolute difference of any value."""
    relative: float
    """The difference in relation to what is expected, as `measure` says."""
    measure: str
    bound: float
    why: str
    """Why the bound is what it is."""

    @property
    def passed(self) -> bool:
        """Whether the relative difference is within the bound; NaN and infinity are not."""
        return bool(self.relative <= self.bound)

    def fields(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self) | {"passed": self.passed}


Measure = Callable[[Arrays, Arrays], float]
_MEASURES: dict[str, Measure] = {
    "of the largest value": distance,
    "of the length": deviation,
    "1 - cosine": angle,
}


def compare(found: Arrays, reference: Arrays, workload: Workload, full: bool) -> list[Row]:
    """Return a row for every quantity of an engine; `found` and `reference` are what workers left."""
    recipe, rate = workload.recipe, workload.large_rates[workload.telling_step]
    low = _low_precision(recipe)
    # These three follow from what the engine itself found, so that no rounding of a gradient hides them.
    decay = {
        tensor.name: DECAY * (tensor.role in recipe.weight_decay_roles) * workload.state.tensors[tensor.name]
        for tensor in tensors(model_spec(recipe.model), recipe.logits)
        if tensor.is_trained
    }
    momentum = {name: recipe.momentum * value for name, value in part(found, "gradient").items()}
    update = {name: -rate * value for name, value in part(found, "velocity").items()}

    def row(quantity: str, bound: str, measure: str, expected: Arrays | None = None) -> Row:
        """Compare the arrays of a quantity, or the one array, with the reference's."""
        actual = part(found, quantity) or {"": found[quantity]}
        expected = expected or part(reference, quantity) or {"": reference[quantity]}
        limit = BOUNDS[bound]
        shapes = [{name: value.shape for name, value in arrays.items()} for arrays in (actual, expected)]
        if shapes[0] != shapes[1]:
            return Row(quantity, np.inf, np.inf, measure, limit.value, "there are more or fewer values than expected")
        off = max(largest(actual[name] - value) for name, value in expected.items())
        return Row(quantity, off, _MEASURES[measure](actual, expected), measure, limit.value, limit.why)

    value, length, direction = _MEASURES
    return [
        row("logits", f"{low} logits" if low else "full logits" if full else "logits", value),
        row("evaluation", f"{low} loss" if low else "loss", value),
        row("loss", f"{low} loss" if low else "loss", value),
        row("statistics", f"{low} statistics" if low else "statistics", value),
        row("gradient", f"{low} angle" if low else "gradient", direction if low else length),
        row("decay", "decay", value, decay),
        row("momentum", "momentum", value, momentum),
        row("update", "move", value, update),
        row("weights", f"{low} angle" if low else "free run", direction if low else length),
        row("losses", f"{low} loss" if low else "losses", value),
    ]


def _low_precision(recipe: Recipe) -> str:
    """Return whose bounds hold; TensorFloat-32 has fp16's 11 bits."""
    return {"fp32": "", "tf32": "fp16"}.get(recipe.precision, recipe.precision)


def between(found: dict[str, Arrays], full: bool) -> Row:
    """Return how far the logits of the two engines are apart that differ most."""
    limit = BOUNDS["full logits" if full else "logits"]
    names = list(found)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    a, b = max(pairs, key=lambda pair: distance(found[pair[0]]["logits"], found[pair[1]]["logits"]))
    off = found[a]["logits"] - found[b]["logits"]
    apart = distance(found[a]["logits"], found[b]["logits"])
    return Row(f"logits of {a} and {b}", largest(off), apart, "of the largest value", 2 * limit.value, limit.why)


def compare_loaders(found: Arrays, expected: Arrays) -> dict[str, Any]:
    """Return whether a loader takes the same images, windows and flips, and how far its pixels are off (0 to 255)."""
    planned = ("samples", "windows", "flips")
    same = {name: np.array_equal(found[f"loader {name}"], expected[f"loader {name}"]) for name in planned}
    pixels = [arrays["loader pixels"] for arrays in (found, expected)]
    alike = pixels[0].shape == pixels[1].shape
    off = int(np.abs(pixels[0].astype(np.int16) - pixels[1]).max()) if alike else 255
    return same | {"largest_pixel_difference": off, "passed": all(same.values()) and off <= PIXEL_BOUND}


PIXEL_BOUND = 3
"""Of 255: two versions of libjpeg-turbo or OpenCV may round otherwise; the same ones give the same pixels."""
