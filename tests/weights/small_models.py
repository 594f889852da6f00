"""Narrow models under the names that other programs know, and files of all programs with their
weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import lockstep
from lockstep.inference import onnx_model
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights import certificate, logits_process
from lockstep.weights.formats import (
    keras_file,
    nvidia_mxnet,
    nvidia_paddle,
    nvidia_tensorflow,
    timm_folder,
    torch_writer,
)
from tests.weights.formats.cases import state_of

LOGITS = 5
Arrays = dict[str, np.ndarray]


def use_narrow_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ResNet-50 narrow and short: v1.5, v1 and with blur. Its names stay, which some formats
    need."""
    for name in ("resnet50", "resnet50-v1", "resnetblur50"):
        monkeypatch.setitem(MODELS, name, replace(narrow_model(MODELS[name]), layers=(1, 1, 1, 1)))


def compute_in_this_process(monkeypatch: pytest.MonkeyPatch, backend: str = "reference") -> None:
    """Compute the logits of certificates with one backend, in this process, which takes much less
    time."""

    def compute(folder: Path, backend: str, parts: list[str]) -> str:
        logits_process.compute_logits(folder, backend, parts)
        return (folder / f"{backend}.txt").read_text()

    monkeypatch.setattr(certificate, "find_backend", lambda origin: backend)
    monkeypatch.setattr(certificate, "_compute_logits", compute)
    monkeypatch.setattr(logits_process, "tell", lambda done, total: None)


def converted(source: Path, target: Path, *, to: str = "safetensors", **choice: Any) -> Any:
    """Write weights in another format, without a certificate, which takes seconds."""
    return lockstep.load(source, **choice).save(target, to=to, certificate=False)


def recipe_of(model: str = "resnet50") -> Recipe:
    return Recipe(model=model, logits=LOGITS, precision="fp32")


def keras_recipe() -> Recipe:
    """A recipe whose weights need no folding in Keras' file."""
    return recipe_of("resnet50-v1").replace(
        mean=keras_file.MEAN, std=keras_file.STD, bn_epsilon=keras_file.EPSILON
    )


def plain_state(recipe: Recipe) -> State:
    """Return a state of different values, with running variances above 0, without velocities."""
    tensors = state_of(recipe).tensors
    for name, value in tensors.items():
        if name.endswith("running_var"):
            tensors[name] = np.abs(value)
    return State(0, tensors, {})


def positive_tensors(recipe: Recipe) -> Arrays:
    """Return small weights, with running variances well above 0."""
    tensors = state_of(recipe).tensors
    for name, value in tensors.items():
        tensors[name] = np.abs(value) + 0.5 if name.endswith("running_var") else value / 4
    return tensors


def make_torch_tensors(tensors: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in tensors.items()}


def zip_file(path: Path, state: State) -> None:
    torch.save(make_torch_tensors(state.tensors), path)


def legacy_file(path: Path, state: State) -> None:
    torch.save(make_torch_tensors(state.tensors), path, _use_new_zipfile_serialization=False)


def safetensors_file(path: Path, state: State) -> None:
    save_file({f"module.{name}": value for name, value in state.tensors.items()}, path)


def timm(path: Path, state: State) -> None:
    timm_folder.write(path, recipe_of(), state, ("cat", "owl"))


def hub(path: Path, state: State) -> None:
    """Write a folder with both of the files that a hub may have."""
    timm(path, state)
    zip_file(path / "pytorch_model.bin", state)


def nvidia_pytorch(path: Path, state: State) -> None:
    full = State(
        0,
        state.tensors,
        state_of(recipe_of()).momentum,
        {name: value + 1 for name, value in state.tensors.items()},
    )
    torch_writer.write_nvidia_pytorch(path, recipe_of(), full, epochs=3)


def keras(path: Path, state: State) -> None:
    keras_file.write_keras(path.with_name("k.weights.h5"), keras_recipe(), state)
    path.with_name("k.weights.h5").rename(path)


def onnx(path: Path, state: State) -> None:
    path.write_bytes(onnx_model.build_model(recipe_of(), state.tensors, ()).SerializeToString())


def tensorflow(path: Path, state: State) -> None:
    nvidia_tensorflow.write(path, recipe_of(), state)


def paddle(path: Path, state: State) -> None:
    nvidia_paddle.write(path, recipe_of(), state)


def mxnet(path: Path, state: State) -> None:
    nvidia_mxnet.write(path, recipe_of(), state)


Writer = Callable[[Path, State], None]
