"""Tests for every engine: weights that a mask keeps at 0."""

from typing import Any

import numpy as np
import pytest

from lockstep.backends import Engine
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import FP16, RATES, Arrays, all_bits, bits, compare_changes, parameters
from tests.backends.conftest import Start
from tests.backends.drawing import draw_batch, draw_batches, draw_state, draw_steady_state
from tests.soak import SOAK

MASKED = (
    "conv1.weight",
    "layer2.0.conv2.weight",
    "layer3.0.downsample.0.weight",
    "layer4.0.bn2.bias",
    "fc.weight",
)
"""A kernel of every kind, a batch norm's bias and the classifier."""


def two_of_four(values: np.ndarray) -> np.ndarray:
    """Keep the two largest of every four weights along the inputs, or of every row if they do not
    divide into fours."""
    by_inputs = np.abs(np.moveaxis(values, 1, -1)) if values.ndim > 1 else np.abs(values)
    rows = (
        by_inputs.reshape(-1, 4)
        if by_inputs.size % 4 == 0
        else by_inputs.reshape(-1, by_inputs.shape[-1])
    )
    keep = np.argsort(np.argsort(-rows, axis=1), axis=1) < 2
    keep = keep.reshape(by_inputs.shape)
    return np.ascontiguousarray(np.moveaxis(keep, -1, 1)) if values.ndim > 1 else keep


def half(values: np.ndarray) -> np.ndarray:
    return np.random.default_rng(values.size).random(values.shape) < 0.5


PATTERNS = {
    "two of four": two_of_four,
    "half": half,
    "nothing left": lambda values: np.zeros(values.shape, bool),
}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def make_masks(state: State, pattern: str = "two of four") -> dict[str, np.ndarray]:
    return {name: PATTERNS[pattern](state.tensors[name]) for name in MASKED}


def add_velocity(recipe: Recipe, step: int = 0) -> State:
    """Return a state in which masked weights would change without a mask: velocities, decay and
    averages are not 0."""
    state = draw_state(recipe, step=step)
    rng = np.random.default_rng(7)
    velocity = {
        name: rng.normal(0, 0.1, value.shape).astype(np.float32)
        for name, value in state.momentum.items()
    }
    return State(step, state.tensors, velocity, state.ema)


def assert_masked(state: State, masks: dict[str, np.ndarray], *, but_only: bool = True) -> None:
    """Assert that masked values are 0 and, with `but_only`, that no other values of these tensors
    are."""
    for name, mask in masks.items():
        for values in (state.tensors, state.momentum, *([state.ema] if state.ema else [])):
            assert not values[name][~mask].any(), name
            if but_only:
                assert values[name][mask].all(), name


def zero_masked(values: Arrays, masks: dict[str, np.ndarray]) -> Arrays:
    return values | {
        name: np.where(mask, values[name], np.float32(0)) for name, mask in masks.items()
    }


def start_masked(
    start: Start, recipe: Recipe, state: State
) -> tuple[Engine, dict[str, np.ndarray]]:
    masks = make_masks(state)
    engine = start(recipe, state)
    engine.mask(masks)
    return engine, masks


# Immediately


def test_a_mask_takes_effect_at_once_and_on_nothing_else(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state = add_velocity(recipe)
    engine, masks = start_masked(start, recipe, state)
    expected = State(
        state.step,
        zero_masked(state.tensors, masks),
        zero_masked(state.momentum, masks),
        zero_masked(state.ema, masks),
        state.scaler,
    )
    assert all_bits(engine.read()) == all_bits(expected)


def test_predictions_are_those_of_the_masked_weights(start: Start, tiny_recipe: Recipe) -> None:
    state = draw_state(tiny_recipe)
    images = draw_batch(tiny_recipe).images
    masks = make_masks(state)
    masked = start(tiny_recipe, state)
    masked.mask(masks)
    written = start(tiny_recipe, State(0, zero_masked(state.tensors, masks), state.momentum))
    assert masked.predict(images).tobytes() == written.predict(images).tobytes()


def test_masks_outlive_a_state_that_is_written(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state = add_velocity(recipe)
    engine, masks = start_masked(start, recipe, state)
    engine.write(state)
    assert_masked(engine.read(), masks)
    engine.train([draw_batch(recipe)], 0)
    assert_masked(engine.read(), masks)


def test_masks_are_copied(start: Start, tiny_recipe: Recipe) -> None:
    state = draw_state(tiny_recipe)
    engine, masks = start_masked(start, tiny_recipe, state)
    kept = {name: mask.copy() for name, mask in masks.items()}
    for mask in masks.values():
        mask[...] = ~mask
    engine.train([draw_batch(tiny_recipe)], 0)
    assert_masked(engine.read(), kept, but_only=False)


# Through training


@every_pattern
def test_masked_weights_stay_0_in_training(start: Start, tiny_recipe: Recipe, pattern: str) -> None:
    recipe = tiny_recipe.replace(
        ema_decay=0.9, weight_decay=0.1, weight_decay_roles=("conv_weight", "bn_bias", "fc_weight")
    )
    state = add_velocity(recipe)
    engine = start(recipe, state)
    masks = make_masks(state, pattern)
    engine.mask(masks)
    for step, batch in enumerate(draw_batches(recipe, 4, mixup="sample")):
        engine.train([batch], step)
        assert_masked(engine.read(), masks, but_only=False)


# Without the pattern "nothing left": a batch norm after a kernel of zeros divides rounding by the
# root of its epsilon.
@pytest.mark.parametrize("pattern", ["two of four", *(["half"] if SOAK else [])])
@pytest.mark.parametrize("parts", [1, 2] if SOAK else [2])
def test_other_weights_go_where_float64_goes(
    start: Start, tiny_recipe: Recipe, pattern: str, parts: int
) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    state = draw_steady_state(recipe)
    batches = draw_batches(recipe, 5, mixup="sample")
    engine = start(recipe, state, accumulation_steps=parts)
    masks = make_masks(state, pattern)
    engine.mask(masks)
    engine.train(batches, 0)
    end = engine.read()
    expected = oracle.train(recipe, state, batches, RATES, parts, masks).state
    assert_masked(end, masks, but_only=False)
    assert compare_changes(end, expected, state) < BOUNDS["trajectory"].value
    assert distance(end.ema, expected.ema) < BOUNDS["trajectory"].value


def test_a_mask_that_keeps_everything_changes_nothing(start: Start, tiny_recipe: Recipe) -> None:
    ends = []
    batches = draw_batches(tiny_recipe, 3)
    for masked in (False, True):
        engine = start(tiny_recipe)
        if masked:
            engine.mask(
                {name: np.ones_like(value, bool) for name, value in engine.read().momentum.items()}
            )
        engine.train(batches, 0)
        ends.append(all_bits(engine.read()))
    assert ends[0] == ends[1]


def test_a_run_with_masks_goes_on_to_the_same_bits(start: Start, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9)
    batches = draw_batches(tiny_recipe, 4)
    masks = make_masks(draw_state(recipe))
    first = start(recipe)
    second = start(recipe, new=True)
    for engine in (first, second):
        engine.mask(masks)
    first.train(batches[:2], 0)
    second.write(first.read())
    second.train(batches[2:], 2)
    first.write(draw_state(recipe))
    first.train(batches, 0)
    assert all_bits(second.read()) == all_bits(first.read())


# Other masks


def test_new_masks_replace_those_set_before(start: Start, tiny_recipe: Recipe) -> None:
    state = draw_state(tiny_recipe)
    engine, masks = start_masked(start, tiny_recipe, state)
    other = {"layer4.0.bn2.bias": ~masks["layer4.0.bn2.bias"]}
    engine.mask(other)
    engine.train([draw_batch(tiny_recipe)], 0)
    end = engine.read()
    assert_masked(end, other)
    assert end.tensors["conv1.weight"].all()


def test_no_masks_let_all_weights_move_again(start: Start, tiny_recipe: Recipe) -> None:
    state = draw_state(tiny_recipe)
    engine, _ = start_masked(start, tiny_recipe, state)
    engine.mask({})
    engine.train([draw_batch(tiny_recipe)], 0)
    for name in MASKED:
        assert engine.read().tensors[name].all()


# What does not fit


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (
            {"fc.weights": np.ones((10, 32), bool)},
            "no parameter 'fc.weights'. Did you mean fc.weight",
        ),
        ({"fc.weight": np.ones((32, 10), bool)}, r"fc.weight is \(32, 10\), expected \(10, 32\)"),
        ({"conv1.weight": np.ones((8, 3), bool)}, "conv1.weight"),
        ({"bn1.running_mean": np.ones(8, bool)}, "bn1.running_mean"),
    ],
    ids=["unknown", "transposed", "too few axes", "a statistic"],
)
def test_masks_that_do_not_fit_are_refused(
    start: Start, tiny_recipe: Recipe, masks: dict[str, np.ndarray], message: str
) -> None:
    engine = start(tiny_recipe)
    before = all_bits(engine.read())
    with pytest.raises(CheckpointError, match=message):
        engine.mask({"bn1.bias": np.zeros(8, bool)} | masks)
    assert all_bits(engine.read()) == before


# Overflows


def dynamic(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.replace(**FP16, loss_scaling="dynamic", loss_scale=1024.0, **changes)


def test_masks_hold_when_a_step_is_skipped(start: Start, tiny_recipe: Recipe) -> None:
    recipe = dynamic(tiny_recipe, ema_decay=0.9).replace(loss_scale=2.0**60)
    state = add_velocity(recipe)
    engine, masks = start_masked(start, recipe, state)
    engine.train([draw_batch(recipe)], 0)
    end = engine.read()
    assert end.scaler["scale"] == 2.0**59
    assert bits(parameters(end)) == bits(zero_masked(parameters(state), masks))
    assert bits(end.momentum) == bits(zero_masked(state.momentum, masks))


@pytest.mark.parametrize("loss_scaling", ["static", "dynamic"])
def test_an_infinite_gradient_behind_a_mask_does_no_harm(
    start: Start, tiny_recipe: Recipe, loss_scaling: str
) -> None:
    # One feature is a thousand, so that in fp16 only the scaled gradients of its weights are too
    # large.
    recipe = tiny_recipe.replace(**FP16, loss_scaling=loss_scaling, loss_scale=1024.0)
    state = draw_state(recipe)
    batch = draw_batch(recipe)
    bias = state.tensors["layer4.0.bn3.bias"].copy()
    mask = np.ones_like(state.tensors["fc.weight"], bool)
    bias[5], mask[:, 5] = 1000, False
    state = State(
        0,
        zero_masked(state.tensors | {"layer4.0.bn3.bias": bias}, {"fc.weight": mask}),
        state.momentum,
    )
    ends = []
    for masks in ({}, {"fc.weight": mask}):
        engine = start(recipe, state)
        engine.mask(masks)
        engine.train([batch], 0)
        ends.append(engine.read())
    without, end = ends
    if loss_scaling == "dynamic":
        assert (without.scaler["scale"], end.scaler["scale"]) == (512.0, 1024.0)
    else:
        assert not np.isfinite(without.momentum["fc.weight"][:, 5]).all()
    assert all(
        np.isfinite(value).all() for value in (*end.tensors.values(), *end.momentum.values())
    )
    assert not end.tensors["fc.weight"][:, 5].any()
    assert end.momentum["fc.weight"][mask].all()
