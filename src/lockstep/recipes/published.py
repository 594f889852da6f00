"""The table of published recipes. The module of a recipe is imported when it is used."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.recipes.recipe import Recipe


@dataclass(frozen=True)
class RecipeRow:
    """A published recipe."""

    origin: str
    """Who published it."""
    module: str
    function: str

    def load_function(self) -> Callable[[], Recipe]:
        """Return the function that makes the recipe. Its docstring gives source, published accuracy
        and cost."""
        module = importlib.import_module(f"lockstep.recipes.{self.module}")
        function: Callable[[], Recipe] = getattr(module, self.function)
        return function

    def __call__(self) -> Recipe:
        """Return the recipe."""
        return self.load_function()()


def _make_rows(origin: str, *places: str) -> dict[str, RecipeRow]:
    """Return the rows of one publisher, from the modules and functions."""
    rows = {}
    for place in places:
        module, _, function = place.partition(".")
        rows[function.replace("_", "-")] = RecipeRow(origin, module, function)
    return rows


RECIPES = {
    **_make_rows(
        "NVIDIA's Deep Learning Examples",
        "from_nvidia.resnet50_paddle_50ep",
        "from_nvidia.resnet50_paddle_90ep",
        "from_nvidia.resnet50_paddle_tf32_50ep",
        "from_nvidia.resnet50_paddle_tf32_90ep",
        "from_nvidia.resnet50_paddle_asp_90ep",
        "from_nvidia.resnet50_paddle_qat_10ep",
        "from_nvidia.resnet50_mxnet_90ep",
        "from_nvidia.resnet50_mxnet_fp32_90ep",
        "from_nvidia.resnext101_32x4d_pytorch_90ep",
        "from_nvidia.resnext101_32x4d_pytorch_250ep",
        "from_nvidia.resnet50_tensorflow_90ep",
        "from_nvidia.resnet50_tensorflow_250ep",
        "from_nvidia.resnet50_tensorflow_tf32_90ep",
        "from_nvidia.resnet50_tensorflow_fp32_90ep",
        "from_nvidia.resnet50_tensorflow_fp32_250ep",
        "from_nvidia.resnext101_32x4d_tensorflow_90ep",
        "from_nvidia.resnext101_32x4d_tensorflow_250ep",
    ),
    **_make_rows(
        "torchvision",
        "from_torchvision.resnet50_torchvision_v1",
        "from_torchvision.resnet50_torchvision_v2",
        "from_torchvision.resnet101_torchvision_v2",
        "from_torchvision.resnet152_torchvision_v2",
        "from_torchvision.resnext50_32x4d_torchvision_v2",
        "from_torchvision.resnext101_32x8d_torchvision_v2",
        "from_torchvision.wide_resnet50_2_torchvision_v2",
        "from_torchvision.wide_resnet101_2_torchvision_v2",
    ),
    **_make_rows(
        "ResNet strikes back",
        "from_timm.resnet50_rsb_a1",
        "from_timm.resnet50_rsb_a2",
        "from_timm.resnet50_rsb_a3",
    ),
    **_make_rows(
        "FFCV",
        "from_ffcv.resnet50_ffcv_88ep",
    ),
    **_make_rows(
        "Lockstep",
        "from_torchvision.resnext101_32x4d_torchvision_v2",
        "from_timm.resnext101_32x4d_rsb_a1",
        "from_timm.resnext101_32x4d_rsb_a2",
        "from_timm.resnext101_32x4d_rsb_a3",
        "my_images.my_images",
        "fine_tune.fine_tune",
        "my_images.demo",
    ),
}
ORIGINS = tuple(dict.fromkeys(row.origin for row in RECIPES.values()))
"""Who published recipes. Those of "Lockstep" have no published accuracy."""


def _list_names(origin: str) -> tuple[str, ...]:
    return tuple(name for name, row in RECIPES.items() if row.origin == origin)


NVIDIA_RECIPES = _list_names("NVIDIA's Deep Learning Examples")
OWN_RECIPES = _list_names("Lockstep")
"""Lockstep's recipes. Others published all other recipes."""
