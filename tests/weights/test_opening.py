"""Find weights: runs, checkpoints and files, of Lockstep and of other programs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, open_weights
from tests.conftest import TINY_MODEL

CLASSES = ("cat", "dog")


def evaluation(step: int, percent: float, weights: str = "trained") -> dict[str, Any]:
    return {"kind": "evaluate", "step": step, "weights": weights, "top1_percent": percent}


@pytest.fixture
def tiny_recipe(tiny_recipe: Recipe) -> Recipe:
    return tiny_recipe.replace(logits=3)


def value_at(step: int, *, trained: bool = False) -> dict[str, np.ndarray]:
    """Return tensors of the tiny model, or its velocities, that are all `step`."""
    specs = TINY_MODEL.list_tensors(3)
    return {
        tensor.name: np.full(tensor.shape, step, np.float32)
        for tensor in specs
        if tensor.is_trained or not trained
    }


@pytest.fixture
def run(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """A run with checkpoints at steps 8, 16 and 24. The second one is the best."""
    about = {"recipe": tiny_recipe.fields(), "classes": CLASSES}
    for step in (8, 16, 24):
        averages = value_at(-step) if step == 24 else {}
        state = State(step, value_at(step), value_at(0, trained=True), averages)
        checkpoint.save(tmp_path / "run" / "checkpoints", state, data_digest="", about=about)
    entries = [evaluation(8, 10), evaluation(16, 30), evaluation(24, 20)]
    log_evaluations(tmp_path / "run", *entries)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("checkpoint", "step"), [("newest", 24), ("best", 16), (None, 16), ("8", 8), ("16", 16)]
)
def test_a_run_gives_the_checkpoint_asked_for_or_the_best(
    checkpoint: str | None, step: int, run: Path, tiny_recipe: Recipe
) -> None:
    weights = open_weights(run, checkpoint=checkpoint)
    assert weights.tensors["fc.bias"].tolist() == [step] * 3
    assert weights.recipe == tiny_recipe
    assert weights.classes == CLASSES
    assert weights.source == run / "checkpoints" / f"step-{step:08d}"


def log_evaluations(run: Path, *entries: dict[str, Any]) -> None:
    (run / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


BEST_AVERAGE = "using the best checkpoint: top-1 40.00 % at step 24 (moving average)"


@pytest.mark.parametrize(
    ("entries", "ema", "value", "remark"),
    [
        ([(8, 10), (16, 30)], None, 16, "step 16; --checkpoint newest uses step 24"),
        ([(8, 30), (16, 30)], None, 8, "top-1 30.00 % at step 8"),  # equal is not better
        ([(4, 99), (8, 10)], None, 8, "step 8"),  # step 4 is not kept
        ([(16, 30), (24, 20), (24, 40, "ema")], None, -24, BEST_AVERAGE),
        ([(16, 30), (24, 20), (24, 40, "ema")], False, 16, "at step 16;"),
        ([(16, 60), (24, 20), (24, 40, "ema")], True, -24, BEST_AVERAGE),
        ([], None, 24, "using the newest checkpoint, of step 24: the run was never evaluated"),
    ],
)
def test_by_default_the_best_weights_of_a_run_are_used_and_a_remark_names_them(
    entries: list[tuple[Any, ...]], ema: bool | None, value: int, remark: str, run: Path
) -> None:
    log_evaluations(run, *(evaluation(*entry) for entry in entries))
    weights = open_weights(run, ema=ema)
    assert weights.tensors["fc.bias"].tolist() == [value] * 3
    assert remark in "\n".join(weights.remarks)
    assert not open_weights(run, checkpoint="newest").remarks


@pytest.mark.parametrize(
    ("entries", "checkpoint", "value", "left"),
    [
        ([(8, 20), (12, 90)], None, 8, "using the best one left: top-1 20.00 % at step 8; "),
        ([(8, 20), (12, 90)], "best", 8, "using the best one left: top-1 20.00 % at step 8; "),
        ([(12, 90), (24, 30)], None, 24, "using the best one left: top-1 30.00 % at step 24"),
        ([(12, 90)], None, 24, "using the newest checkpoint, of step 24: "),
    ],
)
def test_a_best_checkpoint_that_is_gone_is_named(
    entries: list[tuple[Any, ...]], checkpoint: str | None, value: int, left: str, run: Path
) -> None:
    log_evaluations(run, *(evaluation(*entry) for entry in entries))
    weights = open_weights(run, checkpoint=checkpoint)
    assert weights.tensors["fc.bias"].tolist() == [value] * 3
    [remark] = weights.remarks
    assert "the best checkpoint is gone (top-1 90.00 % at step 12)" in remark
    assert left in remark


def test_the_recipe_decides_which_checkpoint_is_the_best(run: Path, tiny_recipe: Recipe) -> None:
    values = {8: (2.0, 10.0), 16: (3.0, 30.0), 24: (2.5, 20.0)}
    for selection, step in {"top1": 8, "loss": 8, "macro_f1": 16}.items():
        recipe = tiny_recipe.replace(selection=selection)
        (run / "recipe.yaml").write_text(recipe.format_yaml())
        entries = []
        for number, (loss, f1) in values.items():
            entries.append(evaluation(number, 50) | {"loss": loss, "macro_f1_percent": f1})
        log_evaluations(run, *entries)
        assert open_weights(run).tensors["fc.bias"].tolist() == [step] * 3


def test_a_checkpoint_is_named_by_folder_or_file(run: Path, tiny_recipe: Recipe) -> None:
    folder = run / "checkpoints" / "step-00000008"
    for path in (folder, str(folder), folder / "model.safetensors"):
        weights = open_weights(path)
        assert weights.tensors["fc.bias"].tolist() == [8] * 3
        assert weights.recipe == tiny_recipe
        assert (weights.classes, weights.source) == (CLASSES, Path(path))


def test_the_file_of_the_moving_average_knows_its_recipe(run: Path, tiny_recipe: Recipe) -> None:
    weights = open_weights(run / "checkpoints" / "step-00000024" / "ema.safetensors")
    assert weights.tensors["fc.bias"].tolist() == [-24] * 3
    assert (weights.recipe, weights.classes) == (tiny_recipe, CLASSES)


def test_a_file_has_no_moving_average_beside_it(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a separate file, ema\.safetensors"):
        open_weights(run / "checkpoints" / "step-00000024" / "model.safetensors", ema=True)


def test_weights_can_be_used_in_another_precision(run: Path, tiny_recipe: Recipe) -> None:
    weights = open_weights(run)
    assert weights.replace_precision(None).recipe == tiny_recipe
    assert weights.replace_precision("bf16").recipe == tiny_recipe.replace(precision="bf16")


def torchvision_resnet18(logits: int) -> dict[str, np.ndarray]:
    """Return zeros with the names and shapes of torchvision's resnet18, copied from its source."""
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(conv: str, norm: str, outputs: int, inputs: int, kernel: int) -> None:
        shapes[f"{conv}.weight"] = (outputs, inputs, kernel, kernel)
        for name in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{name}"] = (outputs,)
        shapes[f"{norm}.num_batches_tracked"] = ()

    layer("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            layer(f"{name}.conv1", f"{name}.bn1", width, inputs, 3)
            layer(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            if inputs != width:
                layer(f"{name}.downsample.0", f"{name}.downsample.1", width, inputs, 1)
            inputs = width
    shapes |= {"fc.weight": (logits, 512), "fc.bias": (logits,)}
    return {
        name: np.zeros(shape, np.float32 if shape else np.int64) for name, shape in shapes.items()
    }


def test_torchvisions_names_imply_torchvisions_preprocessing(tmp_path: Path) -> None:
    path = tmp_path / "resnet18.safetensors"
    save_file(torchvision_resnet18(37), path)
    weights = open_weights(path)
    # Of torchvision's presets for V1.
    changes = {"antialias": True, "eval_resize": 256, "eval_crop": 224}
    assert weights.recipe == Recipe(model="resnet18", logits=37, precision="fp32").replace(
        **changes
    )
    assert weights.classes == ()
    assert len(weights.tensors) == 102
    assert not [name for name in weights.tensors if "num_batches_tracked" in name]


def test_tensors_of_no_known_model_are_refused(tmp_path: Path) -> None:
    tensors = torchvision_resnet18(10)
    del tensors["layer3.1.bn2.bias"]
    save_file(tensors, tmp_path / "odd.safetensors")
    reason = r"resnet18, does not fit: layer3\.1\.bn2\.bias is missing"
    with pytest.raises(CheckpointError, match=reason):
        open_weights(tmp_path / "odd.safetensors")


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("missing", {}, "there is no run, no file and no checkpoint .*missing"),
    ("weights.pth", {}, r"weights\.pth is empty: it was not written or copied completely"),
    ("empty.safetensors", {}, r"empty\.safetensors is empty"),
    (
        "folder",
        {},
        (
            "folder holds no weights that can be read; expected a run's folder, a checkpoint, or"
            " weights of Lockstep, timm, "
        ),
    ),
    ("folds", {}, "folds holds a run for each fold; expected one run. Name one, such as .*fold-1"),
    ("fresh", {}, "fresh has no checkpoint"),
    ("fresh", {"checkpoint": "best"}, "fresh has no checkpoint"),
    (
        "unscored",
        {"checkpoint": "best"},
        "unscored has no best checkpoint: the run was never evaluated",
    ),
    ("run", {"checkpoint": "9"}, r"no checkpoint '9'; it has newest, best and steps \[8, 16, 24\]"),
    ("run", {"checkpoint": "latest"}, "no checkpoint 'latest'"),
    (
        "run",
        {"checkpoint": "8", "ema": True},
        "step-00000008 has no moving average; the recipe's ema_decay is 0",
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    ERRORS,
    ids=[f"{name} {arguments}" for name, arguments, _ in ERRORS],
)
def test_what_holds_no_such_weights_is_a_clear_error(
    name: str, arguments: dict[str, Any], message: str, run: Path
) -> None:
    for file in ("weights.pth", "empty.safetensors"):
        (run.parent / file).write_bytes(b"")
    (run.parent / "folder").mkdir()
    (run.parent / "folds" / "fold-1").mkdir(parents=True)
    (run.parent / "fresh" / "checkpoints").mkdir(parents=True)
    checkpoint.save(
        run.parent / "unscored" / "checkpoints", State(1, value_at(1), {}), data_digest="", about={}
    )
    with pytest.raises(CheckpointError, match=message):
        open_weights(run.parent / name, **arguments)


def test_damaged_weights_are_not_opened(run: Path) -> None:
    path = run / "checkpoints" / "step-00000016" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"step-00000016/model\.safetensors is damaged"):
        open_weights(run)


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "checkpoint"])
def test_a_recipe_of_another_version_is_refused(as_file: bool, tmp_path: Path) -> None:
    about = {"recipe": {"epochz": 3}, "classes": []}
    path = checkpoint.save(tmp_path, State(1, value_at(1), {}), data_digest="", about=about)
    with pytest.raises(CheckpointError, match=r"step-00000001.*: .*'epochz'"):
        open_weights(path / "model.safetensors" if as_file else path)


def test_a_missing_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_without_note(tensors: dict[str, np.ndarray], path: Path, metadata: object) -> None:
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_without_note)
    path = checkpoint.save(tmp_path, State(1, value_at(1), {}), data_digest="", about={})
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no metadata"):
        open_weights(path)


# Files of other programs
