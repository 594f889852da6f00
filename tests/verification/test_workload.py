"""The workload of every engine, and how results are compared: values computed by hand."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.models.architectures import ModelSpec
from lockstep.recipes.published import RECIPES
from lockstep.verification.bounds import BOUNDS, angle, distance, largest
from lockstep.verification.workload import Workload, build, load, save
from tests.backends.cases import bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a workload")


@pytest.fixture(scope="module")
def workload(folder: Path) -> Workload:
    return build(folder, "resnet50-tensorflow-250ep", None, steps=8, precision="fp32", full=False)


def test_the_schedule_is_compressed_to_the_steps(workload: Workload) -> None:
    # Two steps of warm-up from 0; this recipe's cosine counts from the start.
    expected = 1e-4 * np.array([0, 0.5, *((1 + np.cos(np.pi * np.arange(2, 8) / 8)) / 2)])
    assert workload.rates == pytest.approx(expected)


def test_steps_of_a_stepwise_schedule_are_compressed_too(tmp_path: Path) -> None:
    workload = build(tmp_path, "resnet50-mxnet-90ep", None, steps=9, precision="fp32", full=False)
    assert workload.rates == pytest.approx(
        1e-4 * np.array([0.5, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001])
    )


def test_the_telling_step_has_another_rate_than_its_neighbours(workload: Workload) -> None:
    step = workload.telling_step
    rates = workload.large_rates
    assert 0 < step < 7
    assert min(abs(rates[step] - rates[step - 1]), abs(rates[step] - rates[step + 1])) > 0.1


def test_a_narrow_model_is_of_the_recipes_kind(workload: Workload) -> None:
    model = workload.recipe.model
    recipe = RECIPES["resnet50-tensorflow-250ep"]()
    assert isinstance(model, ModelSpec)
    assert (model.block, model.expansion, model.stride_in) == ("bottleneck", 4, "3x3")
    kept = (
        *("logits", "padding", "mixup_alpha", "label_smoothing", "momentum", "weight_decay"),
        *("bn_momentum", "mean", "std"),
    )
    assert all(getattr(workload.recipe, name) == getattr(recipe, name) for name in kept)


def test_every_step_has_a_batch_and_the_last_is_not_full(workload: Workload) -> None:
    assert [len(batch.labels) for batch in workload.batches] == [16] * 8
    assert [int((batch.labels >= 0).sum()) for batch in workload.evaluation] == [16, 4]
    assert all(batch.coefficients is not None for batch in workload.batches)


def test_images_differ_from_step_to_step(workload: Workload) -> None:
    assert len({batch.images.tobytes() for batch in workload.batches}) == 8


def test_what_is_saved_is_loaded(workload: Workload, folder: Path) -> None:
    save(workload, folder)
    again = load(folder)
    assert again.recipe == workload.recipe
    assert again.data == workload.data
    for ours, theirs in ((again.initial, workload.initial), (again.state, workload.state)):
        assert bits(ours.tensors) == bits(theirs.tensors)
        assert bits(ours.momentum) == bits(theirs.momentum)
    for ours, theirs in zip(
        again.batches + again.evaluation, workload.batches + workload.evaluation, strict=True
    ):
        assert ours.images.tobytes() == theirs.images.tobytes()
        assert ours.labels.tolist() == theirs.labels.tolist()
        assert (ours.partners is None) == (theirs.partners is None)


def test_images_are_drawn_alike_every_time(workload: Workload, tmp_path: Path) -> None:
    again = build(
        tmp_path, "resnet50-tensorflow-250ep", None, steps=8, precision="fp32", full=False
    )
    assert again.batches[3].images.tobytes() == workload.batches[3].images.tobytes()


def test_nothing_of_the_varied_state_is_0_or_1(workload: Workload) -> None:
    for name, value in workload.state.tensors.items():
        assert not np.isin(value, (0, 1)).any(), name


def test_distance_is_relative_to_the_largest_value_of_a_tensor() -> None:
    expected = {"a": np.array([2.0, -4.0]), "b": np.array([1.0, 1.0])}
    assert distance(
        {"a": np.array([2.0, -4.4]), "b": np.array([1.0, 1.05])}, expected
    ) == pytest.approx(0.1)
    assert distance(
        {"a": np.array([2.0, -4.0]), "b": np.array([1.2, 1.0])}, expected
    ) == pytest.approx(0.2)


def test_a_tensor_of_almost_zeros_is_measured_against_the_others() -> None:
    expected = {"a": np.array([100.0]), "b": np.array([1e-9])}
    assert distance({"a": np.array([100.0]), "b": np.array([0.1])}, expected) == pytest.approx(0.1)


@pytest.mark.parametrize(("value", "expected"), [(0.0, 0.0), (1e-3, np.inf)])
def test_what_should_be_nothing_is_nothing(value: float, expected: float) -> None:
    assert min(distance(np.array([value]), np.zeros(1)), 1e30) == min(expected, 1e30)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_within_no_bound(value: float) -> None:
    assert not distance(np.array([value, 1.0]), np.ones(2)) <= 1e30
    assert not angle({"": np.array([value, 1.0])}, {"": np.ones(2)}) <= 1e30
    assert largest(np.array([value])) >= 1e300


def test_angle_is_one_minus_the_cosine() -> None:
    assert angle(
        {"a": np.array([1.0]), "b": np.array([1.0])}, {"a": np.array([2.0]), "b": np.array([0.0])}
    ) == pytest.approx(1 - np.sqrt(0.5))


@pytest.mark.parametrize("name", BOUNDS)
def test_every_bound_has_a_reason(name: str) -> None:
    assert 0 <= BOUNDS[name].value <= 3
    assert len(BOUNDS[name].why.split()) > 1
