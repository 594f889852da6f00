"""The recipes that others than NVIDIA published: values, learning rates and weight decay.

The tables are written from the sources and do not use the recipes, so that a mistake in a recipe is
not repeated here. A table has every field in which a recipe differs from the defaults.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.models.architectures import Tensor
from lockstep.recipes import Recipe
from lockstep.recipes.image_sizes import find_size
from lockstep.recipes.published import NVIDIA_RECIPES, OWN_RECIPES, RECIPES
from lockstep.recipes.published_accuracies import find_accuracies
from lockstep.recipes.schedule import ema_decays, learning_rates

# references/classification: train.py's defaults, and the transforms of presets.py.
TORCHVISION = {
    "conv_init_fan": "out",  # torchvision.models.resnet: kaiming_normal_(mode="fan_out")
    "fc_bias_init": "uniform",  # torch.nn.Linear
    "lr_unit": "epoch",
    "momentum": 0.9,
    "precision": "fp32",
    "crop_attempts": 10,  # RandomResizedCrop.get_params
    "antialias": True,  # Pillow's resize
    "eval_antialias": True,
}
# https://github.com/pytorch/vision/issues/3995: the command, and train.py's defaults.
TORCHVISION_V2 = TORCHVISION | {
    "epochs": 600,
    "global_batch_images": 8 * 128,
    "lr": 0.5,
    "lr_batch_images": 8 * 128,
    "warmup_start_lr": 0.005,  # --lr-warmup-decay 0.01
    "weight_decay": 2e-5,
    "ema_decay": 0.99998,
    "ema_every_steps": 32,
    "ema_start": "copy",
    "ema_scaling": "torchvision",
    "mixup_alpha": 0.2,
    "cutmix_alpha": 1.0,
    "augmentations": (
        {"name": "trivialaugment_wide", "interpolation": "bilinear"},
        {"name": "random_erasing", "probability": 0.1, "area": (0.02, 0.33), "aspect": (0.3, 3.3)},
    ),
    "eval_resize": 232,
}


def rand_augment(magnitude: int) -> tuple[dict[str, Any]]:
    """Return timm's rand-m<magnitude>-mstd0.5-inc1, the notation of the paper's "7 / 0.5"."""
    return (
        {
            "name": "randaugment",
            "dialect": "timm",
            "magnitude": magnitude,
            "magnitude_std": 0.5,
            "increasing": True,
        },
    )


# arXiv:2110.00476, the table of ingredients and hyper-parameters, column A2; and timm.
STRIKES_BACK = {
    "conv_init_fan": "out",  # timm.models.resnet: kaiming_normal_(mode="fan_out")
    "fc_bias_init": "uniform",
    "zero_init_last_bn": True,  # timm.models.resnet: zero_init_last
    "epochs": 300,
    "global_batch_images": 2048,
    "lr": 5e-3,
    "lr_scaling": "none",
    "lr_unit": "epoch",
    "warmup_start_lr": 1e-4,  # --warmup-lr
    "lr_decay_from": "start",  # warmup_prefix=False
    "lr_end": 1e-6,  # --min-lr
    "label_smoothing": 0.0,
    "loss": "binary_cross_entropy",
    "target_threshold": 0.2,  # --bce-target-thresh
    "stochastic_depth": 0.05,
    "mixup_alpha": 0.1,
    "cutmix_alpha": 1.0,
    "mixup_pairing": "reverse",  # timm.data.Mixup: flip(0)
    "optimizer": "lamb",
    "optimizer_epsilon": 1e-6,  # timm.optim.Lamb
    "clip_norm": 1.0,  # timm.optim.Lamb: max_grad_norm
    "weight_decay": 0.02,
    "weight_decay_roles": ("conv_weight", "fc_weight"),
    "loss_scaling": "dynamic",  # torch.amp.GradScaler
    "loss_scale": 65536.0,
    "loss_scale_growth_steps": 2000,
    "crop_attempts": 10,
    "repeated_augmentation": 3,
    "augmentations": rand_augment(7),
    "interpolation": "bicubic",  # timm's configuration of the weights
    "training_interpolation": "random",  # --train-interpolation
    "antialias": True,
    "eval_antialias": True,
    "eval_resize": 235,  # floor(224 / 0.95)
}
# libffcv/ffcv-imagenet: rn50_configs/rn50_88_epochs.yaml and train_imagenet.py.
FFCV = {
    "model": "resnet50-ffcv",
    "conv_init_fan": "out",
    "fc_bias_init": "uniform",
    "epochs": 88,
    "global_batch_images": 8 * 512,
    "lr": 1.7,
    "lr_scaling": "none",
    "warmup_epochs": 2.0,  # lr_peak_epoch
    "warmup_start_lr": 1.7e-4,
    "lr_decay": "linear",
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "weight_decay_roles": (
        *("conv_weight", "fc_weight", "fc_bias", "shortcut_bn_scale", "shortcut_bn_bias"),
    ),
    "loss_scaling": "dynamic",
    "loss_scale": 65536.0,
    "loss_scale_growth_steps": 2000,
    "crop_attempts": 10,
    "antialias": True,
    "eval_antialias": True,
    "image_sizes": ((0, 160), (71, 192)),
    "image_size": 192,
    "eval_resize": 293,  # 256 / (224 / 256)
    "eval_crop": 256,
    "eval_flips": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "resnet50-torchvision-v1": TORCHVISION
    | {
        "lr": 0.1,
        "warmup_epochs": 0.0,
        "lr_decay": "step",
        "lr_step_epochs": (30, 60),
        "weight_decay": 1e-4,
        "weight_decay_roles": ("conv_weight", "bn_scale", "bn_bias", "fc_weight", "fc_bias"),
        "label_smoothing": 0.0,
    },
    "resnet50-torchvision-v2": TORCHVISION_V2 | {"image_size": 176, "repeated_augmentation": 4},
    "resnet101-torchvision-v2": TORCHVISION_V2 | {"model": "resnet101"},
    "resnet152-torchvision-v2": TORCHVISION_V2 | {"model": "resnet152"},
    "resnext50-32x4d-torchvision-v2": TORCHVISION_V2 | {"model": "resnext50-32x4d"},
    "resnext101-32x8d-torchvision-v2": TORCHVISION_V2
    | {"model": "resnext101-32x8d", "image_size": 176},
    "wide-resnet50-2-torchvision-v2": TORCHVISION_V2
    | {"model": "wide_resnet50_2", "image_size": 176},
    "wide-resnet101-2-torchvision-v2": TORCHVISION_V2 | {"model": "wide_resnet101_2"},
    "resnet50-rsb-a1": STRIKES_BACK
    | {
        "epochs": 600,
        "label_smoothing": 0.1,
        "target_threshold": 0.0,
        "mixup_alpha": 0.2,
        "weight_decay": 0.01,
    },
    "resnet50-rsb-a2": STRIKES_BACK,
    "resnet50-rsb-a3": STRIKES_BACK
    | {
        "epochs": 100,
        "lr": 8e-3,
        "image_size": 160,
        "stochastic_depth": 0.0,
        "repeated_augmentation": 1,
        "augmentations": rand_augment(6),
    },
    "resnet50-ffcv-88ep": FFCV,
}
"""The fields that differ from the defaults."""
ACCURACIES = {
    "resnet50-torchvision-v1": ["76.13"],
    "resnet50-torchvision-v2": ["80.858"],
    "resnet101-torchvision-v2": ["81.886"],
    "resnet152-torchvision-v2": ["82.284"],
    "resnext50-32x4d-torchvision-v2": ["81.198"],
    "resnext101-32x8d-torchvision-v2": ["82.834"],
    "wide-resnet50-2-torchvision-v2": ["81.602"],
    "wide-resnet101-2-torchvision-v2": ["82.51"],
    "resnet50-rsb-a1": ["80.4"],
    "resnet50-rsb-a2": ["79.8"],
    "resnet50-rsb-a3": ["78.1"],
    "resnet50-ffcv-88ep": ["78.4"],
}


def test_the_tables_have_every_recipe_of_others() -> None:
    others = RECIPES.keys() - {*NVIDIA_RECIPES, *OWN_RECIPES}
    assert PUBLISHED.keys() == ACCURACIES.keys() == others


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_values_its_source_states(name: str) -> None:
    assert RECIPES[name]() == Recipe(**PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_first_line_about_a_recipe_gives_its_published_accuracies(name: str) -> None:
    about = str(inspect.getdoc(RECIPES[name].load_function()))
    title = " ".join(about.partition("\n\n")[0].split())

    assert re.findall(r"\d\d\.\d+", title) == ACCURACIES[name]
    assert [row.figure() for row in find_accuracies(name)] == ACCURACIES[name]
    assert "Source:" in about or "Source and code:" in about
    assert "Cost:" in about


def torch_rates(
    schedulers: Callable[[torch.optim.Optimizer], Any], lr: float, epochs: int
) -> list[float]:
    """Return the learning rate of every epoch by PyTorch's schedulers, as torchvision steps them:
    once after every epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = schedulers(optimizer)
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedulers of torchvision's train.py with its options for the second weights."""
    schedulers = torch.optim.lr_scheduler
    warmup = schedulers.LinearLR(optimizer, start_factor=0.01, total_iters=5)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=595, eta_min=0.0)
    return schedulers.SequentialLR(optimizer, [warmup, cosine], milestones=[5])


@pytest.mark.parametrize(
    ("name", "schedulers", "peak"),
    [
        (
            "resnet50-torchvision-v1",
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.1),
            0.1,
        ),
        ("resnet50-torchvision-v2", warm_up_and_cosine, 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_torchvisions_rates_are_those_of_pytorchs_schedulers(
    name: str, schedulers: Callable[[torch.optim.Optimizer], Any], peak: float
) -> None:
    recipe = RECIPES[name]()

    rates = learning_rates(recipe, 3)

    expected = torch_rates(schedulers, peak, recipe.epochs)
    np.testing.assert_allclose(rates, np.repeat(expected, 3), rtol=1e-9, atol=1e-12)


# Computed by timm 1.0.31: create_scheduler_v2(Lamb, "cosine", num_epochs=epochs, warmup_epochs=5,
# warmup_lr=1e-4, min_lr=1e-6), stepped after every epoch. The last number is the sum of all epochs.
TIMM_RATES = {
    "resnet50-rsb-a1": {
        **{0: 0.0001, 1: 0.00108, 4: 0.00402, 5: 0.004999143483776405, 300: 0.0025005},
        **{599: 1.0342625275568519e-06, "sum": 1.4881005278504635},
    },
    "resnet50-rsb-a2": {
        **{0: 0.0001, 1: 0.00108, 4: 0.00402, 5: 0.004996574522119057, 150: 0.0025005},
        **{299: 1.1370491709023981e-06, "sum": 0.7379536110693594},
    },
    "resnet50-rsb-a3": {
        **{0: 0.0001, 1: 0.00168, 4: 0.00642, 5: 0.007950759518210254, 50: 0.0040005},
        **{99: 2.973511817256466e-06, "sum": 0.38040865278613134},
    },
}


@pytest.mark.parametrize("name", TIMM_RATES)
def test_the_rates_of_strikes_back_are_those_of_timm(name: str) -> None:
    rates = learning_rates(RECIPES[name](), 4)

    expected = dict(TIMM_RATES[name])
    assert rates.sum() / 4 == pytest.approx(expected.pop("sum"), rel=1e-12)
    for epoch, rate in expected.items():
        assert rates[4 * epoch : 4 * epoch + 4] == pytest.approx(rate, rel=1e-9)


def test_ffcvs_rates_are_those_of_its_two_interpolations() -> None:
    # train_imagenet.py: between epochs, the rate of a step is a line from that of its epoch to that
    # of the next one.
    of_epochs = np.interp(range(89), [0, 2, 88], [1.7e-4, 1.7, 0])
    expected = [
        np.interp(range(6), [0, 6], [of_epochs[epoch], of_epochs[epoch + 1]]) for epoch in range(88)
    ]

    rates = learning_rates(RECIPES["resnet50-ffcv-88ep"](), 6)

    np.testing.assert_allclose(rates, np.concatenate(expected), rtol=1e-12)


def test_ffcvs_sizes_are_those_of_its_ramp() -> None:
    recipe = RECIPES["resnet50-ffcv-88ep"]()
    for epoch in range(88):
        # train_imagenet.py, get_resolution: the nearest multiple of 32 on a line
        size = np.interp(epoch, [65, 76], [160, 192])
        assert find_size(recipe, epoch) == round(size / 32) * 32


def test_torchvisions_average_is_that_of_pytorchs_averaged_model() -> None:
    recipe = RECIPES["resnet50-torchvision-v2"]()
    steps_per_epoch, decay = 70, 1 - 2e-5 * 8 * 128 * 32 / 600
    model = torch.nn.Linear(1, 1, bias=False)
    average = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=lambda old, new, _: decay * old + (1 - decay) * new
    )
    values = np.random.default_rng(0).normal(size=8 * steps_per_epoch)
    expected = []
    for step, value in enumerate(values):
        torch.nn.init.constant_(model.weight, value)
        epoch, place = divmod(step, steps_per_epoch)
        if place % 32 == 0:  # --model-ema-steps
            average.update_parameters(model)
            if epoch < 5:  # --lr-warmup-epochs
                average.n_averaged.fill_(0)
        expected.append(float(average.module.weight.detach()))

    decays = ema_decays(recipe, steps_per_epoch * recipe.epochs)[: len(values)]

    mean = 0.0
    for step in range(len(values)):
        mean = decays[step] * mean + (1 - decays[step]) * values[step]
        assert mean == pytest.approx(expected[step], rel=1e-5)


def is_decayed_by_torchvision(tensor: Tensor) -> bool:
    """torchvision's `set_weight_decay` with `--norm-weight-decay 0`: batch norms do not decay."""
    return not tensor.role.startswith("bn_")


def is_decayed_by_timm(tensor: Tensor) -> bool:
    """timm's `param_groups_weight_decay`: what has one dimension or is a bias does not decay."""
    return len(tensor.shape) > 1 and not tensor.name.endswith(".bias")


def is_decayed_by_ffcv(tensor: Tensor) -> bool:
    """train_imagenet.py: parameters with "bn" in their names do not decay."""
    return "bn" not in tensor.name


DECAYED: dict[str, Callable[[Tensor], bool]] = {
    "resnet50-torchvision-v1": lambda _: True,
    "resnext50-32x4d-torchvision-v2": is_decayed_by_torchvision,
    "resnet50-rsb-a2": is_decayed_by_timm,
    "resnet50-ffcv-88ep": is_decayed_by_ffcv,
}


@pytest.mark.parametrize("name", DECAYED)
def test_weight_decay_applies_to_the_tensors_of_the_originals_groups(name: str) -> None:
    recipe = RECIPES[name]()

    for tensor in recipe.list_tensors():
        if tensor.is_trained:
            assert recipe.decays(tensor) == DECAYED[name](tensor), tensor.name


def test_every_recipe_has_one_origin() -> None:
    assert {RECIPES[name].origin for name in NVIDIA_RECIPES} == {"NVIDIA's Deep Learning Examples"}
    origins = {name: RECIPES[name].origin for name in PUBLISHED}
    result = {name.split("-")[-2]: origin for name, origin in origins.items()}
    assert result == {"torchvision": "torchvision", "rsb": "ResNet strikes back", "ffcv": "FFCV"}
