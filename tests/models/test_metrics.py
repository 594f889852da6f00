import statistics

import numpy as np
import pytest

from lockstep.models.accuracy_interval import wilson
from lockstep.models.metrics import (
    Counts,
    Scores,
    describe_metrics,
    find_metric,
    measure,
)

CLASSES = 7


@pytest.fixture
def scores() -> Scores:
    """Return scores of 200 images of six classes out of seven, with losses from tiny to huge."""
    random = np.random.default_rng(5)
    return Scores(
        losses=(10.0 ** random.uniform(-8, 8, 200)).astype(np.float32),
        ranks=random.integers(0, CLASSES, 200).astype(np.int32),
        predictions=random.integers(0, CLASSES, 200).astype(np.int32),
        labels=random.integers(0, CLASSES - 1, 200).astype(np.int32),
        confidences=random.uniform(0, 1, 200).astype(np.float32),
    )


def reorder(scores: Scores, order: np.ndarray) -> Scores:
    return Scores(*(column[order] for column in list(vars(scores).values())[:5]))


def test_scores_of_a_table_leave_out_its_padding(scores: Scores) -> None:
    columns = dict(list(vars(scores).items())[:5])
    table = np.stack([column.astype(np.float64) for column in columns.values()], axis=1)
    padding = np.array([[9.0, 1, 2, -1, 0.5]])
    actual = Scores.unpack_table(np.concatenate([padding, table[:7], padding, table[7:]]))
    for name, column in columns.items():
        assert getattr(actual, name).dtype == column.dtype
        np.testing.assert_array_equal(getattr(actual, name), column)


def test_placed_scores_stand_where_the_index_has_their_images(scores: Scores) -> None:
    samples = np.random.default_rng(7).permutation(200)
    placed = scores.sort_by_sample(samples)
    for row, sample in enumerate(samples.tolist()):
        assert placed.losses[sample] == scores.losses[row]
        assert placed.confidences[sample] == scores.confidences[row]


def test_counts_add_field_by_field() -> None:
    total = Counts(1.5, 2, 3, 4) + Counts(0.25, 10, 20, 30) + Counts()
    assert total == Counts(1.75, 12, 23, 34)


def test_means_come_from_the_sums_of_all_parts_and_not_from_their_means() -> None:
    total = Counts(loss_sum=8.0, top1=1, top5=1, images=1) + Counts(
        loss_sum=1.0, top1=0, top5=2, images=3
    )
    result = total.summary()
    assert result == {"loss": 2.25, "top1_percent": 25.0, "top5_percent": 75.0, "images": 4}


def test_metrics_of_scores_agree_with_a_count_by_hand(scores: Scores) -> None:
    ranks = scores.ranks.tolist()
    figures = measure(scores, CLASSES, ("mrr", "top3", "top1"))
    assert list(figures)[:3] == ["loss", "top1_percent", "top5_percent"]
    assert list(figures)[-2:] == ["mrr", "top3_percent"]
    for most in (1, 3, 5):
        assert figures[f"top{most}_percent"] == sum(rank < most for rank in ranks) / 2
    assert figures["mrr"] == pytest.approx(statistics.fmean(1 / (rank + 1) for rank in ranks))
    assert figures["loss"] == pytest.approx(statistics.fmean(scores.losses.tolist()), rel=1e-12)


@pytest.mark.parametrize("name", ["top0", "top", "top03", "top1_percent", "accuracy", "", None])
def test_other_names_are_no_metrics(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected loss, top1, .*, mrr, or topK such as top3"):
        find_metric(name)


def test_a_result_is_shown_with_all_of_its_metrics() -> None:
    result = {"step": 8, "loss": None, "top1_percent": 50.0, "top5_percent": 90.0, "images": 9000}
    result |= {"macro_f1_percent": 48.0, "mrr": 0.625, "top3_percent": 75.0, "mrr_percent": 1.0}
    rows = [
        ("top-1", "50.00 % of 9000 images"),
        ("classes", "macro F1 48.00 %"),
        ("top-5", "90.00 %"),
        ("mean reciprocal rank", "0.6250"),
        ("top-3", "75.00 %"),
        ("loss", "not finite"),
    ]
    assert describe_metrics(result, 6) == rows
    assert describe_metrics(result, 3) == [rows[0], rows[1], rows[3], rows[5]]


def test_the_loss_sum_does_not_depend_on_the_order_of_the_images(scores: Scores) -> None:
    random = np.random.default_rng(6)
    orders = [random.permutation(200) for _ in range(20)]
    result = len({float(scores.losses[order].astype(np.float64).cumsum()[-1]) for order in orders})
    assert result > 1
    assert len({measure(reorder(scores, order), 7)["loss"] for order in orders}) == 1


def test_counts_per_class_agree_with_a_count_by_hand(scores: Scores) -> None:
    expected = {name: [0] * CLASSES for name in ("images", "top1", "top5", "predicted")}
    for label, rank in zip(scores.labels.tolist(), scores.ranks.tolist(), strict=True):
        expected["images"][label] += 1
        expected["top1"][label] += rank == 0
        expected["top5"][label] += rank < 5
    for prediction in scores.predictions.tolist():
        expected["predicted"][prediction] += 1
    assert expected["images"][CLASSES - 1] == 0
    assert scores.per_class(CLASSES) == expected


NEWCOMBE = {
    (81, 263): (0.2553, 0.3662),
    (15, 148): (0.0624, 0.1605),
    (0, 20): (0.0, 0.1611),
    (1, 29): (0.0061, 0.1718),
}
"""Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3: the score method without
continuity correction."""


@pytest.mark.parametrize(("counts", "interval"), NEWCOMBE.items())
def test_intervals_are_newcombes(counts: tuple[int, int], interval: tuple[float, float]) -> None:
    assert wilson(*counts) == pytest.approx(interval, abs=5e-5)


def test_an_interval_of_no_images_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("hits", [0, 1, 50_000])
def test_an_interval_holds_its_share_and_stays_within_0_and_1(hits: int) -> None:
    low, high = wilson(hits, 50_000)
    assert 0 <= low <= hits / 50_000 <= high <= 1
    assert low < high
