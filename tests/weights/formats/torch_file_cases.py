"""Files that PyTorch writes, for the tests of their reader."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ZIP = {"_use_new_zipfile_serialization": True}
OLD = {"_use_new_zipfile_serialization": False}
CONTAINERS = pytest.mark.parametrize("container", [ZIP, OLD], ids=["zip", "old"])
BASE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4) / 7
STATE = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3)).state_dict()


def written(value: Any, folder: Path, container: dict[str, bool] = ZIP, **options: Any) -> Path:
    torch.save(value, folder / "any.pth", **container, **options)
    return folder / "any.pth"


class Ask:
    """An object whose pickle asks for a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.reduced


def tensor_of(offset: Any, sizes: Any, strides: Any) -> Ask:
    """Return a tensor with these numbers over a storage of 24 numbers."""
    storage = BASE.clone()._typed_storage()
    return Ask(
        torch._utils._rebuild_tensor_v2, storage, offset, sizes, strides, False, OrderedDict()
    )


def convert_tensor(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


Members = dict[str, bytes]
