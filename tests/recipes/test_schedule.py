"""Learning rates against the formula of each original, written separately from the notes on its
code."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes import Recipe
from lockstep.recipes.published import NVIDIA_RECIPES, RECIPES
from lockstep.recipes.schedule import ema_decays, find_corrections, learning_rates, peak_lr
from lockstep.system.errors import RecipeError
from tests.soak import EXAMPLES

Formula = Callable[[int, int, int, int, float], float]


def paddle(step: int, per_epoch: int, epochs: int, warmup: int, peak: float) -> float:
    rising = warmup * per_epoch
    falling = (epochs - warmup) * per_epoch
    if step < rising:
        return peak * step / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / falling))


def mxnet(step: int, per_epoch: int, epochs: int, warmup: int, peak: float) -> float:
    update = step + 1
    if update < warmup * per_epoch:
        return peak * update / (warmup * per_epoch)
    return peak * 0.1 ** sum(update > boundary * per_epoch for boundary in (30, 60, 80))


def pytorch(step: int, per_epoch: int, epochs: int, warmup: int, peak: float) -> float:
    epoch = step // per_epoch
    if epoch < warmup:
        return peak * (epoch + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))


def tensorflow(step: int, per_epoch: int, epochs: int, warmup: int, peak: float) -> float:
    if step < warmup * per_epoch:
        return peak * step / (warmup * per_epoch)
    return peak * 0.5 * (1 + math.cos(math.pi * step / (epochs * per_epoch)))


FORMULAS: dict[str, tuple[Formula, int, int, float]] = {
    "resnet50-paddle-50ep": (paddle, 50, 5, 2.048),
    "resnet50-paddle-90ep": (paddle, 90, 5, 2.048),
    "resnet50-paddle-asp-90ep": (paddle, 90, 5, 2.048),
    "resnet50-paddle-tf32-50ep": (paddle, 50, 5, 2.048),
    "resnet50-paddle-tf32-90ep": (paddle, 90, 5, 2.048),
    "resnet50-paddle-qat-10ep": (paddle, 10, 5, 0.0004),
    "resnet50-mxnet-90ep": (mxnet, 90, 5, 0.65),
    "resnet50-mxnet-fp32-90ep": (mxnet, 90, 5, 0.3),
    "resnext101-32x4d-pytorch-90ep": (pytorch, 90, 8, 1.024),
    "resnext101-32x4d-pytorch-250ep": (pytorch, 250, 8, 1.024),
    "resnet50-tensorflow-90ep": (tensorflow, 90, 5, 2.048),
    "resnet50-tensorflow-250ep": (tensorflow, 250, 5, 2.048),
    "resnet50-tensorflow-tf32-90ep": (tensorflow, 90, 5, 2.048),
    "resnet50-tensorflow-fp32-90ep": (tensorflow, 90, 5, 1.024),
    "resnet50-tensorflow-fp32-250ep": (tensorflow, 250, 5, 1.024),
    "resnext101-32x4d-tensorflow-90ep": (tensorflow, 90, 5, 2.048),
    "resnext101-32x4d-tensorflow-250ep": (tensorflow, 250, 5, 1.024),
    "my-images": (paddle, 50, 3, 0.032),
    "fine-tune": (paddle, 5, 1, 0.008),
    "demo": (paddle, 5, 1, 0.02),
}


def test_a_run_of_more_steps_than_memory_holds_is_refused_with_what_to_do() -> None:
    with pytest.raises(RecipeError, match=r"900000 epochs of 5004 steps .*4,503,600,000"):
        learning_rates(Recipe(epochs=900_000), 5004)


@pytest.mark.parametrize("per_epoch", [1, 7])
@pytest.mark.parametrize("name", [*NVIDIA_RECIPES, "my-images", "fine-tune", "demo"])
def test_every_step_has_the_rate_of_its_originals_formula(name: str, per_epoch: int) -> None:
    formula, epochs, warmup, peak = FORMULAS[name]
    expected = [
        formula(step, per_epoch, epochs, warmup, peak) for step in range(epochs * per_epoch)
    ]

    rates = learning_rates(RECIPES[name](), per_epoch)

    np.testing.assert_allclose(rates, expected, rtol=1e-12, atol=1e-15)


# lr at epochs 0, 5 and 60 of 90 with 5 epochs of warm-up and a peak of 2.048, as computed from the


def test_a_cosine_is_at_half_its_height_half_way() -> None:
    rates = learning_rates(Recipe(epochs=25, warmup_epochs=5, lr=1.0, lr_end=0.2), 4)

    assert rates[(5 + 10) * 4] == pytest.approx(0.6)


def test_the_order_in_which_step_epochs_are_given_does_not_matter() -> None:
    recipe = RECIPES["resnet50-mxnet-90ep"]()

    shuffled = learning_rates(recipe.replace(lr_step_epochs=[80, 30, 60]), 3)

    np.testing.assert_array_equal(shuffled, learning_rates(recipe, 3))


def test_a_warm_up_starts_at_its_own_rate_and_rises_evenly() -> None:
    rates = learning_rates(Recipe(epochs=4, warmup_epochs=2, warmup_start_lr=0.5, lr=1.0), 5)

    np.testing.assert_allclose(rates[:10], 0.5 + 0.05 * np.arange(10))


def test_a_warm_up_may_be_a_part_of_an_epoch() -> None:
    rates = learning_rates(Recipe(epochs=4, warmup_epochs=0.5, lr=1.0), 10)

    np.testing.assert_allclose(rates[:6], [0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_without_warm_up_the_first_rate_is_the_peak() -> None:
    assert learning_rates(Recipe(epochs=4, warmup_epochs=0, lr=1.0), 5)[0] == 1.0


@pytest.mark.parametrize(
    ("name", "images", "first"),
    [
        ("resnet50-tensorflow-90ep", 511, 0.511),
        ("resnet50-tensorflow-90ep", 512, 0.0),
        ("resnext101-32x4d-pytorch-90ep", 511, 0.511),
        ("resnext101-32x4d-pytorch-90ep", 512, 0.512 / 8),
        ("resnet50-paddle-90ep", 511, 0.0),
        ("resnet50-mxnet-90ep", 256, 0.1 / 50),
    ],
)
def test_only_large_steps_warm_up_where_said(name: str, images: int, first: float) -> None:
    rates = learning_rates(RECIPES[name]().replace(global_batch_images=images), 10)

    assert rates[0] == pytest.approx(first)


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ({"lr": 0.256, "global_batch_images": 256}, 0.256),
        ({"lr": 0.256, "global_batch_images": 2048}, 2.048),
        ({"lr": 0.1, "global_batch_images": 32}, 0.0125),
        ({"lr": 0.1, "global_batch_images": 32, "lr_batch_images": 64}, 0.05),
        ({"lr": 0.1, "global_batch_images": 2048, "lr_scaling": "none"}, 0.1),
    ],
)
def test_the_peak_grows_with_the_images_of_a_step(changes: dict[str, object], peak: float) -> None:
    recipe = Recipe(epochs=10, warmup_epochs=1).replace(**changes)

    assert peak_lr(recipe) == pytest.approx(peak)
    assert learning_rates(recipe, 5).max() == pytest.approx(peak)


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_a_line_falls_evenly_from_the_peak_to_the_end(unit: str) -> None:
    rates = learning_rates(
        Recipe(epochs=5, warmup_epochs=0, lr_decay="linear", lr=1.0, lr_end=0.5, lr_unit=unit), 4
    )

    places = np.arange(20) / 20 if unit == "step" else np.repeat(np.arange(5) / 5, 4)
    np.testing.assert_allclose(rates, 1 - 0.5 * places)


def test_an_exponential_decay_by_epoch_is_that_of_nvidias_function() -> None:
    # lr_exponential_policy(base_lr, warmup_length, epochs, final_multiplier=0.001): the same factor
    # after every epoch.
    recipe = Recipe(
        epochs=12,
        warmup_epochs=2,
        warmup_counts_from=1,
        lr=0.5,
        lr_decay="exponential",
        lr_end=5e-4,
    )

    rates = learning_rates(recipe.replace(lr_unit="epoch"), 3)

    factor = 2 ** (math.log2(0.001) / 10)
    expected = [0.25, 0.5, *(0.5 * factor**epoch for epoch in range(10))]
    np.testing.assert_allclose(rates, np.repeat(expected, 3), rtol=1e-12)


@pytest.mark.parametrize(
    ("power", "half_way"), [(1, 0.6), (2, 0.4), (0.5, 0.2 + 0.8 * math.sqrt(0.5))]
)
def test_a_polynomial_decay_is_at_a_power_of_a_half_half_way(power: float, half_way: float) -> None:
    # MXNet's PolyScheduler: final_lr + (base_lr - final_lr) * (1 - x) ^ pwr.
    recipe = Recipe(
        epochs=25, warmup_epochs=5, lr=1.0, lr_end=0.2, lr_decay="polynomial", lr_power=power
    )

    rates = learning_rates(recipe, 4)

    assert rates[[20, 20 + 40]] == pytest.approx([1.0, half_way])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "decay",
    [{"lr_decay": "cosine"}, {"lr_decay": "exponential", "lr_end": 1e-9}],
    ids=["cosine", "exponential"],
)
@pytest.mark.parametrize("decay_from", ["start", "warmup_end"])
def test_a_warm_up_longer_than_the_run_is_cut_to_it(decay_from: str, decay: dict[str, Any]) -> None:
    rates = learning_rates(
        Recipe(epochs=2, warmup_epochs=50, lr=1.0, lr_decay_from=decay_from, **decay), 4
    )

    np.testing.assert_allclose(rates, np.arange(8) / 8)


def test_a_warm_up_by_epoch_longer_than_the_run_reaches_the_peak_in_its_last_epoch() -> None:
    recipe = RECIPES["resnext101-32x4d-pytorch-90ep"]().replace(epochs=4)

    np.testing.assert_allclose(
        learning_rates(recipe, 2), 1.024 * np.repeat([0.25, 0.5, 0.75, 1.0], 2)
    )


def test_a_run_of_one_step_has_a_rate() -> None:
    assert np.isfinite(learning_rates(Recipe(epochs=1), 1)).all()


@EXAMPLES
@given(
    epochs=st.integers(1, 12),
    per_epoch=st.integers(1, 9),
    warmup=st.floats(0, 15),
    unit=st.sampled_from(["step", "epoch"]),
    counts_from=st.sampled_from([0, 1]),
    decay=st.sampled_from(["cosine", "linear", "polynomial", "exponential", "step"]),
    decay_from=st.sampled_from(["start", "warmup_end"]),
)
def test_every_rate_lies_between_zero_and_the_peak(
    epochs: int,
    per_epoch: int,
    warmup: float,
    unit: str,
    counts_from: int,
    decay: str,
    decay_from: str,
) -> None:
    recipe = Recipe(
        epochs=epochs,
        lr=1.0,
        warmup_epochs=warmup,
        lr_unit=unit,
        warmup_counts_from=counts_from,
        lr_decay=decay,
        lr_decay_from=decay_from,
        lr_end=1e-3,
        lr_step_epochs=[2, 5],
    )

    rates = learning_rates(recipe, per_epoch)

    assert rates.shape == (epochs * per_epoch,)
    assert ((rates >= 0) & (rates <= 1 + 1e-12)).all()


def test_a_moving_average_soon_forgets_the_initial_weights() -> None:
    recipe = Recipe(ema_decay=0.75)
    result = ema_decays(recipe, 30)[[0, 1, 8, 25, 26, 27, 29]].tolist()
    assert result == [0.1, 2 / 11, 0.5, 26 / 35, 0.75, 0.75, 0.75]
    assert not ema_decays(Recipe(), 30).any(), "the decay is 0 without a moving average"


def test_an_average_of_every_nth_step_is_that_of_torchvisions_script() -> None:
    # Its reference script counts in an epoch, copies weights during the warm-up and once after it,
    # and derives the decay from epochs and batches (references/classification/train.py).
    recipe = Recipe(
        epochs=4,
        warmup_epochs=2,
        global_batch_images=16,
        ema_decay=0.9,
        ema_every_steps=3,
        ema_start="copy",
        ema_scaling="torchvision",
    )
    weights = np.random.default_rng(0).normal(size=4 * 7)
    expected = [0.5]
    copies = True
    for step, weight in enumerate(weights):
        average = expected[-1]
        if step % 7 % 3 == 0:
            adjusted = 1 - min(1.0, (1 - 0.9) * 16 * 3 / 4)
            average = weight if copies else adjusted * average + (1 - adjusted) * weight
            copies = step // 7 < 2
        expected.append(average)
    averages = [0.5]
    for decay, weight in zip(ema_decays(recipe, 4 * 7), weights, strict=True):
        averages.append(decay * averages[-1] + (1 - decay) * weight)
    assert averages == pytest.approx(expected)


def test_torchvisions_second_recipe_has_its_scripts_decay() -> None:
    # --model-ema-decay 0.99998, --model-ema-steps 32, 600 epochs, 8 GPUs with 128 images each.
    recipe = Recipe(
        epochs=600,
        global_batch_images=1024,
        ema_decay=0.99998,
        ema_every_steps=32,
        ema_start="constant",
        ema_scaling="torchvision",
    )
    assert ema_decays(recipe, 600 * 40)[32] == pytest.approx(1 - 2e-5 * 1024 * 32 / 600)


def test_a_ramp_counts_the_updates_of_an_average() -> None:
    recipe = Recipe(epochs=1, ema_decay=0.99, ema_every_steps=2)
    assert ema_decays(recipe, 5).tolist() == [0.1, 1, 2 / 11, 1, 3 / 12]


def test_a_mean_of_equal_gradients_is_corrected_to_the_gradient() -> None:
    recipe = Recipe(optimizer="adamw", beta1=0.75, beta2=0.5)
    means = [0.0]
    squares = [0.0]
    for _ in range(4):
        means.append(0.75 * means[-1] + 0.25 * 3)
        squares.append(0.5 * squares[-1] + 0.5 * 9)
    factors = find_corrections(recipe, 4)
    assert factors["mean"] * means[1:] == pytest.approx([3] * 4)
    assert factors["root"] * np.sqrt(squares[1:]) == pytest.approx([3] * 4)
