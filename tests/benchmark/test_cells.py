"""The grid, and errors that are found before anything is measured."""

from typing import Any

import pytest

from lockstep.benchmark.cells import Cell, Plan, full_name, grid, plain_name
from lockstep.models.architectures import MODELS
from lockstep.system.errors import BackendError, RecipeError, UserError


def test_the_grid_holds_every_combination_once_the_batch_changing_fastest() -> None:
    cells = grid(("train", "inference"), ranks=(1, 2), batches=(1, 4), dtypes=("fp32", "bf16"))
    assert len(cells) == len(set(cells)) == 16
    assert [(cell.what, cell.ranks, cell.dtype, cell.batch) for cell in cells[:5]] == [
        ("train", 1, "fp32", 1),
        ("train", 1, "fp32", 4),
        ("train", 1, "bf16", 1),
        ("train", 1, "bf16", 4),
        ("train", 2, "fp32", 1),
    ]


def test_a_runtime_that_is_not_native_has_cells_of_inference_once_for_all_backends() -> None:
    axes = {
        "backends": ("torch", "mxnet"),
        "compiles": ("off", "on"),
        "ranks": (1, 2),
        "batches": (1, 4),
    }
    cells = grid(("train", "inference"), runtimes=("native", "openvino"), **axes)
    native = [cell for cell in cells if cell.runtime == "native"]
    assert native == grid(("train", "inference"), **axes)
    assert [
        (cell.what, cell.computes, cell.compile, cell.ranks, cell.batch)
        for cell in cells
        if cell not in native
    ] == [("inference", "openvino", "auto", 1, 1), ("inference", "openvino", "auto", 1, 4)]
    assert {cell.computes for cell in native} == {"torch", "mxnet"}


def test_int8_is_measured_on_runtimes_that_run_onnx_models() -> None:
    names = ("native", "onnxruntime", "openvino", "paddle-inference")
    cells = grid(("train", "inference"), dtypes=("fp32", "int8"), batches=(1,), runtimes=names)
    assert [cell.computes for cell in cells if cell.dtype == "int8"] == ["onnxruntime", "openvino"]
    assert [(cell.what, cell.computes) for cell in cells if cell.dtype == "fp32"] == [
        ("train", "torch"),
        *(("inference", name) for name in ("torch", "onnxruntime", "openvino", "paddle-inference")),
    ]
    assert {Plan().make_recipe(cell).precision for cell in cells} == {"fp32"}
    message = "int8 needs one that runs ONNX models, such as --runtime onnxruntime"
    with pytest.raises(UserError, match=message):
        grid(("inference",), dtypes=("int8",))


def test_the_seeds_batches_are_the_default() -> None:
    assert [cell.batch for cell in grid(("train",))] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_models_have_the_name_that_says_their_version() -> None:
    assert {full_name(name) for name in ("resnet50", "resnet50-v1.5")} == {"resnet50-v1.5"}
    names = {name: full_name(name) for name in MODELS if not name.endswith("-v1")}
    assert {name: full for name, full in names.items() if name != full} == {
        "resnet50": "resnet50-v1.5",
        "resnet101": "resnet101-v1.5",
        "resnet152": "resnet152-v1.5",
    }
    assert all(plain_name(full_name(name)) == name for name in MODELS)


@pytest.mark.parametrize("name", ["resnet18-v1.5", "resnet5", "resnet50-v2"])
def test_a_model_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="there is no model"):
        grid(("train",), models=[name])


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        ({"backends": ["tortch"]}, BackendError, "Did you mean torch"),
        ({"batches": [0]}, UserError, "at least 1"),
        ({"ranks": [0]}, UserError, "at least 1"),
        ({"runtimes": ["openvno"]}, BackendError, "Did you mean openvino"),
        (
            {"runtimes": ["openvino"]},
            UserError,
            "no cell is left: runtimes other than native only infer",
        ),
    ],
)
def test_a_grid_that_cannot_be_is_refused(
    axes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        grid(("train",), **axes)


@pytest.mark.parametrize("name", ["model", "precision", "global_batch_images"])
def test_an_axis_of_the_grid_is_not_set_twice(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name} is an axis of the grid"):
        Plan(changes={name: 1})


def test_one_iteration_is_refused_since_it_has_no_interval() -> None:
    with pytest.raises(UserError, match="measure at least two"):
        Plan(iterations=1, epochs=1)
    assert Plan(iterations=1, epochs=2)


@pytest.mark.parametrize(
    "lengths", [{"iterations": 0}, {"epochs": 0}, {"warmup_epochs": -1}, {"num_examples": 0}]
)
def test_a_plan_that_measures_nothing_is_refused(lengths: dict[str, int]) -> None:
    with pytest.raises(UserError, match="at least"):
        Plan(**lengths)


def test_a_cell_has_the_recipe_that_it_names() -> None:
    cell = Cell("train", "torch", "resnet50-v1", "bf16", batch=8, ranks=2, compile="off")
    recipe = Plan(changes={"image_size": 64}).make_recipe(cell)
    assert (recipe.model, recipe.precision, recipe.global_batch_images, recipe.image_size) == (
        "resnet50-v1",
        "bf16",
        16,
        64,
    )
    execution = Plan(execution={"accumulation_steps": 2}).make_execution(cell)
    assert (
        execution.backend,
        execution.compile,
        execution.loader,
        execution.accumulation_steps,
    ) == ("torch", "off", "synthetic", 2)
