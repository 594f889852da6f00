"""Files of several formats that are cut off or have other bytes: an error or arrays, never another
exception. Formats with checksums have separate tests."""

import io
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import msgpack_tree, mxnet_params, paddle_pickle, torch_file
from tests.soak import EXAMPLES, SOAK
from tests.weights.formats.cases import EDITS, Variables, apply_edits, assert_stored
from tests.weights.formats.torch_file_cases import OLD, ZIP, Ask

WHOLE: Variables = {
    "conv_weight": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "moving_mean": np.linspace(0, 1, 3, dtype=np.float16),
    "steps": np.array([7], np.int64),
}
STRIDE = 1 if SOAK else 3


@dataclass(frozen=True)
class Form:
    """A whole file, and the reader of its arrays."""

    data: bytes
    load: Callable[[Path], Variables]


def write(dump: Callable[[Path, Any], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        dump(Path(folder) / "a", WHOLE)
        return (Path(folder) / "a").read_bytes()


def load_paddle(path: Path) -> Variables:
    return paddle_pickle.load(path).arrays


def load_flax(path: Path) -> Variables:
    """Return the arrays of a file of Flax, also those in other dicts."""
    arrays: Variables = {}
    branches = [msgpack_tree.load(path)]
    while branches:
        for name, value in branches.pop().items():
            if isinstance(value, dict):
                branches.append(value)
            elif isinstance(value, np.ndarray):
                arrays[name] = value
    return arrays


def write_torch(container: dict[str, bool]) -> bytes:
    stream = io.BytesIO()
    tensors = {name: torch.from_numpy(value) for name, value in WHOLE.items()}
    torch.save(tensors, stream, **container)
    return stream.getvalue()


def load_torch(path: Path) -> Variables:
    value = torch_file.load(path)
    return {name: array for name, array in value.items() if isinstance(array, np.ndarray)}


PARAMETER = {"weight": Ask(tuple, ("parameter", np.zeros(2))), "UnpackBigParamInfor@@": {}}
FORMS = {
    "MXNet": Form(write(mxnet_params.dump), mxnet_params.load),
    "Flax": Form(write(msgpack_tree.dump), load_flax),
    "Paddle": Form(write(paddle_pickle.dump), load_paddle),
    "Paddle, protocol 2": Form(pickle.dumps(WHOLE | PARAMETER, 2), load_paddle),
    "Paddle, protocol 4": Form(pickle.dumps(WHOLE | PARAMETER, 4), load_paddle),
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
TORCH_FORMS = {
    f"PyTorch, {name}": Form(write_torch(options), load_torch)
    for name, options in (("zip", ZIP), ("old", OLD))
}


def read(form: Form, data: bytes, folder: Path) -> Variables | None:
    """Return the arrays of a file, or nothing where it is an error."""
    (folder / "any").write_bytes(data)
    try:
        return form.load(folder / "any")
    except CheckpointError:
        return None


@pytest.mark.parametrize("form", (FORMS | TORCH_FORMS).values(), ids=FORMS | TORCH_FORMS)
def test_a_file_cut_off_anywhere_is_an_error(form: Form, tmp_path: Path) -> None:
    whole = read(form, form.data, tmp_path)
    assert whole is not None
    assert_stored({name: whole[name] for name in WHOLE}, WHOLE)
    for length in range(0, len(form.data), STRIDE):
        assert read(form, form.data[:length], tmp_path) is None


@EVERY_FORM
def test_any_byte_may_be_another_without_another_exception(form: Form, tmp_path: Path) -> None:
    for place in range(0, len(form.data), STRIDE):
        for bit in (1, 16, 128):
            byte = bytes([form.data[place] ^ bit])
            data = form.data[:place] + byte + form.data[place + 1 :]
            arrays = read(form, data, tmp_path) or {}
            assert sum(array.nbytes for array in arrays.values()) <= len(data)


@EVERY_FORM
@EXAMPLES
@given(edits=EDITS)
def test_whatever_happens_to_a_file_it_is_an_error_or_arrays(
    form: Form, edits: list[tuple[float, int, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = apply_edits(form.data, edits)
    arrays = read(form, data, tmp_path_factory.mktemp("edited")) or {}
    assert all(array.dtype.kind in "iufbV" for array in arrays.values())
