"""The values on NVIDIA's pages. If a page does not give a value, it is that of the code that
reached the page's accuracy.

The tables, one for each system, are written from the pages and the notes on the code. They do not
use the recipes, so that a mistake in a recipe is not repeated here.
"""

import inspect
import re
from typing import Any

import pytest

from lockstep.recipes import Recipe, difference
from lockstep.recipes.published import NVIDIA_RECIPES, RECIPES
from lockstep.recipes.published_speeds import read_speeds
from tests.recipes.cases import DALI, TF1

CONVOLUTIONS_AND_CLASSIFIER = ("conv_weight", "fc_weight", "fc_bias")

# Values that all four systems have in common.
COMMON: dict[str, Any] = {
    "padding": "symmetric",
    "bn_momentum": 0.1,
    "bn_epsilon": 1e-5,
    "batch_norm": "local",
    "conv_init": "normal",
    "stem_channels": 3,
    "nesterov": False,
    "conv_init_fan": "in",
    "fc_bias_init": "zero",
    "zero_init_last_bn": False,
    "lr_scaling": "linear",
    "lr_batch_images": 256,
    "lr_unit": "step",
    "warmup_start_lr": 0.0,
    "warmup_from_batch_images": 0,
    "lr_end": 0.0,
    "class_weights": "none",
    "dropout": 0.0,
    "frozen": (),
    "lr_multipliers": {},
    "lr_depth_decay": 1.0,
    "sampling": "plain",
    "loss": "cross_entropy",
    "mixup_alpha": 0.0,
    "cutmix_alpha": 0.0,
    "mix_probability": 1.0,
    "repeated_augmentation": 1,
    "ema_decay": 0.0,
    "precision": "fp16",
    "image_size": 224,
    "sparsity": "none",
    "sparsity_excluded": ("fc.weight",),
    "quantisation": "none",
    "crop_area": (0.08, 1.0),
    "crop_aspect": (3 / 4, 4 / 3),
    "crop_attempts": 100,
    "flip_probability": 0.5,
    "interpolation": "bilinear",
    "antialias": False,
    "dct_scaling": False,
    "exif_orientation": False,
    "eval_resize": 256,
    "eval_crop": 224,
    "eval_antialias": False,
}
# How each original's code rounds and samples in its evaluation.
TORCHVISION = {
    "eval_side_rounding": "down",
    "eval_offset_rounding": "even",
    "eval_sampling": "half_pixel",
}

PADDLE_90 = (
    COMMON
    | DALI
    | {
        "model": "resnet50",
        "logits": 1000,
        "fc_init": "uniform",
        "epochs": 90,
        "global_batch_images": 8 * 256,
        "lr": 0.256,
        "warmup_epochs": 5,
        "warmup_counts_from": 0,
        "lr_decay": "cosine",
        "lr_decay_from": "warmup_end",
        "momentum": 0.875,
        "weight_decay": 3.0517578125e-05,
        "weight_decay_roles": CONVOLUTIONS_AND_CLASSIFIER,
        "label_smoothing": 0.1,
        "loss_scaling": "dynamic",
        "loss_scale": 128,
        "loss_scale_growth": 2,
        "loss_scale_growth_steps": 1000,
        "loss_scale_backoff": 0.8,
        "loss_scale_backoff_steps": 2,
        "mean": (123.675, 116.28, 103.53),
        "std": (58.395, 57.12, 57.375),
    }
)

MXNET_90 = (
    COMMON
    | DALI
    | {
        "model": "resnet50",
        "logits": 1000,
        "fc_init": "as_conv",
        "epochs": 90,
        "global_batch_images": 8 * 208,
        "lr": 0.1,
        "warmup_epochs": 5,
        "warmup_counts_from": 1,
        "lr_decay": "step",
        "lr_step_epochs": (30, 60, 80),
        "lr_step_factor": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "weight_decay_roles": ("conv_weight", "bn_scale", "fc_weight"),
        "label_smoothing": 0.0,
        "loss_scaling": "static",
        "loss_scale": 208,  # gradients are sums over the batch of a GPU, and nothing else is scaled
        "crop_area": (0.05, 1.0),
        "mean": (123.68, 116.779, 103.939),
        "std": (58.393, 57.12, 57.375),
    }
)

PYTORCH_90 = (
    COMMON
    | TORCHVISION
    | {
        "eval_antialias": True,
        "model": "resnext101-32x4d",
        "logits": 1000,
        "fc_init": "uniform",
        "fc_bias_init": "uniform",
        "epochs": 90,
        "global_batch_images": 1024,
        "lr": 0.256,
        "lr_unit": "epoch",
        "warmup_epochs": 8,
        "warmup_counts_from": 1,
        "warmup_from_batch_images": 512,
        "lr_decay": "cosine",
        "lr_decay_from": "warmup_end",
        "momentum": 0.875,
        "weight_decay": 6.103515625e-05,
        "weight_decay_roles": CONVOLUTIONS_AND_CLASSIFIER,
        "label_smoothing": 0.1,
        "loss_scaling": "dynamic",
        "loss_scale": 128,
        "loss_scale_growth": 2,
        "loss_scale_growth_steps": 100,
        "loss_scale_backoff": 0.5,
        "loss_scale_backoff_steps": 1,
        "mean": (123.675, 116.28, 103.53),
        "std": (58.395, 57.12, 57.375),
    }
)

TENSORFLOW_90 = (
    COMMON
    | TF1
    | {
        "model": "resnet50",
        "logits": 1001,
        "padding": "same",
        "conv_init": "truncated_normal",
        "fc_init": "as_conv",
        "epochs": 90,
        "global_batch_images": 8 * 256,
        "lr": 0.256,
        "warmup_epochs": 5,
        "warmup_counts_from": 0,
        "warmup_from_batch_images": 512,
        "lr_decay": "cosine",
        "lr_decay_from": "start",
        "momentum": 0.875,
        "weight_decay": 3.0517578125e-05,
        "weight_decay_roles": CONVOLUTIONS_AND_CLASSIFIER,
        "label_smoothing": 0.1,
        "loss_scaling": "static",
        "loss_scale": 128,
        "mean": (123.68, 116.28, 103.53),
        "std": (58.395, 57.12, 57.385),
    }
)

# From the code: images are padded to four channels, and only parameters whose names contain "bn"
# are not decayed. The batch norms of shortcuts are called "downsample.1".
PADDLE_90 |= {"stem_channels": 4}
MXNET_90 |= {"stem_channels": 4}
PYTORCH_90 |= {
    "weight_decay_roles": (*CONVOLUTIONS_AND_CLASSIFIER, "shortcut_bn_scale", "shortcut_bn_bias")
}

TENSORFLOW_250 = TENSORFLOW_90 | {
    "epochs": 250,
    "mixup_alpha": 0.2,
    "mixup_coefficient": "sample",
    "mixup_pairing": "reverse",
}
TF32, FP32 = ({"precision": name, "loss_scaling": "none"} for name in ("tf32", "fp32"))
RESNEXT = {"model": "resnext101-32x4d", "weight_decay": 6.103515625e-05}

PUBLISHED: dict[str, dict[str, Any]] = {
    "resnet50-paddle-50ep": PADDLE_90 | {"epochs": 50},
    "resnet50-paddle-90ep": PADDLE_90,
    "resnet50-paddle-tf32-50ep": PADDLE_90 | TF32 | {"epochs": 50},
    "resnet50-paddle-tf32-90ep": PADDLE_90 | TF32,
    "resnet50-paddle-asp-90ep": PADDLE_90 | {"sparsity": "mask_1d"},
    "resnet50-paddle-qat-10ep": PADDLE_90 | {"epochs": 10, "lr": 5e-5, "quantisation": "int8"},
    "resnet50-mxnet-90ep": MXNET_90,
    "resnet50-mxnet-fp32-90ep": MXNET_90
    | FP32
    | {"global_batch_images": 8 * 96, "stem_channels": 3},
    "resnext101-32x4d-pytorch-90ep": PYTORCH_90,
    "resnext101-32x4d-pytorch-250ep": PYTORCH_90
    | {
        "epochs": 250,
        "mixup_alpha": 0.2,
        "mixup_coefficient": "batch",
        "mixup_pairing": "permutation",
    },
    "resnet50-tensorflow-90ep": TENSORFLOW_90,
    "resnet50-tensorflow-250ep": TENSORFLOW_250,
    "resnet50-tensorflow-tf32-90ep": TENSORFLOW_90 | TF32,
    "resnet50-tensorflow-fp32-90ep": TENSORFLOW_90 | FP32 | {"global_batch_images": 8 * 128},
    "resnet50-tensorflow-fp32-250ep": TENSORFLOW_250 | FP32 | {"global_batch_images": 8 * 128},
    "resnext101-32x4d-tensorflow-90ep": TENSORFLOW_90 | RESNEXT,
    "resnext101-32x4d-tensorflow-250ep": TENSORFLOW_250
    | RESNEXT
    | {"global_batch_images": 8 * 128},
}

ACCURACIES = {
    "resnet50-paddle-50ep": ("75.96 ± 0.09", "76.17 ± 0.11"),
    "resnet50-paddle-90ep": ("76.93 ± 0.14", "76.91 ± 0.13"),
    "resnet50-paddle-tf32-50ep": ("76.17 ± 0.11",),
    "resnet50-paddle-tf32-90ep": ("76.91 ± 0.13",),
    "resnet50-paddle-asp-90ep": ("76.72", "76.92"),
    "resnet50-paddle-qat-10ep": (),
    "resnet50-mxnet-90ep": ("76.49", "76.67"),
    "resnet50-mxnet-fp32-90ep": ("76.67",),
    "resnext101-32x4d-pytorch-90ep": ("79.47 ± 0.03", "79.38 ± 0.07"),
    "resnext101-32x4d-pytorch-250ep": ("80.19 ± 0.08", "80.27 ± 0.10"),
    "resnet50-tensorflow-90ep": ("76.93", "77.01"),
    "resnet50-tensorflow-250ep": ("78.35", "78.34"),
    "resnet50-tensorflow-tf32-90ep": ("77.01",),
    "resnet50-tensorflow-fp32-90ep": ("77.01",),
    "resnet50-tensorflow-fp32-250ep": ("78.34",),
    "resnext101-32x4d-tensorflow-90ep": ("79.20",),
    "resnext101-32x4d-tensorflow-250ep": ("80.21", "80.21"),
}


def test_nvidias_recipes_are_these() -> None:
    assert set(NVIDIA_RECIPES) == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_values_its_source_states(name: str) -> None:
    recipe = RECIPES[name]()

    assert {field: getattr(recipe, field) for field in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_that_a_recipe_changes_is_in_the_table(name: str) -> None:
    assert difference(Recipe(), RECIPES[name]()).keys() <= PUBLISHED[name].keys()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet50-paddle-90ep", 25_557_032),
        ("resnet50-mxnet-90ep", 25_557_032),
        ("resnext101-32x4d-pytorch-90ep", 44_177_704),
        ("resnet50-tensorflow-90ep", 25_559_081),
    ],
)
def test_a_recipe_trains_a_model_of_the_published_size(name: str, parameters: int) -> None:
    recipe = RECIPES[name]()

    assert recipe.spec.count_parameters(recipe.logits) == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_first_line_about_a_recipe_gives_its_published_accuracies(name: str) -> None:
    title = " ".join(inspect.getdoc(RECIPES[name].load_function()).partition("\n\n")[0].split())
    assert tuple(re.findall(r"\d\d\.\d\d(?: ± \d\.\d\d)?", title)) == ACCURACIES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_where_it_is_from(name: str) -> None:
    assert re.search(r"Source( and code)?:", inspect.getdoc(RECIPES[name].load_function()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_recipe_says_what_it_costs(name: str) -> None:
    assert re.search(
        r"Cost:\s.*(\d h|/90 of that)", inspect.getdoc(RECIPES[name].load_function()), re.DOTALL
    )


def test_the_speeds_that_recipes_name_are_published_in_their_documents() -> None:
    # The revision 38934f9 of Paddle's document has other speeds than 22.05.1, the source of the
    # recipes.
    rows = [row for row in read_speeds() if "38934f9" not in row.document and row.kind == "train"]
    published = {f"{row.images_per_sec:,.0f}" for row in rows if row.images_per_sec}
    named = {
        name: re.findall(r"([\d,]+)\s+images/s", inspect.getdoc(RECIPES[name].load_function()))
        for name in PUBLISHED
    }
    assert len([speed for speeds in named.values() for speed in speeds]) > 10
    assert {name: speeds for name, speeds in named.items() if not set(speeds) <= published} == {}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("resnet50-paddle-90ep", ["626th"]),  # ceil(ceil(1281167 / 8) / 256)
        ("resnet50-mxnet-90ep", ["8 %", "1.33", "123.675, 116.28, 103.53", "58.395", "770th"]),
        ("resnext101-32x4d-pytorch-90ep", ["8 epochs", "`downsample.1`", "Pillow"]),
        ("resnet50-tensorflow-90ep", ["use 8", "5 %", "1.33", "57.375"]),
        ("resnext101-32x4d-tensorflow-90ep", ["glorot_uniform"]),
    ],
)
def test_a_recipe_names_the_values_of_others(name: str, values: list[str]) -> None:
    text = " ".join(inspect.getdoc(RECIPES[name].load_function()).split())

    assert [value for value in values if value not in text] == []


def test_a_name_is_the_functions_and_says_the_epochs() -> None:
    for name, row in RECIPES.items():
        assert row.load_function().__name__ == name.replace("-", "_")
    for name in PUBLISHED:
        assert name.endswith(f"-{RECIPES[name]().epochs}ep")


def test_the_demo_fits_the_small_images_it_is_made_for() -> None:
    recipe = RECIPES["demo"]()

    assert (recipe.model, recipe.logits, recipe.image_size, recipe.eval_crop) == (
        "resnet50",
        10,
        48,
        48,
    )
