"""Tests for every engine: published models at full width, against mathematics in float64
(`oracle`).

Depth and width multiply rounding. A stride or a group that is wrong in a single stage is found
here. Only a soak has all of their layers: a stage repeats its second block. Everything
that does not depend on size (rules of the update, precisions, loss scaling) is tested on narrow
models. Steps start from `draw_steady_state`. Logits are computed from `draw_state`, since switching
ReLUs do not make them jump.
"""

from dataclasses import replace

import numpy as np
import pytest

from lockstep.data import Batch
from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import PUBLISHED, RATES, Step, all_bits, compare_changes, statistics
from tests.backends.conftest import Start, for_frameworks
from tests.backends.drawing import draw_batches, draw_images, draw_state, draw_steady_state
from tests.soak import SOAK, in_a_soak

# The reference is compared with itself in float64 on narrow models.
pytestmark = [pytest.mark.slow, for_frameworks]

MASKED = ("conv1.weight", "layer2.0.conv2.weight", "layer4.0.downsample.0.weight", "fc.weight")

STEP = Step({"model": "resnext101-32x4d", "logits": 1000}, mixup="batch", size=64, is_steady=True)
"""The deepest model. A step of resnet50 is part of the run below."""


def shorten(name: str) -> ModelSpec:
    """Return every shape, width and stride of a model, in few layers."""
    return replace(MODELS[name], layers=(1, 2, 1, 1))


@in_a_soak  # a narrow model with all stages and groups does such a step
def test_a_step_of_a_full_model_is_that_of_float64(start: Start, tiny_recipe: Recipe) -> None:
    recipe, state, batch = STEP.begin(tiny_recipe, count=4)
    engine = start(recipe, state)
    interval = engine.fetch(engine.train([batch], 0))
    end = engine.read()
    expected = oracle.train(recipe, state, [batch], RATES)
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)
    assert distance(end.momentum, expected.state.momentum) < BOUNDS["steady gradient"].value
    assert distance(statistics(end), statistics(expected.state)) < BOUNDS["full statistics"].value


# In a soak, resnet50 is in the run below, too.
@pytest.mark.parametrize("name", PUBLISHED if SOAK else PUBLISHED[-1:])
def test_full_logits_are_those_of_float64(start: Start, tiny_recipe: Recipe, name: str) -> None:
    recipe = tiny_recipe.replace(model=name if SOAK else shorten(name), logits=1000)
    state = draw_state(recipe)
    images = draw_images(2, 224 if SOAK else 64)
    labels = np.array([3, 999])
    engine = start(recipe, state)
    expected = oracle.logits(recipe, state.tensors, images)
    assert distance(engine.predict(images), expected) < BOUNDS["full logits"].value
    scores = engine.evaluate([Batch(images, labels)])
    losses = -oracle.log_softmax(expected)[np.arange(2), labels]
    assert scores.losses == pytest.approx(losses, rel=BOUNDS["full loss"].value)
    assert scores.predictions.tolist() == expected.argmax(axis=1).tolist()


def test_a_full_model_with_all_options_resumes(start: Start, tiny_recipe: Recipe) -> None:
    model = "resnet50" if SOAK else shorten("resnet50")
    recipe = tiny_recipe.replace(model=model, logits=1000, ema_decay=0.9, weight_decay=0.01)
    state = draw_steady_state(recipe)
    batches = draw_batches(recipe, 2, count=4, size=64, mixup="batch")
    masks = {
        name: np.arange(state.tensors[name].size).reshape(state.tensors[name].shape) % 4 < 2
        for name in MASKED
    }
    engine = start(recipe, state, accumulation_steps=2)
    engine.mask(masks)
    losses = engine.fetch(engine.train(batches[:1], 0)).losses
    middle = engine.read()
    losses = np.concatenate([losses, engine.fetch(engine.train(batches[1:], 1)).losses])
    end = engine.read()
    expected = oracle.train(recipe, state, batches, RATES, 2, masks)
    assert losses == pytest.approx(expected.losses, rel=BOUNDS["full loss"].value)
    assert compare_changes(end, expected.state, state) < BOUNDS["trajectory"].value
    assert distance(end.momentum, expected.state.momentum) < BOUNDS["trajectory"].value
    assert distance(end.ema, expected.state.ema) < BOUNDS["full statistics"].value
    assert not any(end.tensors[name][~mask].any() for name, mask in masks.items())
    engine.write(middle)
    engine.train(batches[1:], 1)
    assert all_bits(engine.read()) == all_bits(end)
