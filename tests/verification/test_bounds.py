"""How results are compared: values computed by hand."""

import numpy as np
import pytest

from lockstep.verification.bounds import BOUNDS, angle, distance, largest


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
