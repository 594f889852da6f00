"""The preprocessing and the classes in the metadata of an ONNX model."""

import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from lockstep.weights.formats.onnx_metadata import apply_preprocessing
from lockstep.weights.formats.onnx_weights import read
from tests.weights.formats.cases import assert_canonical
from tests.weights.formats.onnx_cases import export_model, recipe_of


def test_the_preprocessing_in_the_metadata_is_that_of_the_recipe(tmp_path: Path) -> None:
    export_model(
        recipe_of(eval_resize=235, interpolation="bicubic", exif_orientation=True),
        tmp_path / "model",
    )
    model = onnx.load(str(tmp_path / "model" / "model.onnx"))
    assert json.loads(
        {prop.key: prop.value for prop in model.metadata_props}["lockstep_preprocessing"]
    ) == {
        **{"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]},
        **{"interpolation": "bicubic", "antialias": False, "eval_resize": 235, "eval_crop": 224},
        **{"eval_antialias": False, "eval_side_rounding": "down", "eval_offset_rounding": "even"},
        **{"eval_sampling": "half_pixel", "exif_orientation": True},
    }


def test_metadata_without_a_geometry_is_read_as_torchvisions() -> None:
    fields = ("mean", "std", "interpolation", "antialias", "eval_resize", "eval_crop")
    recipe = recipe_of(antialias=True, eval_resize=235)
    described = json.dumps({name: recipe.fields()[name] for name in fields})
    assert apply_preprocessing(recipe_of(), described) == recipe


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (None, "Expecting value"),
        ({"eval_crop": None}, "expected a table of mean, std"),
        ({"eval_crop": "128"}, "eval_crop is '128', expected a value such as 128"),
        ({"antialias": 1}, "antialias is 1, expected a value such as False"),
        ({"interpolation": "nearest"}, "interpolation: Input should be 'bilinear' or 'bicubic'"),
        ({"eval_resize": 100}, r"eval_crop \(128\) must fit into eval_resize \(100\)"),
        (
            {"mean": [1.0, 2.0, 3.0]},
            r"its mean is \[1\.0, 2\.0, 3\.0\], but the graph's is \[123\.675, 116\.28, 103\.53\]",
        ),
    ],
)
def test_metadata_that_makes_no_sense_is_left_out_with_a_remark(
    changes: dict[str, Any] | None, reason: str, tmp_path: Path
) -> None:
    export_model(recipe_of(eval_crop=128), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"
    model = onnx.load(str(file))
    [entry] = [prop for prop in model.metadata_props if prop.key == "lockstep_preprocessing"]
    values = json.loads(entry.value) | (changes or {})
    entry.value = (
        ""
        if changes is None
        else json.dumps({name: value for name, value in values.items() if value is not None})
    )
    onnx.save(model, str(file))
    weights = read(file)
    assert (weights.recipe, weights.has_preprocessing) == (
        recipe_of(eval_resize=146, eval_crop=128),
        False,
    )
    [remark] = weights.remarks
    assert re.match(f"its property lockstep_preprocessing was left out: .*{reason}", remark)


def test_class_names_that_are_no_list_of_names_are_left_out(tmp_path: Path) -> None:
    export_model(recipe_of(), tmp_path / "model")
    model = onnx.load(str(tmp_path / "model" / "model.onnx"))
    onnx.helper.set_model_props(model, {"classes": json.dumps([1, 2])})
    onnx.save(model, str(tmp_path / "a"))
    assert read(tmp_path / "a").classes == ()


def test_a_name_that_is_not_utf_8_is_a_name(tmp_path: Path) -> None:
    tensors = export_model(recipe_of(), tmp_path / "model")
    file = tmp_path / "model" / "model.onnx"
    file.write_bytes(file.read_bytes().replace(b"conv1.weight", b"\xffonv1.weight"))
    assert_canonical(read(file).state.tensors, tensors)
