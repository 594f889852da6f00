"""Runs whose images are read over a network: they end with the bits of a run from a disk."""

import shutil
from pathlib import Path

import pytest

import lockstep
from lockstep.recipes import Recipe
from tests.data.stores.cases import forget_stores
from tests.data.stores.servers import serve
from tests.runs.cases import EXECUTION, assert_same_run, stop_at, train_until


def test_a_run_from_class_folders_in_a_store_resumes_exactly(
    tiny_recipe: Recipe,
    textures: Path,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(textures, tmp_path / "root/bucket/textures")
    run = tmp_path / "run"
    with serve(tmp_path / "root", looks_again=False) as server:
        for name, value in server.variables().items():
            monkeypatch.setenv(name, value)
        forget_stores()
        data = Path("s3://bucket/textures")
        train_until(stop_at("save", 6), tiny_recipe, data, run, execution=EXECUTION)
        forget_stores()
        lockstep.train(None, None, run, execution=EXECUTION)
        forget_stores()
    assert_same_run(run, uninterrupted)
