"""Small models of the kinds that other programs use."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from lockstep.models.architectures import ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError

Variables = dict[str, np.ndarray]

RESNET = ModelSpec(block="bottleneck", layers=(2, 1, 1, 1), stem_width=8, widths=(8, 16, 32, 64))
RESNEXT = ModelSpec(
    block="bottleneck",
    layers=(1, 2, 1, 1),
    stem_width=8,
    widths=(8, 16, 32, 64),
    groups=4,
    expansion=2,
)
EVALUATION = {"eval_resize": 256, "eval_crop": 224}
"""The sizes that are assumed for files that do not say theirs."""
BASIC = ModelSpec(
    block="basic", layers=(1, 2, 1, 1), stem_width=8, widths=(8, 16, 32, 64), expansion=1
)

SQUEEZED = replace(RESNET, squeeze_widths=(2, 2, 2, 2))
BLURRED = replace(RESNET, blur="before")
MODERN = replace(SQUEEZED, stem="deep", shortcut_pool=True)

ARRANGED = {
    "by columns": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "transposed": np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1),
    "every other": np.arange(12, dtype=np.float32)[::2],
    "big endian": np.arange(3, dtype=">f4"),
}
"""Arrays whose numbers do not lie in memory one after the other in little endian."""
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 60), st.binary(max_size=9)), min_size=1, max_size=4
)


def bits(arrays: Variables) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in arrays.items()}


def apply_edits(data: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    for where, amount, added in edits:
        begin = round(where * len(data))
        data = data[:begin] + added + data[begin + amount :]
    return data


def state_of(recipe: Recipe, step: int = 7) -> State:
    """Return a state in which all values are different, so that no two can be confused."""
    random = np.random.default_rng(step)
    expected = list(recipe.list_tensors())
    values = {tensor.name: random.standard_normal(tensor.shape, np.float32) for tensor in expected}
    trained = [tensor for tensor in expected if tensor.is_trained]
    return State(
        step,
        values,
        {tensor.name: random.standard_normal(tensor.shape, np.float32) for tensor in trained},
    )


def assert_stored(actual: Variables, expected: Variables) -> None:
    """Assert that types, shapes and bits are equal."""
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (value.dtype, value.shape)
        assert actual[name].tobytes() == value.tobytes()


def assert_canonical(actual: Variables, expected: Variables) -> None:
    """Assert that arrays are float32 with equal bits, contiguous and writeable."""
    assert {name: value.tobytes() for name, value in actual.items()} == {
        n: v.tobytes() for n, v in expected.items()
    }
    assert {value.dtype for value in actual.values()} <= {np.dtype(np.float32)}
    assert all(value.flags.c_contiguous and value.flags.writeable for value in actual.values())


def assert_state(actual: State, expected: State) -> None:
    """Assert that weights and velocities are float32 with equal bits."""
    assert_canonical(actual.tensors, expected.tensors)
    assert_canonical(actual.momentum, expected.momentum)


def assert_remarked(remarks: tuple[str, ...], *words: str) -> None:
    """Assert that these words are in exactly one remark each."""
    for word in words:
        assert [word in remark for remark in remarks].count(True) == 1, word


def list_names(paths: Iterable[Path]) -> list[str]:
    return [path.name for path in paths]


def rename_arrays(variables: Variables, change: Callable[[str], str]) -> Variables:
    return {change(name): value for name, value in variables.items()}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def fill_disk(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
    """Make the disk full when `module` has almost written a file with `name` in its name."""
    dump = module.dump

    def dump_and_fail(path: Path, arrays: Variables) -> None:
        dump(path, arrays)
        if name in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "dump", dump_and_fail)


def check_other_velocities(
    write: Callable[..., Any], target: Path, recipe: Recipe, name: str
) -> None:
    """Check that weights are not written next to velocities of another run."""
    target.with_name(name).write_bytes(b"of another run")
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} already exists"):
        write(target, recipe, State(0, state_of(recipe).tensors, {}))
    assert list_names(target.parent.iterdir()) == [name]


def check_other_states(write: Callable[..., Any], recipe: Recipe, other: Recipe, to: Path) -> None:
    """Check that neither the tensors of another model nor a part of the velocities is written."""
    state = state_of(recipe)
    some = State(0, state.tensors, {"fc.bias": state.momentum["fc.bias"]})
    for wrong, reason in ((state_of(other), "weights: missing .*, unknown"), (some, "momentum: m")):
        with pytest.raises(CheckpointError, match=reason):
            write(to, recipe, wrong)
    assert list_names(to.parent.iterdir()) == []


def check_nothing_is_overwritten(
    write: Callable[..., Any], target: Path, recipe: Recipe, *files: Path
) -> None:
    """Check that nothing is written while one of these files exists; remove them one by one."""
    for file in files:
        with pytest.raises(CheckpointError, match=f"{re.escape(file.name)} already exists"):
            write(target, recipe, state_of(recipe))
        file.unlink()


def nest(variables: Variables) -> dict[str, Any]:
    """Return nested dicts of arrays by path."""
    tree: dict[str, Any] = {}
    for path, value in variables.items():
        branch = tree
        *scopes, leaf = path.split("/")
        for scope in scopes:
            branch = branch.setdefault(scope, {})
        branch[leaf] = value
    return tree
