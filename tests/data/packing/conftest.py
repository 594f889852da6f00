"""The data set of these tests, in all formats."""

from pathlib import Path

import pytest

from tests.data.sets import CONTAINERS, data_set, pack_as


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data set in all formats, in two files for each split. Tests must only read it."""
    root = tmp_path_factory.mktemp("sets")
    folder = data_set(root / "folder")
    return {"folder": folder} | {
        format: pack_as(folder, root / format, format, shards=2) for format in CONTAINERS
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return data_set(tmp_path / "source")
