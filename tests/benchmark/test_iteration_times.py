"""Figures from times: values computed by hand, closed forms, and rules for any times."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.benchmark import iteration_times
from lockstep.models.latency import latency_ms

TIMES = st.lists(st.floats(1e-5, 100), min_size=1, max_size=200)


def test_throughput_is_images_over_wall_time() -> None:
    # 8 images in 1 s and 8 in 3 s are 16 in 4 s; the mean of the rates 8 and 8/3 would be 5.33.
    assert iteration_times.images_per_sec([1.0, 3.0], 8) == 4.0


def test_percentiles_are_times_that_were_measured() -> None:
    times = [0.001 * (i + 1) for i in range(100)]
    latency = latency_ms(list(reversed(times)))
    assert latency == pytest.approx(
        {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "p100": 100}
    )
    result = latency_ms([0.002])
    assert result == pytest.approx(dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "p100"), 2))


@given(TIMES)
def test_percentiles_are_numpys_of_the_same_definition(times: list[float]) -> None:
    latency = latency_ms(times)
    for percent in (50, 90, 95, 99, 100):
        expected = 1000 * np.percentile(times, percent, method="inverted_cdf")
        assert latency[f"p{percent}"] == pytest.approx(expected, rel=1e-12)


@given(TIMES, st.integers(1, 4096))
def test_what_must_hold_holds_for_all_times(times: list[float], images: int) -> None:
    rate = iteration_times.images_per_sec(times, images)
    latency = latency_ms(times)
    iteration_times.check(times, images, rate, latency)


# Each of these is in a published table (p95 of 157 ms over a p99 of 77; an average that is not n /
# total).
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p95": 157.49, "p99": 77.42}, "percentiles fall"),
        ({"mean": 1001.0}, "mean times count is not the total"),
        ({"rate": 8.1}, "rate times total is not the images"),
    ],
)
def test_impossible_figures_are_caught(changes: dict[str, float], message: str) -> None:
    times = [1.0, 1.0]
    latency = latency_ms(times) | {name: value for name, value in changes.items() if name != "rate"}
    with pytest.raises(AssertionError, match=message):
        iteration_times.check(times, 8, changes.get("rate", 8.0), latency)


# The interval


def test_equal_times_leave_nothing_to_doubt() -> None:
    assert iteration_times.interval([0.5] * 30, 8) == (16, 16)


def test_the_interval_of_independent_times_is_that_of_the_central_limit_theorem() -> None:
    times = np.random.default_rng(3).normal(1.0, 0.1, 2500)
    low, high = iteration_times.interval(times.tolist(), 1)
    assert low < iteration_times.images_per_sec(times.tolist(), 1) < high
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(2500), rel=0.15)


def test_times_that_resemble_their_neighbours_widen_the_interval() -> None:
    # An autoregressive series with coefficient c: the mean's variance is (1 + c) / (1 - c) times
    # that of independent times.
    random = np.random.default_rng(4)
    c = 0.6
    n = 4000
    series = [0.0]
    for shock in random.normal(0, 0.01, n - 1):
        series.append(c * series[-1] + shock)
    times = (1 + np.array(series)).tolist()
    low, high = iteration_times.interval(times, 1)
    independent = 2 * 1.96 * float(np.std(times)) / math.sqrt(n)
    assert (high - low) / independent == pytest.approx(math.sqrt((1 + c) / (1 - c)), rel=0.15)


@pytest.mark.slow
def test_nineteen_of_twenty_intervals_hold_the_true_rate() -> None:
    random = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        low, high = iteration_times.interval(random.gamma(25, 1 / 25, 100).tolist(), 1)
        held += low <= 1.0 <= high
    assert 0.86 <= held / 200 <= 0.98  # blocks of 10 of 100 times hold a little less than 95 %


def test_two_times_that_differ_leave_much_to_doubt() -> None:
    # Of two draws from 1 s and 3 s a quarter each are 1 s and 3 s throughout.
    assert iteration_times.interval([1.0, 3.0], 3) == (1.0, 3.0)


@settings(max_examples=30)
@given(st.lists(st.floats(1e-5, 100), min_size=2, max_size=200))
def test_the_interval_is_repeatable_and_within_the_rates(times: list[float]) -> None:
    low, high = iteration_times.interval(times, 4)
    assert (low, high) == iteration_times.interval(times, 4)
    assert 4 / max(times) * (1 - 1e-9) <= low <= high <= 4 / min(times) * (1 + 1e-9)


# Steady state


def test_a_steady_run_with_single_slow_iterations_is_steady() -> None:
    assert iteration_times.judge_steadiness([1.0, 1.01, 0.99] * 10 + [9.0]).steady


def test_a_run_that_slows_down_or_was_still_warming_up_is_not() -> None:
    slowing = iteration_times.judge_steadiness([1.0] * 10 + [1.05] * 10 + [1.1] * 10)
    assert not slowing.steady
    assert "+10.0%" in slowing.reason
    assert not iteration_times.judge_steadiness([2.0] * 10 + [1.0] * 20).steady


def test_five_percent_is_still_steady_and_six_is_not() -> None:
    assert iteration_times.judge_steadiness([1.0] * 6 + [1.049] * 3).steady
    assert not iteration_times.judge_steadiness([1.0] * 6 + [1.06] * 3).steady


def test_too_few_iterations_are_not_called_steady() -> None:
    steadiness = iteration_times.judge_steadiness([1.0] * 8)
    assert not steadiness.steady
    assert "too few iterations to tell: 8" in steadiness.reason


# The definitions of NVIDIA's examples


def test_the_originals_definitions_on_hand_computed_times() -> None:
    # Two epochs of two iterations with 12 images each, after two warm-up iterations.
    rates = iteration_times.other_definitions([3.0, 1.0, 3.0, 2.0], [12.0, 6.0], 12, epochs=2)
    assert rates == pytest.approx(
        {
            "paddlepaddle": 12 / 2.25,
            "mxnet-18.12": 2 / (1 / 12 + 2 / 12),  # 12 and 6 images/s: the harmonic mean
            "mxnet-22.10": 12 / 2.25,
            "pytorch": (1 + 2 + 4 + 12 + 4 + 6) / 6,
            "tensorflow": (4 + 12 + 4 + 6) / 4,
        }
    )


def test_mxnets_later_definition_leaves_out_a_tenth_and_a_hundred_at_most() -> None:
    assert (
        iteration_times.other_definitions([5.0] * 2 + [1.0] * 18, [], 1, epochs=1)["mxnet-22.10"]
        == 1
    )
    times = [5.0] * 100 + [2.0] * 1900
    assert iteration_times.other_definitions(times, [], 1, epochs=1)["mxnet-22.10"] == 0.5


def test_one_iteration_an_epoch_leaves_nothing_by_mxnets_first_definition() -> None:
    assert iteration_times.other_definitions([1.0, 1.0], [], 8, epochs=2)["mxnet-18.12"] is None


@given(TIMES)
def test_a_mean_of_rates_is_never_below_images_over_wall_time(times: list[float]) -> None:
    result = iteration_times.other_definitions(times, [], 8, epochs=1)["tensorflow"]
    assert result >= iteration_times.images_per_sec(times, 8) * (1 - 1e-12)


# What is printed


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        *(
            (0.0, "0.000"),
            (0.00012345, "0.0001234"),
            (0.99996, "1.000"),
            (0.12344, "0.1234"),
            (1.23456, "1.235"),
        ),
        *((9.9996, "10.00"), (24.649, "24.65"), (999.96, "1000"), (26674.4, "26674")),
    ],
)
def test_rates_are_printed_with_the_digits_that_count(rate: float, text: str) -> None:
    assert iteration_times.format_rate(rate) == text


@given(st.floats(1e-5, 1e5), st.floats(1e-5, 1e5))
def test_a_quotient_is_that_of_the_printed_rates(over: float, under: float) -> None:
    expected = float(iteration_times.format_rate(over)) / float(iteration_times.format_rate(under))
    assert iteration_times.quotient(over, under) == expected
    assert iteration_times.quotient(over, under) == pytest.approx(over / under, rel=3e-3)
