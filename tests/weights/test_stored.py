"""What a file holds, by its own names and types, in every format."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx as onnx_package
import pytest
import safetensors.torch
import torch
from onnx import numpy_helper

from lockstep.models.state import State
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, known_preprocessing, open_weights
from lockstep.weights.formats import mxnet_params, tensor_bundle
from tests.weights import small_models
from tests.weights.small_models import (
    Writer,
    keras_recipe,
    make_torch_tensors,
    plain_state,
    recipe_of,
)

KINDS = ("conv1.weight", "bn1.running_var", "fc.bias")
NAMES: list[tuple[Writer, str, tuple[str, str, str]]] = [
    (small_models.zip_file, "a.pth", KINDS),
    (small_models.legacy_file, "a.pth", KINDS),
    (small_models.timm, "a", KINDS),
    (small_models.onnx, "a.onnx", KINDS),
    (
        small_models.safetensors_file,
        "a",
        ("module.conv1.weight", "module.bn1.running_var", "module.fc.bias"),
    ),
    (
        small_models.keras,
        "a",
        ("layers/conv2d/vars/0", "layers/batch_normalization/vars/3", "layers/dense/vars/1"),
    ),
    (
        small_models.tensorflow,
        "a",
        (
            "resnet50/conv2d/conv2d/kernel",
            "resnet50/conv2d/BatchNorm/moving_variance",
            "resnet50/output/dense/bias",
        ),
    ),
    (small_models.paddle, "a", ("conv2d_0.w_0", "batch_norm_0.w_2", "linear_0.b_0")),
    (small_models.mxnet, "a", ("arg:conv0_weight", "aux:bn0_moving_var", "arg:fc1_bias")),
]


pytestmark = pytest.mark.usefixtures("narrow")


@pytest.mark.parametrize(
    ("write", "name", "names"), [*NAMES, (small_models.nvidia_pytorch, "a.pth.tar", KINDS)]
)
def test_every_array_is_used_or_in_the_account(
    write: Writer, name: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    write(tmp_path / name, plain_state(recipe_of()))
    weights = open_weights(tmp_path / name)
    idle = {array.name for array in weights.stored if not array.tensors}
    assert idle - {part.name for part in weights.parts} == set()


def state_for(write: Writer) -> State:
    return plain_state(keras_recipe() if write is small_models.keras else recipe_of())


@pytest.mark.parametrize(
    ("write", "name", "theirs"), NAMES, ids=[write.__name__ for write, _, _ in NAMES]
)
def test_every_format_lists_its_own_names_with_the_tensors_made_of_them(
    write: Writer, name: str, theirs: tuple[str, str, str], tmp_path: Path
) -> None:
    state = state_for(write)
    write(tmp_path / name, state)
    stored = open_weights(tmp_path / name).stored
    by_name = {array.name: array for array in stored}
    assert len(by_name) == len(stored)
    assert [by_name[array].tensors for array in theirs] == [(ours,) for ours in KINDS]
    assert {tensor for array in stored for tensor in array.tensors} == state.tensors.keys()
    assert {array.dtype for array in stored if array.tensors} == {"float32"}


# Types: one kernel is of another type than the rest, and the library of the format says of which.


def torch_types(path: Path) -> dict[str, str]:
    values = make_torch_tensors(plain_state(recipe_of()).tensors)
    values |= {
        "conv1.weight": values["conv1.weight"].bfloat16(),
        "bn1.num_batches_tracked": torch.tensor(3),
    }
    torch.save(values, path)
    return {name: str(value.dtype) for name, value in torch.load(path).items()}


def safetensors_types(path: Path) -> dict[str, str]:
    values = make_torch_tensors(plain_state(recipe_of()).tensors)
    safetensors.torch.save_file(values | {"conv1.weight": values["conv1.weight"].bfloat16()}, path)
    return {name: str(value.dtype) for name, value in safetensors.torch.load_file(path).items()}


def lockstep_types(path: Path) -> dict[str, str]:
    values = plain_state(recipe_of()).tensors
    about = {"recipe": recipe_of().fields(), "classes": []}
    checkpoint.write_weights(
        path, values | {"conv1.weight": values["conv1.weight"].astype(np.float16)}, about
    )
    return {name: str(value.dtype) for name, value in safetensors.torch.load_file(path).items()}


def keras_types(path: Path) -> dict[str, str]:
    small_models.keras(path, plain_state(keras_recipe()))
    with h5py.File(path, "r+") as file:
        kernel = file["layers/conv2d/vars/0"][...]
        del file["layers/conv2d/vars/0"]
        file["layers/conv2d/vars/0"] = kernel.astype(np.float16)
        items: list[tuple[str, Any]] = []
        file.visititems(lambda name, item: items.append((name, item)))
        return {name: item.dtype.name for name, item in items if isinstance(item, h5py.Dataset)}


def onnx_types(path: Path) -> dict[str, str]:
    small_models.onnx(path, plain_state(recipe_of()))
    model = onnx_package.load(path)
    [kernel] = [array for array in model.graph.initializer if array.name == "conv1.weight"]
    half = numpy_helper.to_array(kernel).astype(np.float16)
    kernel.CopyFrom(numpy_helper.from_array(half, kernel.name))
    onnx_package.save(model, path)
    stored = onnx_package.load(path).graph.initializer
    return {array.name: numpy_helper.to_array(array).dtype.name for array in stored}


def tensorflow_types(path: Path) -> dict[str, str]:
    small_models.tensorflow(path.with_name("whole"), plain_state(recipe_of()))
    bundle = tensor_bundle.Bundle(path.with_name("whole"))
    values = {name: bundle.read(name) for name in bundle.entries if name != "global_step"}
    values["resnet50/conv2d/conv2d/kernel"] = values["resnet50/conv2d/conv2d/kernel"].astype(
        np.float16
    )
    tensor_bundle.write(path, values)
    return {name: value.dtype.name for name, value in values.items()}


def paddle_types(path: Path) -> dict[str, str]:
    small_models.paddle(path, plain_state(recipe_of()))
    with path.with_name(f"{path.name}.pdparams").open("rb+") as file:
        values = pickle.load(file)
        values["conv2d_0.w_0"] = (values["conv2d_0.w_0"].view(np.uint32) >> 16).astype(np.uint16)
        file.seek(0)
        pickle.dump(values, file, 4)
        file.truncate()
    return {
        name: "bfloat16" if value.dtype == np.uint16 else value.dtype.name
        for name, value in values.items()
    }


def mxnet_types(path: Path) -> dict[str, str]:
    small_models.mxnet(path, plain_state(recipe_of()))
    file = path.with_name(f"{path.name}-0000.params")
    values = dict(mxnet_params.load(file))
    values["arg:conv0_weight"] = values["arg:conv0_weight"].astype(np.float16)
    mxnet_params.dump(file, values)
    return {name: value.dtype.name for name, value in values.items()}


TYPES: list[Callable[[Path], dict[str, str]]] = [
    *(
        *(torch_types, safetensors_types, lockstep_types, keras_types, onnx_types),
        *(tensorflow_types, paddle_types, mxnet_types),
    )
]


@pytest.mark.parametrize("written", TYPES, ids=lambda written: written.__name__)
def test_types_are_those_of_the_file(
    written: Callable[[Path], dict[str, str]], tmp_path: Path
) -> None:
    expected = {name: kind.removeprefix("torch.") for name, kind in written(tmp_path / "a").items()}
    assert set(expected.values()) & {"float16", "bfloat16"}
    opened = open_weights(tmp_path / "a")
    assert {array.name: array.dtype for array in opened.stored} == expected
    assert {value.dtype for value in opened.tensors.values()} == {np.dtype(np.float32)}


def test_numbers_beyond_float32_become_infinite_without_a_warning(tmp_path: Path) -> None:
    values = {
        name: value.double()
        for name, value in make_torch_tensors(plain_state(recipe_of()).tensors).items()
    }
    torch.save(
        values | {"fc.bias": torch.full((5,), -1e300, dtype=torch.float64)}, tmp_path / "a.pth"
    )
    # Warnings are errors in tests.
    assert open_weights(tmp_path / "a.pth").tensors["fc.bias"].tolist() == [-np.inf] * 5


# Reading no more than is needed


def training(path: Path) -> State:
    """Write a checkpoint of a training whose optimizer shares a storage with its weights."""
    state = plain_state(recipe_of())
    weights = make_torch_tensors(state.tensors)
    weights["fc.bias"] = torch.cat([weights["fc.bias"], torch.zeros(3)])[:5]
    shared = weights["fc.bias"].untyped_storage()
    velocity = torch.tensor([], dtype=torch.float32)
    velocity.set_(shared, 5, (3,))  # type: ignore[call-overload]
    slots = {0: {"momentum_buffer": torch.full((9,), 4.25)}, 1: {"momentum_buffer": velocity}}
    groups = [{"params": [0, 1]}]
    torch.save(
        {"state_dict": weights, "epoch": 3, "optimizer": {"state": slots, "param_groups": groups}},
        path,
    )
    return state


def test_velocities_that_nobody_asks_for_are_not_read(tmp_path: Path) -> None:
    state = training(tmp_path / "a.pth")
    data = (tmp_path / "a.pth").read_bytes()
    velocities = np.full(9, 4.25, np.float32).tobytes()
    assert data.count(velocities) == 1
    # Its checksum is wrong then.
    (tmp_path / "a.pth").write_bytes(data.replace(velocities, bytes(36)))
    tensors = open_weights(tmp_path / "a.pth").tensors
    assert all(np.array_equal(tensors[name], value) for name, value in state.tensors.items())
    with pytest.raises(CheckpointError, match=r"a\.pth is damaged.*Bad CRC-32"):
        open_weights(tmp_path / "a.pth", momentum=True)


def test_a_training_is_no_published_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path / "a.pth")
    monkeypatch.setattr(known_preprocessing, "hash_file", None)  # its digest is not even computed
    assert "torchvision-v1 is assumed" in " ".join(open_weights(tmp_path / "a.pth").remarks)
