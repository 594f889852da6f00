"""Weights are the same after conversion to any format; whatever is lost is reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import lockstep
from lockstep.models.architectures import MODELS, ModelSpec, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import (
    resnet50_mxnet_90ep,
    resnet50_paddle_90ep,
    resnet50_tensorflow_90ep,
)
from lockstep.recipes.initial_weights import initial_tensors, zero_momentum
from lockstep.system.errors import CheckpointError, DataError
from lockstep.weights import Weights, checkpoint, open_weights
from lockstep.weights.formats import (
    mxnet_params,
    nvidia_mxnet,
    nvidia_paddle,
    nvidia_tensorflow,
    paddle_pickle,
)
from lockstep.weights.formats.tensor_bundle import Bundle
from tests.lines import check_lines
from tests.weights.formats.cases import bits


def converted(source: Path, target: Path, *, to: str = "safetensors", **choice: Any) -> Any:
    """Write weights in another format, without a certificate."""
    return lockstep.load(source, **choice).save(target, to=to, certificate=False)


"""Certificates need processes and seconds; `test_certificate` tests them."""
SPEC = ModelSpec(
    block="bottleneck",
    layers=(1, 1, 1, 1),
    stem_width=8,
    widths=(8, 16, 32, 64),
    groups=2,
    expansion=2,
)
LIKE_ORIGINAL = resnet50_tensorflow_90ep().replace(model=SPEC, precision="fp32")


def state_of(recipe: Recipe, step: int = 7) -> State:
    tensors = initial_tensors(recipe)
    velocity = {
        name: np.full_like(value, i)
        for i, (name, value) in enumerate(zero_momentum(recipe).items())
    }
    return State(step, tensors, velocity)


@pytest.fixture
def run(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """A run with checkpoints of two steps, moving averages and a loss scale."""
    for step in (3, 7):
        state = state_of(tiny_recipe, step)
        state.tensors["fc.bias"][:] = step
        averages = {name: value + 1 for name, value in state.tensors.items()}
        whole = State(
            step,
            state.tensors,
            state.momentum,
            averages,
            {"scale": 8.0, "good_steps": 1.0, "bad_steps": 0.0},
        )
        about = {"recipe": tiny_recipe.fields(), "classes": ["cat", "owl"]}
        checkpoint.save(tmp_path / "run" / "checkpoints", whole, data_digest="", about=about)
    return tmp_path / "run"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A folder as NVIDIA's code writes it."""
    nvidia_tensorflow.write(
        tmp_path / "theirs" / "model.ckpt-9", LIKE_ORIGINAL, state_of(LIKE_ORIGINAL, 9)
    )
    return tmp_path / "theirs"


@pytest.mark.parametrize("named", ["folder", "prefix", "index"])
def test_a_checkpoint_of_tensorflow_is_opened_with_the_published_recipe(
    named: str, original: Path
) -> None:
    prefix = original / "model.ckpt-9"
    path = {"folder": original, "prefix": prefix, "index": original / "model.ckpt-9.index"}[named]
    weights = open_weights(path)
    assert weights.recipe == LIKE_ORIGINAL
    assert (weights.classes, weights.source, weights.remarks) == ((), prefix, ())
    assert bits(weights.tensors) == bits(initial_tensors(LIKE_ORIGINAL))


def test_there_are_no_moving_averages_in_a_checkpoint_of_tensorflow(original: Path) -> None:
    with pytest.raises(CheckpointError, match="has no moving average"):
        open_weights(original, ema=True)
    with pytest.raises(CheckpointError, match="has no moving average"):
        converted(original, original / "a.safetensors", ema=True)


def test_a_checkpoint_of_tensorflow_becomes_a_file(original: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "neutral.safetensors"
    result = converted(original, target)
    assert result == {
        "source": str(original / "model.ckpt-9"),
        "origin": "NVIDIA TensorFlow",
        "written": [str(target)],
        "model": LIKE_ORIGINAL.fields()["model"],
        "logits": 1001,
        "step": 9,
        "remarks": ["left out, since the file holds only weights: velocities, step 9"],
        "certificate": None,
    }
    assert [path.name for path in target.parent.iterdir()] == ["neutral.safetensors"]
    assert bits(load_file(target)) == bits(initial_tensors(LIKE_ORIGINAL))
    assert open_weights(target).recipe == LIKE_ORIGINAL
    # Other users may read it too.
    assert target.stat().st_mode == (tmp_path / "theirs" / "checkpoint").stat().st_mode


def test_a_run_becomes_a_checkpoint_of_tensorflow_with_velocities_and_step(
    run: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    prefix = tmp_path / "to" / "model.ckpt-7"
    result = converted(run, prefix, to="nvidia-tensorflow")
    names = ["model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001", "checkpoint"]
    assert result["written"] == [str(prefix.parent / name) for name in names]
    assert sorted(names) == sorted(path.name for path in prefix.parent.iterdir())
    bundle = Bundle(prefix)
    assert bundle.read("global_step") == result["step"] == 7
    assert bundle.read("resnet/output/dense/bias").tolist() == [7] * 10
    velocity = state_of(tiny_recipe).momentum["layer1.0.conv2.weight"]
    name = "resnet/btlnck_block_0_0/bottleneck_2/bottleneck_2group_filter/Momentum"
    assert np.array_equal(bundle.read(name), velocity.transpose(2, 3, 1, 0))
    for words in ("symmetric padding", "have 10", "loss scaling", "--ema converts them"):
        assert [words in remark for remark in result["remarks"]].count(True) == 1


@pytest.mark.parametrize(("checkpoint", "ema", "bias"), [("3", False, 3), ("newest", True, 8)])
def test_checkpoint_and_average_are_chosen(
    checkpoint: str, ema: bool, bias: int, run: Path
) -> None:
    prefix = run.parent / "model"
    result = converted(run, prefix, to="nvidia-tensorflow", checkpoint=checkpoint, ema=ema)
    assert Bundle(prefix).read("resnet/output/dense/bias").tolist() == [bias] * 10
    assert any("no velocities were written" in remark for remark in result["remarks"]) == ema
    file = run.parent / "file.safetensors"
    converted(run, file, checkpoint=checkpoint, ema=ema)
    assert open_weights(file).tensors["fc.bias"].tolist() == [bias] * 10
    assert open_weights(file).classes == ("cat", "owl")


def test_given_names_of_classes_are_stored(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "named.safetensors"
    names = tuple("abcdefghij")
    converted(run, target, classes=names)
    with safe_open(target, "numpy") as file:
        assert json.loads(file.metadata()["lockstep"])["classes"] == list(names)
    assert open_weights(target).classes == names


def test_names_that_do_not_fit_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"3 names, .* 10 outputs; expected 2 or 10"):
        converted(run, tmp_path / "named.safetensors", classes=["a", "b", "c"])
    with pytest.raises(CheckpointError, match="nvidia-paddle holds no names of classes"):
        converted(run, tmp_path / "named", to="nvidia-paddle", classes=["a", "b"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "resnet18", narrow_model(MODELS["resnet18"]))


def check_resnet18(weights: Weights, published: Recipe, source: Path) -> None:
    """Check that the weights are a new resnet18's, and that the rest of its recipe is published."""
    assert weights.recipe == published.replace(model="resnet18", logits=10, precision="fp32")
    assert (weights.classes, weights.source) == ((), source)
    assert bits(weights.tensors) == bits(initial_tensors(Recipe(model="resnet18", logits=10)))


@pytest.fixture
def paddle_folder(tmp_path: Path) -> Path:
    """A folder as NVIDIA's PaddlePaddle code writes it."""
    recipe = Recipe(model="resnet18", logits=10)
    nvidia_paddle.write(
        tmp_path / "checkpoint" / "ResNet50" / "4" / "resnet_50_paddle", recipe, state_of(recipe)
    )
    return tmp_path / "checkpoint"


@pytest.mark.parametrize(
    "named", ["", "ResNet50", "ResNet50/4", "ResNet50/4/resnet_50_paddle.pdparams"]
)
def test_a_checkpoint_of_paddle_is_opened_with_the_published_recipe(
    named: str, paddle_folder: Path
) -> None:
    weights = open_weights(paddle_folder / named)
    source = paddle_folder / "ResNet50" / "4" / "resnet_50_paddle"
    check_resnet18(weights, resnet50_paddle_90ep(), source)
    check_lines(weights.remarks, "^the stem has a fourth input channel, .* only zeros")


def test_there_are_no_moving_averages_in_a_checkpoint_of_paddle(
    paddle_folder: Path, tmp_path: Path
) -> None:
    for path in (paddle_folder, paddle_folder / "ResNet50" / "4" / "resnet_50_paddle.pdparams"):
        with pytest.raises(CheckpointError, match=r"has no moving average"):
            open_weights(path, ema=True)
        with pytest.raises(CheckpointError, match=r"has no moving average"):
            converted(path, tmp_path / "a.safetensors", ema=True)


def test_from_one_framework_to_another_a_state_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "small", SPEC)
    recipe = Recipe(model="small", logits=3)
    state = state_of(recipe)
    nvidia_tensorflow.write(tmp_path / "a", recipe, state)
    to_paddle = converted(tmp_path / "a", tmp_path / "b", to="nvidia-paddle")
    assert to_paddle["written"] == [str(tmp_path / name) for name in ("b.pdparams", "b.pdopt")]
    converted(tmp_path / "b", tmp_path / "c", to="nvidia-tensorflow")
    copy = nvidia_tensorflow.read(tmp_path / "c").state
    assert bits(copy.tensors) == bits(state.tensors)
    assert bits(copy.momentum) == bits(state.momentum)
    for words in (
        "fourth input channel",
        "SAME padding",
        "have 3: --num-of-class",
        "step 7 cannot be stored",
    ):
        assert [words in remark for remark in to_paddle["remarks"]].count(True) == 1


def test_a_run_becomes_a_checkpoint_of_paddle_with_velocities(
    run: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    result = converted(run, tmp_path / "ResNet50" / "7" / "model", to="nvidia-paddle")
    optimizer = paddle_pickle.load(tmp_path / "ResNet50" / "7" / "model.pdopt").arrays
    assert np.array_equal(
        optimizer["conv2d_2.w_0_velocity_0"],
        state_of(tiny_recipe).momentum["layer1.0.conv2.weight"],
    )
    assert optimizer["loss_scaling_0"] == 8
    for words in ("this is another", "have 10: --num-of-class", "--ema converts them"):
        assert [words in remark for remark in result["remarks"]].count(True) == 1
    averages = converted(run, tmp_path / "average", to="nvidia-paddle", ema=True)
    assert averages["written"] == [str(tmp_path / "average.pdparams")]
    assert (
        paddle_pickle.load(tmp_path / "average.pdparams").arrays["linear_0.b_0"].tolist()
        == [8] * 10
    )
    assert any("no velocities were written" in remark for remark in averages["remarks"])


@pytest.fixture
def mxnet_folder(tmp_path: Path) -> Path:
    """A folder as NVIDIA's MXNet code writes it."""
    recipe = Recipe(model="resnet18", logits=10)
    for epoch in (3, 4):
        nvidia_mxnet.write(
            tmp_path / "theirs" / f"model-{epoch:04d}.params",
            recipe,
            State(0, initial_tensors(recipe), {}),
        )
    return tmp_path / "theirs"


@pytest.mark.parametrize("named", ["", "model", "model-0004.params"])
def test_a_checkpoint_of_mxnet_is_opened_with_the_published_recipe(
    named: str, mxnet_folder: Path
) -> None:
    weights = open_weights(mxnet_folder / named)
    check_resnet18(weights, resnet50_mxnet_90ep(), mxnet_folder / "model-0004.params")
    assert weights.remarks == ()


def test_there_are_no_moving_averages_in_a_checkpoint_of_mxnet(mxnet_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no moving average; leave out --ema"):
        open_weights(mxnet_folder, ema=True)


def test_a_run_becomes_a_checkpoint_of_mxnet_with_velocities_and_back(
    run: Path, tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = converted(run, tmp_path / "to" / "model-0090.params", to="nvidia-mxnet")
    written = ["model-symbol.json", "model-0090.momentum.params", "model-0090.params"]
    assert result["written"] == [str(tmp_path / "to" / name) for name in written]
    assert (
        mxnet_params.load(tmp_path / "to" / "model-0090.params")["arg:fc1_bias"].tolist()
        == [7] * 10
    )
    for words in (
        "this is another",
        "have 10: --num-classes",
        "step 7 cannot be stored",
        "loss scaling",
        "--ema converts them",
    ):
        assert [words in remark for remark in result["remarks"]].count(True) == 1
    assert isinstance(tiny_recipe.model, ModelSpec)
    monkeypatch.setitem(MODELS, "tiny", tiny_recipe.model)
    converted(tmp_path / "to", tmp_path / "back", to="nvidia-tensorflow")
    back = nvidia_tensorflow.read(tmp_path / "back").state
    assert bits(back.momentum) == bits(state_of(tiny_recipe).momentum)
    averages = converted(run, tmp_path / "average", to="nvidia-mxnet", ema=True)
    assert averages["written"] == [
        str(tmp_path / name) for name in ("average-symbol.json", "average-0000.params")
    ]
    assert mxnet_params.load(tmp_path / "average-0000.params")["arg:fc1_bias"].tolist() == [8] * 10


def test_there_and_back_a_state_is_the_same(original: Path, tmp_path: Path) -> None:
    converted(original, tmp_path / "a.safetensors")
    converted(tmp_path / "a.safetensors", tmp_path / "b", to="nvidia-tensorflow")
    converted(tmp_path / "b.index", tmp_path / "c.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_a_file_of_another_program_is_converted(tmp_path: Path) -> None:
    recipe = Recipe(model="resnet18", logits=3)
    save_file(initial_tensors(recipe), tmp_path / "a.safetensors")
    result = converted(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (result["model"], result["step"]) == ("resnet18", 0)
    check_lines(
        result["remarks"],
        "^the file does not say how its images were prepared",
        "^the weights name no classes",
    )
    with safe_open(tmp_path / "b.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["lockstep"])["recipe"]["model"] == "resnet18"
    with pytest.raises(CheckpointError, match="bottleneck blocks only"):
        converted(tmp_path / "a.safetensors", tmp_path / "c", to="nvidia-tensorflow")


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("a.safetensors", {"to": "onnx"}, "there is no format 'onnx' to convert to"),
    ("a.pth", {}, r"a\.pth: the name of a safetensors file ends in \.safetensors"),
    ("there.safetensors", {}, r"there\.safetensors already exists"),
    ("theirs/model.ckpt-9", {"to": "nvidia-tensorflow"}, r"model\.ckpt-9\.index already exists"),
    ("link.safetensors", {}, r"link\.safetensors already exists"),
    ("a" * 300, {"to": "nvidia-paddle"}, "aaa.* cannot be written: File name too long"),
    ("there.safetensors/a.safetensors", {}, "cannot be written"),
    ("there.safetensors/model", {"to": "nvidia-tensorflow"}, "cannot be written"),
    ("there.safetensors/model", {"to": "nvidia-paddle"}, "cannot be written"),
    ("there.safetensors/model", {"to": "nvidia-mxnet"}, "cannot be written"),
    (
        "model.params",
        {"to": "nvidia-mxnet"},
        r"model\.params: expected a prefix, or <prefix>-0090.params with an epoch in four digits",
    ),
]


@pytest.mark.parametrize(("target", "arguments", "message"), ERRORS)
def test_what_cannot_be_written_is_an_error_and_changes_nothing(
    target: str, arguments: dict[str, Any], message: str, original: Path, tmp_path: Path
) -> None:
    (tmp_path / "there.safetensors").write_text("mine")
    (tmp_path / "link.safetensors").symlink_to("nothing")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        converted(original, tmp_path / target, **arguments)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.safetensors").read_text() == "mine"


def test_an_evaluation_repeats_the_remarks(textures: Path, tmp_path: Path) -> None:
    recipe = LIKE_ORIGINAL.replace(logits=10)
    nvidia_tensorflow.write(
        tmp_path / "model.ckpt-0", recipe, State(0, initial_tensors(recipe), {})
    )
    result = lockstep.load(tmp_path).evaluate(textures).to_json()
    assert result["images"] == 20
    check_lines(
        result["remarks"], "10 outputs; .* 1001", "^labels are matched by position: .* 10 folders"
    )
