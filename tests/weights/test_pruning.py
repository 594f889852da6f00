"""Zeros of groups of four in files of weights, and files that are pruned without training."""

from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.models.quantisation import layers
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.pruning import check_sparsity, prune
from lockstep.weights.sparsity import Zeros, count_zeros
from lockstep.weights.target_formats import TARGETS
from tests.weights.small_models import converted, keras_recipe, plain_state, recipe_of

NAMES = {
    **{"torchvision": "a.pth", "timm": "folder", "keras": "a.weights.h5"},
    **{"nvidia-pytorch": "a.pth.tar", "flax": "a.msgpack", "torchax": "a.npz"},
}
"""Targets of a conversion whose names are not free."""


pytestmark = pytest.mark.usefixtures("narrow")


def written(path: Path, model: str = "resnet50", channels: int = 3) -> Path:
    recipe = (keras_recipe() if model == "resnet50-v1" else recipe_of(model)).replace(
        stem_channels=channels
    )
    about = {"recipe": recipe.fields(), "classes": []}
    checkpoint.write_weights(path, plain_state(recipe).tensors, about)
    return path


def test_zeros_are_counted_in_fours_along_the_inputs() -> None:
    kernel = np.ones((1, 6, 1, 2), np.float32)
    kernel[0, :, 0, 0] = [0, 1, -0.0, 1, 1, 1]  # the last group is filled up with two zeros
    kernel[0, :, 0, 1] = [0, 1, 1, 1, 0, 1]
    tensors = {
        "kernel": kernel,
        "fc": np.array([[0, 0, 0, 0, 0, 1, 1, 1]]),
        "bn": np.zeros(8),
        "small": np.zeros((8, 3, 7, 7)),
        # The stem, with a fourth input of zeros.
        "conv1.weight": np.array([[0, 1, 1], [1, 1, 1]]).reshape(2, 3, 1, 1),
    }
    assert count_zeros(tensors) == {
        "kernel": Zeros(4, 3, 12, 4),
        "fc": Zeros(2, 1, 8, 5),
        "conv1.weight": Zeros(2, 1, 6, 1),
    }


def test_a_pruned_file_is_2_to_4_and_one_weight_more_makes_it_dense(tmp_path: Path) -> None:
    assert not check_sparsity(written(tmp_path / "dense.safetensors"))["is_sparse"]
    prune(tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors")
    result = check_sparsity(tmp_path / "sparse.safetensors")
    assert (result["is_sparse"], result["dense"], result["sparsity"]) == (True, [], "mask_1d")
    assert result["tensors"]["fc.weight"]["zeros"] == 0
    assert not result["tensors"]["fc.weight"]["is_covered"]
    tensors, about = checkpoint.read_weights(tmp_path / "sparse.safetensors")
    kernel = tensors["layer2.0.conv2.weight"]
    assert np.count_nonzero(kernel) == kernel.size // 2
    kernel[kernel == 0] = np.where(np.arange(kernel.size // 2) == 0, 1, 0)
    checkpoint.write_weights(tmp_path / "one-more.safetensors", tensors, about)
    assert check_sparsity(tmp_path / "one-more.safetensors")["dense"] == ["layer2.0.conv2.weight"]


@pytest.mark.parametrize(("channels", "is_pruned"), [(3, False), (4, True)])
def test_a_stem_of_four_channels_is_pruned(channels: int, is_pruned: bool, tmp_path: Path) -> None:
    source = written(tmp_path / "dense.safetensors", channels=channels)
    target = tmp_path / "sparse.safetensors"
    prune(source, target)
    tensors, about = checkpoint.read_weights(target)
    stem = tensors["conv1.weight"]
    assert 3 * np.count_nonzero(stem) == (2 if is_pruned else 3) * stem.size
    assert check_sparsity(target)["tensors"]["conv1.weight"]["is_covered"] == is_pruned
    stem[0, :, 0, 0] = 1
    checkpoint.write_weights(tmp_path / "one-more.safetensors", tensors, about)
    assert check_sparsity(tmp_path / "one-more.safetensors")["dense"] == (
        ["conv1.weight"] if is_pruned else []
    )


def test_the_stem_of_another_programs_file_is_covered_if_it_is_2_to_4(tmp_path: Path) -> None:
    for channels in (3, 4):
        source = written(tmp_path / f"{channels}.safetensors", channels=channels)
        target = tmp_path / f"{channels}"
        prune(source, target.with_suffix(".sparse.safetensors"))
        converted(
            target.with_suffix(".sparse.safetensors"), target.with_suffix(".pth"), to="torchvision"
        )
        result = check_sparsity(target.with_suffix(".pth"))
        assert (result["is_sparse"], result["tensors"]["conv1.weight"]["is_covered"]) == (
            True,
            channels == 4,
        )


@pytest.mark.parametrize("to", [*TARGETS, "onnx"])
def test_zeros_stay_zeros_through_a_conversion_and_an_export(to: str, tmp_path: Path) -> None:
    model = "resnet50-v1" if to == "keras" else "resnet50"
    source = tmp_path / "sparse.safetensors"
    prune(written(tmp_path / "dense.safetensors", model), source)
    target = tmp_path / "new" / NAMES.get(to, "a.safetensors" if to == "safetensors" else "a")
    if to == "onnx":
        target.parent.mkdir()
        lockstep.load(source).export(target, to=to)
    else:
        converted(source, target, to=to)
    result = check_sparsity(target)
    assert result["is_sparse"]
    assert result["tensors"] == check_sparsity(source)["tensors"]


def test_a_quantised_file_keeps_scales_and_zeros(tmp_path: Path) -> None:
    recipe = recipe_of().replace(quantisation="int8")
    sparse = tmp_path / "sparse.safetensors"
    about = {
        "recipe": recipe.fields(),
        "classes": [],
        "scales": dict.fromkeys(layers(recipe.spec), 0.5),
    }
    checkpoint.write_weights(tmp_path / "a.safetensors", plain_state(recipe).tensors, about)
    prune(tmp_path / "a.safetensors", sparse)
    assert open_weights(sparse).scales == about["scales"]
    lockstep.load(sparse).export(tmp_path / "onnx", to="onnx")
    assert b"QuantizeLinear" in (tmp_path / "onnx" / "model.onnx").read_bytes()
    result = check_sparsity(tmp_path / "onnx")
    assert result["is_sparse"]
    # Rounding to int8 makes zeros of the smallest weights, too.
    for name, of_weights in check_sparsity(sparse)["tensors"].items():
        assert of_weights["zeros"] <= result["tensors"][name]["zeros"]
    assert (
        "its QuantizeLinear and DequantizeLinear were left out"
        in open_weights(tmp_path / "onnx").remarks[-1]
    )


def test_what_cannot_be_pruned_or_written_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "dense.safetensors")
    with pytest.raises(CheckpointError, match=r"no algorithm 'mask_2d'\. Did you mean"):
        prune(source, tmp_path / "a.safetensors", "mask_2d")
    with pytest.raises(CheckpointError, match=r"a\.pth: .* safetensors"):
        prune(source, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="already exists"):
        prune(source, source)
