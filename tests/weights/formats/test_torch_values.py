"""Values next to weights of PyTorch: options of training scripts, which say the preprocessing and
the network, and what other values would do in inference, by their names.

The expected values are those of timm 1.0.31, `resolve_data_config` of the same options, and of
torchvision 0.28, `ClassificationPresetEval`: the pixels of photos of four shapes were equal.
"""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.system.errors import CheckpointError
from lockstep.weights import open_weights
from lockstep.weights.formats.torch_settings import find_effect, list_values
from lockstep.weights.weights_choice import WeightsChoice
from tests.weights.formats.torch_cases import Plain, read_value

pytestmark = pytest.mark.usefixtures("few_models")

IMAGENET = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
UNSAID = {
    **dict.fromkeys(("img_size", "input_size", "crop_pct", "mean", "std", "crop_mode", "gp")),
    **dict.fromkeys(("bn_eps", "in_chans", "input_img_mode")),
    "interpolation": "",
    "model_kwargs": {},
    "no_aug": False,
}
"""What timm's script stores for options that the user does not set."""
OF_TORCHVISION = {
    **{"data_path": "data", "model": "basic", "lr_step_size": 30, "print_freq": 10},
    **{"val_resize_size": 256, "val_crop_size": 224, "train_crop_size": 224},
    **{"interpolation": "bilinear", "backend": "PIL", "use_v2": False, "weights": None},
}


def save_as_timm(**options: Any) -> dict[str, Any]:
    args = Namespace(**UNSAID | {"model": "basic"} | options)
    value = {"epoch": 3, "arch": args.model, "version": 2, "args": args, "metric": 70.5}
    return {**value, "state_dict": Plain().state_dict(), "saver": {"cmp": "gt"}}


def save_as_torchvision(**options: Any) -> dict[str, Any]:
    args = Namespace(**OF_TORCHVISION | options)
    return {"model": Plain().state_dict(), "lr_scheduler": {}, "epoch": 3, "args": args}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (*IMAGENET, "bicubic", 256, 224)),
        ({"mean": [0.5], "std": [0.25]}, ((127.5,) * 3, (63.75,) * 3, "bicubic", 256, 224)),
        ({"mean": [0, 0, 0], "std": [1, 1, 1]}, ((0,) * 3, (255,) * 3, "bicubic", 256, 224)),
        (
            {"img_size": 192, "crop_pct": 0.95, "interpolation": "bilinear"},
            (*IMAGENET, "bilinear", 202, 192),
        ),
        ({"input_size": [3, 160, 160], "img_size": 192}, (*IMAGENET, "bicubic", 182, 160)),
        ({"crop_pct": 1.0, "gp": "fast"}, (*IMAGENET, "bicubic", 224, 224)),
        ({"model_kwargs": {"drop_path_rate": 0.1}}, (*IMAGENET, "bicubic", 256, 224)),
    ],
)
def test_options_of_timm_prepare_images_as_timm_does(
    options: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    weights = read_value(save_as_timm(**options), tmp_path)
    recipe = open_weights(tmp_path / "any.pth").recipe
    fields = (recipe.mean, recipe.std, recipe.interpolation, recipe.eval_resize, recipe.eval_crop)
    assert fields == expected
    is_said = {"mean", "interpolation"} & weights.stated
    assert is_said == {"mean", "interpolation"} & {n for n in options if options[n]}
    assert ("eval_crop" in weights.stated) == bool({"img_size", "input_size"} & options.keys())
    assert ("eval_resize" in weights.stated) == ("crop_pct" in options)
    assert recipe.eval_antialias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_mode": "squash"}, "in args of timm, crop_mode is 'squash'; expected 'center'"),
        ({"crop_mode": "border"}, "crop_mode is 'border'"),
        ({"interpolation": "lanczos"}, "interpolation is 'lanczos'"),
        ({"input_size": [3, 160, 192]}, "with equal height and width"),
        ({"in_chans": 1, "img_size": 64}, "images have 1 channel"),
        ({"input_img_mode": "L"}, "input_img_mode is 'L'"),
        ({"gp": "max"}, "global_pool is 'max'; expected 'avg'"),
        ({"gp": "catavgmax"}, "global_pool is 'catavgmax'"),
        ({"model_kwargs": {"output_stride": 16}}, "output_stride is 16, which Lockstep lacks"),
        ({"bn_eps": 1e-3}, r"bn_eps is 0.001, which Lockstep lacks; .*output_stride 32$"),
        ({"mean": 0.5}, "mean is 0.5; expected three numbers"),
        ({"crop_pct": "0.9"}, "crop_pct is '0.9'"),
        ({"img_size": 16}, "image_size: Input should be greater than or equal to 32"),
        ({"model": "resnetaa50"}, "its network is 'resnetaa50', which Lockstep does not have"),
        ({"model": "resnet50"}, "closest model, resnet50, does not fit:"),
    ],
)
def test_other_timm_options_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_value(save_as_timm(**options), tmp_path)


def test_options_of_torchvision_prepare_images_as_its_script_does(tmp_path: Path) -> None:
    sizes = {"val_resize_size": 232, "val_crop_size": 192, "train_crop_size": 176}
    weights = read_value(save_as_torchvision(**sizes, interpolation="bicubic"), tmp_path)
    assert weights.has_preprocessing
    recipe = weights.recipe
    assert (recipe.mean, recipe.std) == IMAGENET
    assert (recipe.eval_resize, recipe.eval_crop, recipe.image_size) == (232, 192, 176)
    assert (recipe.interpolation, recipe.eval_antialias) == ("bicubic", True)
    assert weights.epochs == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interpolation": "nearest"}, "interpolation: Input should be 'bilinear' or 'bicubic'"),
        ({"model": "resnet50"}, "closest model, resnet50, does not fit:"),
        ({"val_crop_size": "big"}, "eval_crop: Input should be a valid integer"),
    ],
)
def test_other_torchvision_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_value(save_as_torchvision(**options), tmp_path)


@pytest.mark.parametrize(
    ("value", "remark"),
    [
        (save_as_torchvision(backend="tensor"), "its program resized tensors"),
        (
            save_as_timm(img_size=64),
            r"side 73, .* \(some of timm's .*: set eval_resize, interpolation, mean, std\)",
        ),
        (
            {"state_dict": Plain().state_dict(), "config": {"img_size": 64, "Crop": 1, "lr": 0.1}},
            "config has img_size, Crop, which Lockstep does not use; say .* with --set",
        ),
        (
            {"state_dict": Plain().state_dict(), "img_size": 192},
            "the file has img_size, which Lockstep does not use",
        ),
    ],
)
def test_what_is_not_used_of_options_is_a_remark(value: Any, remark: str, tmp_path: Path) -> None:
    read_value(value, tmp_path)
    remarks = open_weights(tmp_path / "any.pth").remarks
    assert any(re.search(remark, text) for text in remarks), remarks


COLOURS = {"mean": [0.5, 0.4, 0.3], "std": (1, 1, 0.5)}


@pytest.mark.parametrize(
    "values",
    [
        COLOURS,
        {"mean": [127.5, 102, 76.5], "std": [255, 255, 127.5]},
        {"cfg": {"DATA": {"PIXEL_MEAN": [0.5, 0.4, 0.3], "PIXEL_STD": [1, 1, 0.5]}}},
        {"config": COLOURS, "hyper_parameters": COLOURS},
    ],
)
def test_mean_and_std_next_to_the_weights_are_used(values: Any, tmp_path: Path) -> None:
    weights = read_value({"state_dict": Plain().state_dict(), **values}, tmp_path)
    assert (weights.recipe.mean, weights.recipe.std) == ((127.5, 102, 76.5), (255, 255, 127.5))
    assert weights.stated == {"mean", "std"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config": COLOURS, "mean": [0, 0, 0], "std": [1, 1, 1]}, "has several means"),
        ({"mean": [0.5, 0.5, 0.5], "std": [57, 57, 57]}, "mean and 1 more; it normalises images"),
        ({"mean": [0.406, 0.456, 0.485], "std": [1, 1, 1]}, "mean and 1 more; it"),
        ({"PIXEL_MEAN": [103.53, 116.28, 123.675], "PIXEL_STD": [1, 1, 1]}, "PIXEL_MEAN and"),
        ({"config": {"backbone": "resnetaa50"}}, "its network is 'resnetaa50'"),
        ({"hyper_parameters": {"model_name": "tv_resnet50"}}, "resnet50, does not fit:"),
    ],
)
def test_contradicting_values_are_refused(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_value({"state_dict": Plain().state_dict(), **values}, tmp_path)


@pytest.mark.parametrize(
    "name", ["BASIC", "hf-hub:timm/basic.a1_in1k", "tv_basic", "gluon_basic_v1b", "resnet", ""]
)
def test_names_of_networks_are_those_of_several_programs(name: str, tmp_path: Path) -> None:
    for key in ("arch", "model_name"):
        weights = read_value({"state_dict": Plain().state_dict(), key: name}, tmp_path)
        assert weights.recipe.model == "basic"


@pytest.mark.parametrize("save", [save_as_timm, save_as_torchvision])
@pytest.mark.parametrize(
    "name", ["mean", "crop_pct", "img_size", "model_kwargs", "gp", "interpolation", "backend"]
)
def test_an_endless_option_is_refused_or_not_read(save: Any, name: str, tmp_path: Path) -> None:
    endless: list[Any] = [1]
    for _ in range(60):
        endless = [endless, endless]
    for value in (endless, 10**5000, {"model": endless}):
        options = {name: value}
        texts = []
        try:
            texts += read_value(save(**options) | {"config": options}, tmp_path).remarks
        except CheckpointError as error:
            texts.append(str(error))
        assert len("".join(texts)) < 600


SCALES = "scales the logits"
SHIFTS = "shifts or selects"
NOT_SOFTMAX = "sigmoids or numbers"
NOT_RGB = "not RGB"
UNKNOWN = "may change"
NEEDED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 1.5}, SCALES),
    ({"config": {"T": 2.0}}, SCALES),
    ({"tau": np.array([0.5])}, SCALES),
    ({"optimal_temperature": 1.2}, SCALES),
    ({"best_temp": "1.5"}, SCALES),
    ({"calibration": {"temperature": {"value": 1.3}}}, SCALES),
    ({"ema_temperature": 1.2}, SCALES),
    ({"logtemp": 0.3}, SCALES),
    ({"log_temperature": np.array(0.3)}, SCALES),
    ({"logit_scale": np.array(4.6)}, SCALES),
    ({"config": {"logit_adjustment": np.zeros(5) + 0.1}}, SCALES),
    ({"postprocess": {"scale": 2.0}}, "scales what"),
    ({"conf_threshold": 0.4}, SHIFTS),
    ({"class_prior": [0.1, 0.2, 0.3, 0.2, 0.2]}, SHIFTS),
    ({"label_offset": 1}, SHIFTS),
    ({"calibrator": {"a": np.array([1.2])}}, SHIFTS),
    ({"config": {"activation": "sigmoid"}}, "activation"),
    ({"config": {"head": {"act": "nn.Sigmoid()"}}}, "activation"),
    ({"config": {"act_layer": "silu"}}, "activation"),
    ({"heads": {0: {"act": "sigmoid"}, 1: {"act": "relu"}}}, "activation"),
    ({"heads": [{"act": "sigmoid"}, {"act": "relu"}]}, "activation"),
    ({"config": {"activation": "leaky_relu"}}, "activation"),
    ({"loss": "BCEWithLogitsLoss"}, NOT_SOFTMAX),
    ({"criterion": {"_target_": "torch.nn.BCEWithLogitsLoss"}}, NOT_SOFTMAX),
    ({"config": {"losses": ["ce", "bce"]}}, NOT_SOFTMAX),
    ({"loss_fn": "binary_cross_entropy"}, NOT_SOFTMAX),
    ({"args": {"multilabel": True}}, NOT_SOFTMAX),
    ({"task": "multi-label"}, NOT_SOFTMAX),
    ({"problem_type": "multi_label_classification"}, NOT_SOFTMAX),
    ({"objective": "regression"}, NOT_SOFTMAX),
    ({"hyper_parameters": {"pos_weight": np.ones(5) / 2}}, NOT_SOFTMAX),
    ({"hparams": '{"loss": "bce"}'}, NOT_SOFTMAX),
    ({"config": {"input_format": "BGR"}}, NOT_RGB),
    ({"config": {"channel_order": "bgr"}}, NOT_RGB),
    ({"config": {"to_rgb": False}}, NOT_RGB),
    ({"config": {"bgr": True}}, NOT_RGB),
    ({"config": {"color_mode": "grayscale"}}, NOT_RGB),
    ({"config": {"in_chans": 1}}, NOT_RGB),
    ({"model": {"in_channels": 4}}, NOT_RGB),
    ({"cfg": {"MODEL": {"NUM_CLASSES": 3}}}, "3 outputs"),
    ({"config": {"global_pool": "catavgmax"}}, "pool"),
    ({"config": {"pooling": "gem"}}, "pool"),
    ({"config": {"dilation": [1, 1, 2]}}, "strides"),
    ({"config": {"bn_eps": 1e-3}}, "epsilon"),
    ({"config": {"aa_layer": "blurpool"}}, "blurs"),
    ({"config": {"normalize_features": True}}, "features"),
    ({"config": {"mean": [0.1, 0.2, 0.3]}}, "normalises"),
    ({"mean": 0.5}, "normalises"),
    ({"W": np.zeros((5, 5))}, UNKNOWN),
    ({"gate": np.zeros(7)}, UNKNOWN),
    ({"order": np.array([4, 3, 2, 1, 0])}, UNKNOWN),
    ({"per_class": [0.1, 0.2, 0.3, 0.4, 0.5]}, UNKNOWN),
]
HARMLESS: list[dict[str, Any]] = [
    {"preds": np.zeros((30, 5)), "oof": np.zeros((30, 5)), "y_true": np.zeros(30)},
    {"confusion_matrix": np.ones((5, 5)), "per_class_f1": [0.1, 0.2, 0.3, 0.4, 0.5]},
    {"auroc": 0.98, "mAP": 0.5, "best_f1": 0.7, "kappa": 0.8, "ece": 0.03, "mse": 0.2},
    {"pretrained": True, "backbone": "net", "stage": 2, "fold": 0, "patience": 5, "tta": 4},
    {"label_smoothing": 0.1, "dropout": 0.5, "mixup_alpha": 0.4, "embedding_dim": 64},
    {"created_at": "2024-01-01", "comment": "better than sigmoid", "tags": ["gray", "bce"]},
    {"cmd": "train.py --loss bce", "run_name": "bce", "task": "classification"},
    {"LightningDataModule": {"seed": 3}, "MyData": {"idx": np.array([1, 2, 3])}},
    {"class_to_idx": {"sigmoid": 0, "scale": 1, "bias": 2, "gray": 3, "t": 4}},
    {"config": {"activation": "ReLU(inplace=True)", "loss": "CrossEntropyLoss", "bias": True}},
    {"config": {"num_classes": 5, "in_chans": 3, "input_format": "RGB", "pool": "avg"}},
    {"config": {"head": {"in_channels": 2048}, "input_type": "labelled", "cmap": "gray"}},
    {"config": {"kd_temperature": 4.0, "scale": [0.08, 1.0], "grayscale": 0.2, "betas": [0.9]}},
    {"config": {"temperature": 1.0, "dilation": [False, False], "normalize": True}},
    {"scheduler": {"T_max": 10, "threshold": 1e-4}, "MixedPrecision": {"scale": 65536.0}},
    {"optimizer": {"state": {0: {"exp_avg": np.zeros((5, 64))}}}, "amp": {"scale": 2.0}},
    {"cv": {"mean": 0.9, "std": 0.01}, "train_losses": [0.5, 0.4, 0.3]},
    {"hyper_parameters": {"class_weights": np.ones(5), "milestones": [30, 60, 80]}},
]


def list_effects(values: dict[str, Any], *ignore: str) -> list[str]:
    choice = WeightsChoice(ignore=ignore)
    leaves, _ = list_values(values, (), choice)
    return list(filter(None, (find_effect(name, value, 5) for name, value in leaves.items())))


@pytest.mark.parametrize(("values", "effect"), NEEDED, ids=str)
def test_a_value_that_may_matter_has_an_effect(values: dict[str, Any], effect: str) -> None:
    effects = list_effects(values)
    assert effects
    assert effect in effects[0]


@pytest.mark.parametrize("values", HARMLESS, ids=str)
def test_results_texts_and_settings_of_a_training_have_none(values: dict[str, Any]) -> None:
    assert list_effects(values) == []


def test_a_value_is_left_out_by_its_path() -> None:
    values = {"config": {"model": {"act": "gelu"}, "lr": 0.1}, "act": "relu"}
    assert list_effects(values)
    assert list_effects(values, "config.model.*") == []
    _, parts = list_values(values, ("act",), WeightsChoice(ignore=("config.*",)))
    assert [part.name for part in parts] == ["config.model.act", "config.lr"]
