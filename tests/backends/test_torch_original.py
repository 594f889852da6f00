"""The network of timm or torchvision computes a certificate's source: here, a module that stands
where timm would be, since neither is a dependency."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from lockstep.backends.torch.certificate import compute

IMAGES = np.random.default_rng(2).standard_normal((3, 3, 8, 8)).astype(np.float32)


def build(num_classes: int) -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, num_classes))


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("timm")
    module.__version__ = "0"
    module.is_model = lambda name: name == "a_net"
    module.create_model = lambda name, num_classes: build(num_classes)
    monkeypatch.setitem(sys.modules, "timm", module)


def write(folder: Path, tensors: dict[str, torch.Tensor], model: str = "a-net") -> None:
    arrays = {name: value.numpy() for name, value in tensors.items()}
    save_file(arrays, folder / "module.safetensors")
    (folder / "module.json").write_text(json.dumps({"model": model, "logits": 5}))


def test_the_module_computes_without_counters(timm: None, tmp_path: Path) -> None:
    module = build(5).eval()
    tensors = module.state_dict()
    del tensors["1.num_batches_tracked"]
    write(tmp_path, tensors)
    logits, version = compute(tmp_path, IMAGES)
    with torch.inference_mode():
        expected = module(torch.from_numpy(IMAGES)).numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert version == "timm 0's a_net with these tensors"


def test_other_tensors_are_refused(timm: None, tmp_path: Path) -> None:
    tensors = build(5).state_dict()
    del tensors["4.bias"]
    write(tmp_path, tensors)
    message = r"timm 0's a_net with these tensors has different tensors: \['4.bias'\]"
    with pytest.raises(ImportError, match=message):
        compute(tmp_path, IMAGES)
