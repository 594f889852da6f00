"""Small models that have a name in the tests of a format."""

from pathlib import Path

import pytest

from lockstep.models.architectures import MODELS
from tests.weights.formats.cases import BASIC, RESNET, RESNEXT
from tests.weights.formats.mxnet_cases import name_small_models, original_file


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give small models a name."""
    for name, spec in {"small": RESNET, "grouped": RESNEXT, "basic": BASIC}.items():
        monkeypatch.setitem(MODELS, name, spec)


@pytest.fixture
def mxnet_models(monkeypatch: pytest.MonkeyPatch) -> None:
    name_small_models(monkeypatch)


@pytest.fixture
def mxnet_file(tmp_path: Path, mxnet_models: None) -> Path:
    """A checkpoint as NVIDIA's MXNet code writes it."""
    return original_file(tmp_path)
