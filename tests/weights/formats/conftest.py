"""Small models that have a name in the tests of a format."""

from pathlib import Path

import pytest

from lockstep.models.architectures import MODELS
from tests.weights.formats.cases import BASIC, BLURRED, MODERN, RESNET, RESNEXT, SQUEEZED
from tests.weights.formats.mxnet_cases import name_small_models, original_file


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small models a name."""
    models = {"small": RESNET, "grouped": RESNEXT, "basic": BASIC}
    models |= {"squeezed": SQUEEZED, "blurred": BLURRED, "modern": MODERN}
    for name, spec in models.items():
        monkeypatch.setitem(MODELS, name, spec)


@pytest.fixture
def few_models(small_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small models a name, and leave few others, which takes less time."""
    for name in list(MODELS):
        if name not in ("small", "basic", "resnet18", "resnet50"):
            monkeypatch.delitem(MODELS, name)


@pytest.fixture
def mxnet_models(monkeypatch: pytest.MonkeyPatch) -> None:
    name_small_models(monkeypatch)


@pytest.fixture
def mxnet_file(tmp_path: Path, mxnet_models: None) -> Path:
    """A checkpoint as NVIDIA's MXNet code writes it."""
    return original_file(tmp_path)
