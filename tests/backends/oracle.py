"""The expected results of an engine: the reference engine in float64. `test_reference` compares it
with autograd.

A computation is done once for all engines: results are kept, read-only, by a digest of all inputs.

There are N images of H x W pixels and K logits.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from lockstep import backends
from lockstep.data import Batch
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe

Arrays = dict[str, np.ndarray]

_ROLES = (
    (r"^fc\.weight$", "fc_weight"),
    (r"^fc\.bias$", "fc_bias"),
    (r"running_mean$", "bn_mean"),
    (r"running_var$", "bn_var"),
    (r"se\.fc[12]\.bias$", "se_bias"),
    (r"^conv1\.[036]\.weight$", "conv_weight"),
    (r"(bn\d|downsample\.1|downsample\.2|^conv1\.[14])\.weight$", "bn_scale"),
    (r"(bn\d|downsample\.1|downsample\.2|^conv1\.[14])\.bias$", "bn_bias"),
    (r"(conv\d|downsample\.0|se\.fc[12])\.weight$", "conv_weight"),
)


def role(name: str) -> str:
    """Return the role of a tensor with one of torchvision's or timm's names. A kernel
    `downsample.1.weight`, after an average pool, counts as a scale: nothing here asks for it."""
    return next(role for pattern, role in _ROLES if re.search(pattern, name))


def is_statistic(name: str) -> bool:
    return role(name) in ("bn_mean", "bn_var")


def rate_factor(recipe: Recipe, name: str) -> float:
    """Return the factor of a parameter's learning rate; 0 if it is frozen."""

    def fits(prefix: str) -> bool:
        pattern = r"(?!fc\.)" if prefix == "backbone" else rf"{re.escape(prefix)}(\.|$)"
        return re.match(pattern, name) is not None

    if any(map(fits, recipe.frozen)):
        return 0.0
    multiplier = 1.0
    for prefix in sorted(recipe.lr_multipliers, key=lambda text: (text != "backbone", len(text))):
        if fits(prefix):
            multiplier = recipe.lr_multipliers[prefix]
    layers = recipe.spec.layers
    depth = 0 if name.startswith("fc.") else sum(layers) + 1
    if place := re.match(r"layer(\d)\.(\d+)\.", name):
        stage = int(place[1])
        depth = sum(layers[stage - 1 :]) - int(place[2])
    return multiplier * recipe.lr_depth_decay**depth


def log_softmax(logits_NK: np.ndarray) -> np.ndarray:
    shifted = logits_NK.astype(np.float64) - logits_NK.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def places(logits_NK: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the position of each label among classes sorted by decreasing logit, ties by class:
    int64 [N]."""
    order = np.argsort(-logits_NK, axis=1, kind="stable")
    return np.argmax(order == labels[:, None], axis=1)


@dataclass(frozen=True)
class Trained:
    """The state after some steps, and their results."""

    state: State
    losses: np.ndarray
    top1: int
    top5: int


def train(
    recipe: Recipe,
    state: State,
    batches: Sequence[Batch],
    rates: Sequence[float],
    parts: int = 1,
    masks: Mapping[str, np.ndarray] | None = None,
    scales: Mapping[str, float] | None = None,
) -> Trained:
    """Return the results of training steps from `state.step` on without rounding, each computed in
    `parts`.

    With `scales`, weights and inputs are quantised.
    """

    def compute() -> Trained:
        with make_engine(recipe, rates, parts) as engine:
            engine.write(state)
            engine.mask(masks or {})
            if scales is not None:
                engine.quantise(scales)
            interval = engine.fetch(engine.train(batches, state.step))
            end = engine.read()
        for values in (end.tensors, end.momentum, end.ema):
            for value in values.values():
                value.setflags(write=False)
        return Trained(end, interval.losses, interval.counts.top1, interval.counts.top5)

    drawn = [vars(batch) for batch in batches]
    return _cache(
        compute, recipe, vars(state), drawn, np.asarray(rates, np.float64), parts, masks, scales
    )


def logits(
    recipe: Recipe,
    tensors: Arrays,
    images_NHWC: np.ndarray,
    scales: Mapping[str, float] | None = None,
) -> np.ndarray:
    """Return the logits in evaluation: float32 [N, K]. With `scales`, weights and inputs are
    quantised."""

    def compute() -> np.ndarray:
        velocity = {
            name: np.zeros_like(value) for name, value in tensors.items() if not is_statistic(name)
        }
        with make_engine(recipe.replace(ema_decay=0.0), [0.0]) as engine:
            engine.write(State(0, tensors, velocity))
            if scales is not None:
                engine.quantise(scales)
            logits = engine.predict(images_NHWC)
        logits.setflags(write=False)
        return logits

    return _cache(compute, recipe, tensors, images_NHWC, scales)


Result = TypeVar("Result")
_results: dict[str, Any] = {}


def _cache(compute: Callable[[], Result], *inputs: object) -> Result:
    """Return the result for these inputs. It is computed only once."""
    key = hashlib.sha256(compute.__qualname__.encode())
    for value in inputs:
        _add(key, value)
    digest = key.hexdigest()
    if digest not in _results:
        _results[digest] = compute()
    return _results[digest]


def _add(key: "hashlib._Hash", value: object) -> None:
    """Add a value to a digest: numbers, arrays, recipes, and lists and mappings of them."""
    if isinstance(value, np.ndarray):
        key.update(f"{value.shape} {value.dtype}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for name, item in value.items():
            key.update(f"{name}:".encode())
            _add(key, item)
    elif isinstance(value, list):
        for item in value:
            _add(key, item)
    else:
        key.update(f"{value!r};".encode())


def make_engine(recipe: Recipe, rates: Sequence[float], parts: int = 1) -> Any:
    """Return the reference engine in float64. It quantises if it gets scales."""
    backend = backends.load("reference")
    execution = Execution(accumulation_steps=parts)
    exact = recipe.replace(precision="fp32")
    return backend.engine(exact, np.asarray(rates, np.float64), backend.world(execution), execution)
