"""Checkpoints and epochs that are written for NVIDIA's MXNet model."""

from pathlib import Path

import pytest

from lockstep.models.state import State
from lockstep.system import files
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import mxnet_params
from lockstep.weights.formats.nvidia_mxnet import find, read, write, write_epoch
from tests.weights.formats.cases import (
    RESNET,
    assert_canonical,
    assert_remarked,
    assert_state,
    check_nothing_is_overwritten,
    check_other_states,
    check_other_velocities,
    fill_disk,
    list_names,
    state_of,
)
from tests.weights.formats.mxnet_cases import graph_of, recipe_of

pytestmark = pytest.mark.usefixtures("mxnet_models")


# Writing


def test_what_is_unlike_the_original_is_remarked_when_it_is_written(tmp_path: Path) -> None:
    recipe = recipe_of(RESNET, 10).replace(padding="same")
    done = write(
        tmp_path / "odd", recipe, State(7, state_of(recipe).tensors, {}, {}, {"scale": 8.0})
    )
    assert list_names(done.files) == ["odd-symbol.json", "odd-0000.params"]
    assert_remarked(done.remarks, "this is another", "SAME padding", "have 10: --num-classes")
    assert_remarked(done.remarks, "step 7 cannot be stored", "loss scaling")
    assert len(done.remarks) == 5
    assert sorted(list_names(tmp_path.iterdir())) == ["odd-0000.params", "odd-symbol.json"]


def test_epochs_share_a_graph_and_another_is_not_touched(mxnet_file: Path) -> None:
    recipe = recipe_of()
    before = graph_of(mxnet_file).stat().st_mtime_ns
    done = write(
        mxnet_file.with_name("model-0091.params"), recipe, State(0, state_of(recipe).tensors, {})
    )
    assert done.files == (mxnet_file.with_name("model-0091.params"),)
    assert done.remarks[0] == f"{graph_of(mxnet_file)} existed already with the same contents"
    assert graph_of(mxnet_file).stat().st_mtime_ns == before
    other = recipe_of(logits=7)
    with pytest.raises(CheckpointError, match=r"model-symbol\.json .* another graph"):
        write(mxnet_file.with_name("model-0092.params"), other, state_of(other))
    assert sorted(list_names(mxnet_file.parent.iterdir())) == [
        "model-0090.params",
        "model-0091.params",
        graph_of(mxnet_file).name,
    ]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    check_other_states(write, recipe_of(), recipe_of("basic"), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weights: missing .*, unknown"):
        write_epoch(tmp_path / "a", 1, recipe_of(), state_of(recipe_of("basic")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["weights.params", "a-90.params"])
def test_an_epoch_has_four_digits(target: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{target}: expected .*<prefix>-0090"):
        write(tmp_path / target, recipe_of(), state_of(recipe_of()))


def test_velocities_of_another_run_are_not_adopted(tmp_path: Path) -> None:
    check_other_velocities(write, tmp_path / "b", recipe_of(), "b-0000.momentum.params")


def test_nothing_is_overwritten_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    target = tmp_path / "model-0090.params"
    write(target, recipe, state_of(recipe))
    check_nothing_is_overwritten(
        write, target, recipe, target, tmp_path / "model-0090.momentum.params"
    )
    graph_of(target).unlink()
    fill_disk(monkeypatch, mxnet_params, "0090.params")
    with pytest.raises(CheckpointError, match=r"model .*No space left"):
        write(target, recipe, state_of(recipe))
    assert list(tmp_path.iterdir()) == []


def test_unflushed_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(path: Path) -> None:
        if path.is_dir():
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "flush", flush)
    with pytest.raises(CheckpointError, match=r"model .*Input/output error"):
        write(tmp_path / "model", recipe_of(), state_of(recipe_of()))
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    prefix = tmp_path / "new" / "model"
    for epoch in (1, 2, 2):
        file = write_epoch(prefix, epoch, recipe, state_of(recipe, epoch))
        assert file == tmp_path / "new" / f"model-000{epoch}.params"
    assert sorted(list_names(prefix.parent.iterdir())) == [
        *("model-0001.momentum.params", "model-0001.params", "model-0002.momentum.params"),
        *("model-0002.params", "model-symbol.json"),
    ]
    state = read(prefix.parent / "model-0002.params").state
    assert_state(state, state_of(recipe, 2))
    fill_disk(monkeypatch, mxnet_params, "0002.params")
    with pytest.raises(CheckpointError, match=r"model-0002\.params .*No space left"):
        write_epoch(prefix, 2, recipe, state_of(recipe, 3))
    assert len(list(prefix.parent.iterdir())) == 5
    assert_canonical(
        read(prefix.parent / "model-0002.params").state.tensors, state_of(recipe, 2).tensors
    )
    with pytest.raises(CheckpointError, match="already exists with another graph"):
        write_epoch(prefix, 3, recipe_of(logits=7), state_of(recipe_of(logits=7)))


def test_a_file_a_prefix_and_a_folder_name_the_last_epoch(mxnet_file: Path) -> None:
    for name in (
        *("model-9999.params", "model-10000.params", "model-0091.momentum.params"),
        *("model-91.params", "model_best.params"),
    ):
        mxnet_file.with_name(name).touch()
    last = mxnet_file.with_name("model-10000.params")
    assert find(mxnet_file.parent) == find(mxnet_file.with_name("model")) == find(last) == last
    for name in ("model-0090.params", "model-0090.momentum.params"):
        assert find(mxnet_file.with_name(name)) == mxnet_file
    best = mxnet_file.with_name("model_best.params")
    assert find(best) == best


def test_a_folder_of_several_prefixes_does_not_say_which(mxnet_file: Path) -> None:
    mxnet_file.with_name("b-0003.params").touch()
    with pytest.raises(CheckpointError, match="several prefixes: b, model"):
        find(mxnet_file.parent)
    assert find(mxnet_file.with_name("model")) == mxnet_file


def test_the_epochs_of_nvidias_later_code_count_from_0(mxnet_file: Path) -> None:
    """Its last epoch of 90 is `model_0089.params`, next to which it writes no graph."""
    graph_of(mxnet_file).unlink()
    later = mxnet_file.rename(mxnet_file.with_name("model_0089.params"))
    later.with_name("model_0088.params").touch()
    assert find(later.parent) == find(later.with_name("model")) == later
    weights = read(later)
    assert weights.epochs == 90
    assert weights.remarks[0] == "no step is stored; its name says epoch 89, counted from 0"
    assert weights.remarks[1].startswith("there is no model_0089-symbol.json: it is assumed")


def test_a_folder_with_two_ways_to_count_epochs_is_refused(mxnet_file: Path) -> None:
    mxnet_file.with_name("model_0090.params").touch()
    for path in (mxnet_file.parent, mxnet_file.with_name("model")):
        with pytest.raises(CheckpointError, match=r"model-0090\.params and model_0090\.params"):
            find(path)
    assert find(mxnet_file) == mxnet_file


def test_other_paths_name_no_checkpoint(tmp_path: Path) -> None:
    for name in ("model.safetensors", "best.params.txt", "a-symbol.json", "a-0001.momentum.params"):
        (tmp_path / name).touch()
    missing = [
        tmp_path / name
        for name in (
            *("missing", "missing.params", "a", "a-0001.momentum.params", "model.safetensors"),
        )
    ]
    for path in (tmp_path, Path(), *missing):
        assert find(path) is None
