"""Files with the names of PaddleClas' ResNeXt and ResNet, as `paddle.save(model.state_dict(),
path)` writes them."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_paddle_90ep
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import paddle_pickle
from lockstep.weights.formats.nvidia_paddle import read
from tests.weights.formats.cases import RESNET, Variables, assert_canonical, state_of

pytestmark = pytest.mark.usefixtures("small_models")

LEAVES = {"weight": "weight", "bias": "bias", "running_mean": "_mean", "running_var": "_variance"}
OF_BLOCK = {
    **{f"conv{i + 1}": f"conv{i}.KERNEL" for i in range(3)},
    **{f"bn{i + 1}": f"conv{i}.NORM" for i in range(3)},
    "downsample.0": "short.KERNEL",
    "downsample.1": "short.NORM",
}


def recipe_of(model: str, logits: int) -> Recipe:
    return resnet50_paddle_90ep().replace(model=model, logits=logits, precision="fp32")


def paddleclas(
    tensors: Variables, blocks: dict[str, str], kernel: str, norm: str, others: dict[str, str]
) -> Variables:
    """Return tensors with names of PaddleClas, given the names of blocks, of the layers in them,
    and of the others."""
    arrays = {}
    for name, value in tensors.items():
        module, leaf = name.rsplit(".", 1)
        if module in others:
            scope = others[module]
        else:
            block = ".".join(module.split(".")[:2])
            scope = f"{blocks[block]}.{OF_BLOCK[module.removeprefix(f'{block}.')]}"
        scope = scope.replace("KERNEL", kernel).replace("NORM", norm)
        arrays[f"{scope}.{LEAVES[leaf]}"] = value.T if name == "fc.weight" else value
    return arrays


def resnext(tensors: Variables) -> Variables:
    """Return tensors as `ResNeXt` of ppcls/arch/backbone/model_zoo/resnext.py names them."""
    blocks = {
        f"layer{stage}.{i}": f"bb_{stage - 1}_{i}" for stage in range(1, 5) for i in range(23)
    }
    return paddleclas(
        tensors,
        blocks,
        "_conv",
        "_batch_norm",
        {"conv1": "conv.KERNEL", "bn1": "conv.NORM", "fc": "out"},
    )


def resnet(tensors: Variables, layers: tuple[int, ...]) -> Variables:
    """Return tensors as `ResNet` of ppcls/arch/backbone/legendary_models/resnet.py names them,
    which numbers all blocks."""
    scopes = [
        f"layer{stage}.{i}" for stage, depth in enumerate(layers, start=1) for i in range(depth)
    ]
    blocks = {scope: f"blocks.{i}" for i, scope in enumerate(scopes)}
    return paddleclas(
        tensors, blocks, "conv", "bn", {"conv1": "stem.0.KERNEL", "bn1": "stem.0.NORM", "fc": "fc"}
    )


def test_resnext_is_read_by_its_names(tmp_path: Path) -> None:
    recipe = recipe_of("grouped", 10)
    state = state_of(recipe)
    stored = resnext(state.tensors)
    known = {
        *("conv._conv.weight", "bb_1_1.conv2._batch_norm._mean", "bb_3_0.short._conv.weight"),
        *("out.weight", "out.bias"),
    }
    assert known < stored.keys()  # names of ResNeXt101_32x4d_pretrained.pdparams
    paddle_pickle.dump(tmp_path / "a.pdparams", stored)
    weights = read(tmp_path / "a", momentum=False)
    assert (weights.recipe, weights.origin, weights.remarks) == (recipe, "PaddleClas", ())
    assert_canonical(weights.state.tensors, state.tensors)


def test_resnet_is_read_by_its_names(tmp_path: Path) -> None:
    recipe = recipe_of("small", 10)
    state = state_of(recipe)
    paddle_pickle.dump(tmp_path / "a.pdparams", resnet(state.tensors, RESNET.layers))
    weights = read(tmp_path / "a", momentum=False)
    assert (weights.recipe, weights.origin, weights.remarks) == (recipe, "PaddleClas", ())
    assert_canonical(weights.state.tensors, state.tensors)


def test_another_shortcut_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PaddleClas' ResNet18 has a kernel in the shortcut of its first block."""
    basic = ModelSpec(
        block="basic", layers=(1, 1, 1, 1), stem_width=8, widths=(8, 8, 16, 16), expansion=1
    )
    monkeypatch.setitem(MODELS, "basic", basic)
    stored = resnet(state_of(recipe_of("basic", 10)).tensors, basic.layers)
    stored |= {"blocks.0.short.conv.weight": np.zeros((8, 8, 1, 1), np.float32)}
    paddle_pickle.dump(tmp_path / "a.pdparams", stored)
    with pytest.raises(CheckpointError, match=r"basic, but .* blocks\.0\.short\.conv\.weight"):
        read(tmp_path / "a", momentum=False)
