"""The published accuracies are those of the documents, and a run stands beside them only on data
like ImageNet's."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.recipes import Recipe, load_recipe
from lockstep.recipes.published import RECIPES
from lockstep.recipes.published_accuracies import (
    compare_top1,
    describe_comparison,
    find_accuracies,
    is_comparison,
    read_accuracies,
)
from lockstep.system.errors import DataError

PADDLE = load_recipe("resnet50-paddle-90ep")
IMAGENET = {"images": 50_000, "classes": 1000}

# Counted and copied from the documents by hand: rows of the recipe, and one of them.
DOCUMENTS: dict[str, tuple[int, tuple[str, str | None, int | None, str, float | None]]] = {
    "resnet50-paddle-50ep": (2, ("tf32", "A100 80GB", 8, "76.17 ± 0.11", None)),
    "resnet50-paddle-90ep": (4, ("mixed", None, None, "77.11", None)),
    "resnet50-paddle-asp-90ep": (1, ("mixed", "A100 80GB", 8, "76.72", None)),
    "resnet50-mxnet-90ep": (6, ("fp32", "V100 16GB", 4, "76.448", 21.1)),
    "resnext101-32x4d-pytorch-90ep": (4, ("fp32", "V100 16GB", 8, "79.40 ± 0.10", 30)),
    "resnext101-32x4d-pytorch-250ep": (4, ("mixed", "V100 16GB", 8, "80.26 ± 0.11", None)),
    "resnet50-tensorflow-90ep": (4, ("mixed", "V100 16GB", 8, "76.99", 3.5)),
    "resnet50-tensorflow-250ep": (2, ("fp32", "V100 16GB", 8, "78.34", None)),
    "resnext101-32x4d-tensorflow-90ep": (4, ("tf32", "A100 40GB", 8, "79.38", None)),
    "resnext101-32x4d-tensorflow-250ep": (2, ("mixed", "V100 16GB", 8, "80.21", None)),
    "resnet50-torchvision-v1": (1, ("fp32", "V100", 8, "76.13", None)),
    "resnet50-torchvision-v2": (1, ("fp32", "V100", 8, "80.858", None)),
    "resnet101-torchvision-v2": (1, ("fp32", "V100", 8, "81.886", None)),
    "resnet152-torchvision-v2": (1, ("fp32", "V100", 8, "82.284", None)),
    "resnext50-32x4d-torchvision-v2": (1, ("fp32", "V100", 8, "81.198", None)),
    "resnext101-32x8d-torchvision-v2": (1, ("fp32", "V100", 8, "82.834", None)),
    "wide-resnet50-2-torchvision-v2": (1, ("fp32", "V100", 8, "81.602", None)),
    "wide-resnet101-2-torchvision-v2": (1, ("fp32", "V100", 8, "82.51", None)),
    "resnet50-rsb-a1": (1, ("mixed", "V100 32GB", 4, "80.4", 110)),
    "resnet50-rsb-a2": (1, ("mixed", None, None, "79.8", None)),
    "resnet50-rsb-a3": (1, ("mixed", None, None, "78.1", None)),
    "resnet50-ffcv-88ep": (1, ("mixed", "A100", 8, "78.4", 1.29)),
}


def test_the_rows_are_those_of_the_documents() -> None:
    rows = read_accuracies()
    result = Counter(row.recipe for row in rows)
    assert result == {name: count for name, (count, _) in DOCUMENTS.items()}
    for name, (_, expected) in DOCUMENTS.items():
        comparison = [
            (row.precision, row.accelerator, row.accelerators, row.figure(), row.hours)
            for row in find_accuracies(name)
        ]
        assert expected in comparison


def test_every_row_has_the_epochs_of_its_recipe_and_a_line_with_its_figure() -> None:
    for row in read_accuracies():
        assert row.epochs in (RECIPES[row.recipe]().epochs, None)
        share = f"{row.top1_percent / 100:.3f}"
        assert str(row.top1_percent) in row.line or share in row.line
        assert row.spread_percent is None or f"+/- {row.spread_percent}" in row.line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [["fp32", 101]]}, "row ['fp32', 101]"),
        ({"rows": [["fp32"]]}, "shorter"),
        ({"gpu": "A100"}, "gpu"),
    ],
)
def test_wrong_tables_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    table = {"document": "d", "table": "T", "recipe": "r", "framework": "f", "line": "l"}
    table |= {"columns": ["precision", "top1_percent"], "rows": [["fp32", 76.5]]}
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump([table | change]))
    with pytest.raises(DataError, match="table 'T'") as error:
        read_accuracies(path)
    assert message in str(error.value)


def beside(top1: float, recipe: Recipe = PADDLE, **how: Any) -> dict[str, Any]:
    comparison = compare_top1(recipe, top1_percent=top1, **IMAGENET | how)
    assert comparison is not None
    return dict(comparison)


def test_a_run_has_the_interval_that_scipy_computes() -> None:
    # scipy 1.17.1: binomtest(38465, 50000).proportion_ci(method="wilson")
    assert beside(76.93)["interval_percent"] == pytest.approx([76.55867742, 77.29718488], abs=1e-7)


@pytest.mark.parametrize(
    ("top1", "position"), [(76.93, "within"), (76.0, "above"), (78.0, "below")]
)
def test_the_position_is_that_of_the_published_figure(top1: float, position: str) -> None:
    assert {row["position"] for row in beside(top1)["accuracies"]} == {position}


@pytest.mark.parametrize(
    ("precision", "published"),
    [("bf16", [76.93, 76.92, 77.11]), ("fp32", [76.91]), (None, [76.93, 76.91, 76.92, 77.11])],
)
def test_rows_have_the_runs_precision(precision: str | None, published: list[float]) -> None:
    result = [row["top1_percent"] for row in beside(76, precision=precision)["accuracies"]]
    assert result == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet50-paddle-tf32-50ep", [("tf32", 76.17)]),
        ("resnet50-mxnet-fp32-90ep", [("fp32", 76.462), ("fp32", 76.448), ("fp32", 76.668)]),
        ("resnet50-tensorflow-tf32-90ep", [("tf32", 77.01)]),
        ("resnet50-tensorflow-fp32-250ep", [("fp32", 78.34)]),
    ],
)
def test_a_variant_has_its_own_rows(name: str, published: list[tuple[str, float]]) -> None:
    comparison = beside(76, load_recipe(name).rename(""))
    assert comparison["recipe"] == name
    result = [(row["precision"], row["top1_percent"]) for row in comparison["accuracies"]]
    assert result == published


def test_a_precision_that_nobody_published_stands_beside_all_rows() -> None:
    comparison = beside(76, load_recipe("resnet50-paddle-asp-90ep"), precision="fp32")
    assert [row["top1_percent"] for row in comparison["accuracies"]] == [76.72]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            {"classes": 10, "images": 400},
            "ImageNet's 1,000 classes and 50,000 validation images; these are 10 and 400",
        ),
        ({"images": 49_999}, "these are 1,000 and 49,999"),
        ({"epochs": 40}, "these weights were trained for 40 of 90 epochs"),
    ],
)
def test_unlike_runs_are_not_compared(how: dict[str, int], reason: str) -> None:
    comparison = beside(76.93, **how)
    assert (comparison["accuracies"], comparison["interval_percent"]) == ([], [])
    assert reason in comparison["not_compared"]
    [(_, text)] = describe_comparison(comparison)  # type: ignore[arg-type]
    assert text == f"not compared: {comparison['not_compared']}"


def test_a_recipe_without_published_accuracy_has_no_comparison() -> None:
    assert compare_top1(load_recipe("demo"), top1_percent=90, **IMAGENET) is None
    assert describe_comparison(None) == []


def test_a_recipe_without_a_name_is_known_by_its_fields() -> None:
    result = beside(76, PADDLE.rename("").replace(seed=3, precision="fp32"))["recipe"]
    assert result == "resnet50-paddle-90ep"
    assert compare_top1(PADDLE.rename("").replace(epochs=89), top1_percent=76, **IMAGENET) is None


def test_a_comparison_is_told_in_words_with_the_fields_that_were_changed() -> None:
    comparison = beside(76.8, PADDLE.replace(epochs=100, seed=1), precision="tf32")
    assert describe_comparison(comparison) == [  # type: ignore[arg-type]
        ("95 % interval", "76.43 to 77.17 % (Wilson, of top-1)"),
        (
            "published",
            "76.91 ± 0.13 (PaddlePaddle, 8 x A100 80GB, 90 epochs, TF32): within the interval",
        ),
        ("recipe", "differs from resnet50-paddle-90ep in epochs"),
    ]


def test_a_damaged_comparison_of_a_file_is_not_one() -> None:
    whole = beside(76.8)
    assert is_comparison(whole)
    assert is_comparison(beside(76.8, images=3))
    for change in (
        {"interval_percent": []},
        {"accuracies": [{}]},
        {"changed": 3},
        {"recipe": None},
        {"not_compared": None},
    ):
        assert not is_comparison(whole | change), change
    assert not is_comparison([])
