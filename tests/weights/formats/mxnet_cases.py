"""What the tests of MXNet's files have in common."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.models.architectures import MODELS, ModelSpec, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_mxnet_90ep
from lockstep.weights import Weights
from lockstep.weights.formats import mxnet_params
from lockstep.weights.formats.nvidia_mxnet import read, write
from tests.weights.formats.cases import BASIC, RESNET, RESNEXT, Variables, state_of

EPOCH = "no step is stored; its name says epoch 90, counted from 1"
SPEEDS = "there are no velocities (model-0090.momentum.params)"
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


def read_changed(file: Path, change: Callable[[Variables], object]) -> Weights:
    """Read the file again with other arrays."""
    arrays = dict(mxnet_params.load(file))
    change(arrays)
    mxnet_params.dump(file, arrays)
    return read(file)


def read_with_graph(file: Path, change: Callable[[list[dict[str, Any]]], object]) -> Weights:
    """Read the file again with another graph, whose output is its last node."""
    graph = json.loads(graph_of(file).read_text())
    change(graph["nodes"])
    graph["heads"] = [[len(graph["nodes"]) - 1, 0, 0]]
    graph_of(file).write_text(json.dumps(graph))
    return read(file)


def find_node(nodes: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(node for node in nodes if node["name"] == name)
