"""What the tests of MXNet's files have in common."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.models.architectures import MODELS, ModelSpec, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnet50_mxnet_90ep
from lockstep.weights.formats.nvidia_mxnet import write
from tests.weights.formats.cases import BASIC, RESNET, RESNEXT, state_of

SQUARE = ModelSpec(
    block="bottleneck", layers=(1, 1, 1, 1), stem_width=8, widths=(24, 48, 96, 192), groups=8
)
"""A model whose first stage has a 3x3 convolution with kernels of 3 x 3 x 3."""


def name_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small models a name, and make ResNet-50 narrow, v1.5 and v1. They keep their depth."""
    for name, spec in {
        "small": RESNET,
        "grouped": RESNEXT,
        "basic": BASIC,
        "square": SQUARE,
    }.items():
        monkeypatch.setitem(MODELS, name, spec)
    for name in ("resnet50", "resnet50-v1"):
        monkeypatch.setitem(
            MODELS, name, replace(narrow_model(MODELS[name]), layers=MODELS[name].layers)
        )


def recipe_of(model: str | ModelSpec = "small", logits: int = 1000) -> Recipe:
    return resnet50_mxnet_90ep().replace(model=model, logits=logits, precision="fp32")


def original_file(folder: Path) -> Path:
    """Write a checkpoint as the original does; return its weights' file."""
    recipe = recipe_of()
    write(folder / "out" / "model-0090.params", recipe, State(0, state_of(recipe).tensors, {}))
    return folder / "out" / "model-0090.params"


def graph_of(file: Path) -> Path:
    return file.with_name("model-symbol.json")
