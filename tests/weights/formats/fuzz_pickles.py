"""Files of PyTorch (both containers) and of Paddle, and what their readers must answer (see
`fuzz_weights`).

Values of a PyTorch file must be those of the whole file or those that
`torch.load(weights_only=True)` reads from the damaged one, if it reads it. Values of a Paddle file
must be arrays of numbers with at most as many bytes as the file.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import numbers, paddle_pickle, torch_file


def make_torch_pickle(rng: np.random.Generator, *, is_zip: bool) -> bytes:
    """Return a checkpoint: a small network, its optimizer and options."""
    module = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    checkpoint = {
        "epoch": int(rng.integers(100)),
        "state_dict": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.rand(2, 3).half().T,
        "bfloat16": torch.rand(3).bfloat16(),
        "best": torch.tensor(1.5),
    }
    file = io.BytesIO()
    torch.save(checkpoint, file, _use_new_zipfile_serialization=is_zip)
    return file.getvalue()


def make_paddle_pickle(rng: np.random.Generator) -> bytes:
    """Return a `.pdparams` file of any protocol of Paddle's."""
    arrays: dict[str, Any] = {
        f"conv2d_{i}.w_0": rng.standard_normal((2, 3), np.float32) for i in range(3)
    }
    arrays |= {
        "half": np.float16([1, 2]),
        "count_0": np.array([7], np.int32),
        "StructuredToParameterName@@": {"a": "b"},
    }
    return pickle.dumps(arrays, int(rng.integers(2, 5)))


def same(actual: Any, expected: Any) -> bool:
    """Return whether values are those that PyTorch reads."""
    if isinstance(expected, torch.Tensor):
        value = (
            (expected.float() if expected.dtype == torch.bfloat16 else expected)
            .detach()
            .resolve_conj()
            .numpy()
        )
        if not isinstance(actual, np.ndarray):
            return False
        actual = numbers(actual)
        return (
            actual.dtype == value.dtype
            and actual.shape == value.shape
            and actual.tobytes() == value.tobytes()
        )
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and list(actual) == list(expected)
            and all(same(actual[key], value) for key, value in expected.items())
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, list | tuple)
            and len(actual) == len(expected)
            and all(map(same, actual, expected))
        )
    return not isinstance(expected, int | float | str) or repr(actual) == repr(expected)


def _nothing(value: Any) -> tuple[str, ...]:
    return ()


def judge_torch(path: Path, whole: bytes) -> str:
    """Read a file; return what came of it: "refused", "right", "wrong", or "PyTorch refuses it"."""
    try:
        value = torch_file.load(path, without=_nothing if path.stat().st_size % 2 else None)
    except CheckpointError:
        return "refused"
    if same(value, torch.load(io.BytesIO(whole), weights_only=True)):
        return "right"
    try:
        expected = torch.load(path, weights_only=True)
    except Exception:
        return "PyTorch refuses it"
    return "right" if same(value, expected) else "wrong"


def judge_paddle(path: Path, _: bytes) -> str:
    """Read a file; return what came of it: "refused", "right" or "wrong"."""
    try:
        arrays = paddle_pickle.load(path).arrays.values()
    except CheckpointError:
        return "refused"
    fits = sum(array.nbytes for array in arrays) <= path.stat().st_size
    return "right" if fits and all(array.dtype.kind in "iufb" for array in arrays) else "wrong"


KINDS: dict[str, tuple[Callable[[np.random.Generator], bytes], Callable[[Path, bytes], str]]] = {
    "pth-zip": (lambda rng: make_torch_pickle(rng, is_zip=True), judge_torch),
    "pth-old": (lambda rng: make_torch_pickle(rng, is_zip=False), judge_torch),
    "pdparams": (make_paddle_pickle, judge_paddle),
}
