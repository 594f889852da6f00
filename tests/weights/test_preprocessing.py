"""timm's `config.json` as a recipe and back, and the preprocessing of known origins.

The expected values are those of timm 1.0.31 and torchvision 0.29 for the same files.
"""

import json
import math
from typing import Any

import pytest

from lockstep.models.architectures import MODELS
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats.timm_config import build_timm_config, read_timm_config
from lockstep.weights.known_preprocessing import KNOWN
from lockstep.weights.preprocessing import FIELDS

MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
TORCHVISION = ("down", "even", "half_pixel")
DALI = ("nearest", "up", "half_pixel_symmetric")
TF1 = ("float32_down", "down", "asymmetric")
PRETRAINED: dict[str, Any] = {
    **{"tag": "tv2_in1k", "custom_load": False, "input_size": [3, 176, 176]},
    **{"test_input_size": [3, 224, 224], "fixed_input_size": False, "interpolation": "bilinear"},
    **{"crop_pct": 0.875, "test_crop_pct": 0.965, "crop_mode": "center"},
    **{"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "num_classes": 1000},
    **{"pool_size": [6, 6], "first_conv": "conv1", "classifier": "fc", "license": "bsd-3-clause"},
}
"""What timm's `resnet50.tv2_in1k` has."""
CONFIG = {
    "architecture": "resnet50",
    "num_classes": 1000,
    "num_features": 2048,
    "pretrained_cfg": PRETRAINED,
}


def change_field(name: str, value: Any) -> dict[str, Any]:
    return CONFIG | {"pretrained_cfg": PRETRAINED | {name: value}}


def test_a_config_of_timm_is_evaluated_at_its_sizes_for_tests() -> None:
    changes, classes, remarks = read_timm_config(CONFIG)
    assert changes == {
        **{"model": "resnet50", "logits": 1000, "image_size": 176, "mean": MEAN, "std": STD},
        **{"interpolation": "bilinear", "antialias": True, "eval_resize": 232, "eval_crop": 224},
        **{"eval_antialias": True, "eval_side_rounding": "down", "eval_offset_rounding": "even"},
        **{"eval_sampling": "half_pixel", "exif_orientation": False},
    }
    assert classes == ()
    assert len(remarks) == 1
    assert "evaluating at 224 px with crop_pct 0.965" in remarks[0]


def test_the_older_layout_without_pretrained_cfg_is_the_same() -> None:
    older = PRETRAINED | {
        "architecture": "resnet50",
        "test_pool_size": None,
        "hf_hub_id": "timm/resnet50.tv2_in1k",
    }
    assert read_timm_config(older) == read_timm_config(CONFIG)


@pytest.mark.parametrize(
    ("size", "share", "resize"),
    [(224, 0.875, 256), (224, 0.95, 235), (288, 0.95, 303), (288, 1.0, 288), (160, 0.95, 168)],
)
def test_the_resize_is_the_size_over_the_share(size: int, share: float, resize: int) -> None:
    sizes = {
        "input_size": [3, size, size],
        "crop_pct": share,
        "test_input_size": None,
        "test_crop_pct": None,
    }
    changes, _, remarks = read_timm_config(
        {"architecture": "resnet18", "pretrained_cfg": PRETRAINED | sizes}
    )
    assert changes["image_size"] == size
    assert (changes["eval_resize"], changes["eval_crop"]) == (resize, size)
    assert remarks == ()


def test_a_fixed_input_size_is_used_in_evaluation_too() -> None:
    changes, *_ = read_timm_config(change_field("fixed_input_size", True))
    assert changes["image_size"] == 176
    assert (changes["eval_crop"], changes["eval_resize"]) == (176, math.floor(176 / 0.965))


def test_what_a_config_does_not_say_is_timms_default_and_is_named() -> None:
    changes, _, remarks = read_timm_config({"architecture": "resnet34"})
    assert changes == KNOWN["timm"] | {"model": "resnet34", "logits": 1000, "image_size": 224}
    [remark] = remarks
    for part in (
        *("num_classes 1000", "input_size [3, 224, 224]", "interpolation bicubic"),
        *("crop_pct 0.875", "mean [0.485, "),
    ):
        assert part in remark


def test_fields_at_the_top_go_before_those_of_pretrained_cfg() -> None:
    changes, classes, _ = read_timm_config(
        change_field("num_classes", 1000) | {"num_classes": 2, "label_names": ["cat", "owl"]}
    )
    assert (changes["logits"], classes) == (2, ("cat", "owl"))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["cat", "owl", "bee"], ("cat", "owl", "bee")),
        ({"0": "cat", "2": "bee", "1": "owl"}, ("cat", "owl", "bee")),
        ({"0": "cat", "2": "bee"}, ("cat", "1", "bee")),
        (["cat"], ("cat",)),
        ([], ()),
        (["crane", "owl", "crane"], ()),
    ],
)
def test_class_names_are_a_list_or_a_table(names: Any, expected: tuple[str, ...]) -> None:
    older = PRETRAINED | {"architecture": "resnet50", "num_classes": 3, "labels": names}
    for config in (CONFIG | {"num_classes": 3, "label_names": names}, older):
        assert read_timm_config(config)[1] == expected


def test_names_that_are_left_out_or_made_up_are_remarked_upon() -> None:
    for outputs, names, words in (
        (2, ["crane", "crane"], "'crane' for several classes"),
        (3, {"2": "bee"}, "no names for 2 classes"),
    ):
        config = CONFIG | {"num_classes": outputs, "label_names": names}
        assert words in read_timm_config(config)[2][-1]


@pytest.mark.parametrize(
    ("more", "remark"),
    [
        ({"label_descriptions": {"cat": "a small animal"}}, "label_descriptions were left out"),
        (
            {"model_args": {"num_classes": 1000, "in_chans": 3, "drop_rate": 0.1}},
            "left out: drop_rate",
        ),
        (
            {"pretrained_cfg": PRETRAINED | {"test_interpolation": "box"}},
            "left out: test_interpolation",
        ),
    ],
)
def test_what_is_not_kept_is_remarked_upon(more: dict[str, Any], remark: str) -> None:
    assert remark in " ".join(read_timm_config(CONFIG | more)[2])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "interpolation",
            "lanczos",
            "interpolation is 'lanczos'; expected 'bilinear' or 'bicubic'",
        ),
        ("crop_mode", "squash", "crop_mode is 'squash'; expected 'center'"),
        ("custom_load", "hf", "custom_load is 'hf'; expected false"),
        ("label_offset", 1, "label_offset is 1; expected 0"),
        ("classifier", "head", "classifier is 'head'; expected 'fc'"),
        ("first_conv", "conv2", "first_conv is 'conv2'; expected 'conv1'"),
        (
            "input_size",
            [3, 224, 256],
            "expected .channels, height, width. with equal height and width",
        ),
        ("test_input_size", [1, 224, 224], "images have 1 channel; expected 3"),
        ("input_size", "224", "input_size is '224'"),
        ("input_size", [3, 16, 16], "these values do not make a recipe: image_size"),
        ("crop_pct", "0.875", "crop_pct is '0.875'; expected a number"),
        ("test_crop_pct", 1.5, "test_crop_pct is 1.5; expected a number from 0.001 to 1"),
        ("crop_pct", 5e-324, "crop_pct is 5e-324"),
        ("crop_pct", True, "crop_pct is True"),
        ("std", [0.229, 0.224, 0], "std is .* expected three numbers above 0"),
        ("std", [0.229, 0.224, math.nan], "std is .* expected three numbers"),
        ("mean", 0.5, "mean is 0.5; expected three numbers"),
        ("fixed_input_size", "no", "fixed_input_size is 'no'; expected true or false"),
    ],
)
def test_unknown_preprocessing_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_timm_config(change_field(name, value))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "architecture",
            "resnet50q",
            "'resnet50q', which Lockstep does not have. .* --model resnet50. Did you mean resnet50",
        ),
        ("architecture", None, "architecture is missing"),
        ("architecture", 50, "architecture is 50; expected the name of a model"),
        ("num_classes", 0, "num_classes is 0; expected a whole number above 0"),
        ("num_classes", "10", "num_classes is '10'"),
        ("num_features", 512, "num_features is 512, but resnet50 has 2048"),
        ("global_pool", "catavgmax", "global_pool is 'catavgmax'; expected 'avg'"),
        (
            "model_args",
            {"output_stride": 16},
            "model_args: output_stride is 16, which Lockstep lacks",
        ),
        (
            "model_args",
            {"aa_layer": "blurpool"},
            "model_args: aa_layer is 'blurpool', which Lockstep lacks",
        ),
        ("model_args", ["output_stride"], "model_args is .*; expected a table"),
        ("multi_label", True, "multi_label is True; expected false: each output"),
        ("problem_type", "multi_label_classification", "each output of the model would be a"),
        ("problem_type", "regression", "problem_type is 'regression'"),
        ("label_names", "cat", "label_names is 'cat'; expected a list of names"),
        ("label_names", ["cat", 7], "the name of class 1 is 7; expected a string"),
        ("label_names", {"first": "cat"}, "label_names has the index 'first'"),
        ("label_names", {"1000": "cat"}, "label_names has a class 1000, but num_classes is 1000"),
        ("label_descriptions", ["a cat"], "label_descriptions is .*; expected a table of strings"),
        ("pretrained_cfg", [], "pretrained_cfg is .*; expected a table of fields"),
    ],
)
def test_unknown_models_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_timm_config(CONFIG | {name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "resnext101-32x4d", "logits": 10},
        {"mean": (123.68, 116.779, 103.939), "std": (58.393, 57.12, 57.385)},
        {"image_size": 176, "eval_resize": 232, "eval_crop": 224},
        {"image_size": 64},
    ],
)
def test_a_written_config_reads_as_the_same_recipe(changes: dict[str, Any]) -> None:
    recipe = Recipe(antialias=True, interpolation="bicubic").replace(**changes)
    changes, classes, _ = read_timm_config(
        json.loads(json.dumps(build_timm_config(recipe, ("cat", "owl"))))
    )
    assert Recipe().replace(**changes) == recipe
    assert classes == ("cat", "owl")


def test_a_written_share_gives_every_resize_back() -> None:
    for crop in (32, 97, 224):
        for resize in range(crop, 2 * crop):
            share = build_timm_config(
                Recipe(image_size=crop, eval_crop=crop, eval_resize=resize), ()
            )["pretrained_cfg"]["crop_pct"]
            assert math.floor(crop / share) == resize
            assert share == pytest.approx(crop / resize, rel=1e-12)


@pytest.mark.parametrize("model", ["resnet50-v1", MODELS["resnet50-v1"]], ids=["name", "fields"])
def test_a_model_that_timm_does_not_have_is_refused(model: Any) -> None:
    with pytest.raises(CheckpointError, match="timm has no model"):
        build_timm_config(Recipe(model=model), ())


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("torchvision-v1", (MEAN, STD, "bilinear", True, 256, 224, True, *TORCHVISION)),
        ("torchvision-v2", (MEAN, STD, "bilinear", True, 232, 224, True, *TORCHVISION)),
        ("timm", (MEAN, STD, "bicubic", True, 256, 224, True, *TORCHVISION)),
        ("nvidia-paddle", (MEAN, STD, "bilinear", False, 256, 224, False, *DALI)),
        (
            "nvidia-mxnet",
            (
                (123.68, 116.779, 103.939),
                (58.393, 57.12, 57.375),
                "bilinear",
                False,
                256,
                224,
                False,
                *DALI,
            ),
        ),
        ("nvidia-pytorch", (MEAN, STD, "bilinear", False, 256, 224, True, *TORCHVISION)),
        (
            "nvidia-tensorflow",
            (
                (123.68, 116.28, 103.53),
                (58.395, 57.12, 57.385),
                "bilinear",
                False,
                256,
                224,
                False,
                *TF1,
            ),
        ),
        ("gluon", (MEAN, STD, "bilinear", False, 256, 224, False, "down", "down", "half_pixel")),
    ],
)
def test_origins_have_published_evaluations(origin: str, expected: tuple[Any, ...]) -> None:
    # None turns photos by EXIF.
    assert tuple(KNOWN[origin][name] for name in FIELDS) == (*expected, False)
