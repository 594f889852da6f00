"""Runs whose images are read over a network: they end with the bits of a run from a disk."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import lockstep
from lockstep.data.packing import Packing, pack
from lockstep.recipes import Recipe
from tests.data.stores.cases import forget_stores
from tests.data.stores.servers import run_rclone, serve
from tests.runs.cases import EXECUTION, assert_same_run, stop_at, train_until


@contextmanager
def serve_class_folders(
    images: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Give the address of images in class folders on an S3 server."""
    shutil.copytree(images, folder / "bucket/textures")
    with serve(folder, looks_again=False) as server:
        for name, value in server.variables().items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/textures"


@contextmanager
def serve_tars(images: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the pattern of the tars of images on a web server."""
    pack(images, folder / "textures", Packing("webdataset", shards=4))
    with run_rclone("http", folder) as port:
        yield f"http://127.0.0.1:{port}/textures/{{train,val}}-{{000000..000003}}.tar"


@pytest.mark.parametrize("serve_images", [serve_class_folders, serve_tars])
def test_a_run_from_a_network_resumes_exactly(
    serve_images: Callable[..., AbstractContextManager[str]],
    tiny_recipe: Recipe,
    textures: Path,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    with serve_images(textures, tmp_path / "served", monkeypatch) as data:
        forget_stores()
        train_until(stop_at("save", 6), tiny_recipe, Path(data), run, execution=EXECUTION)
        forget_stores()
        lockstep.train(out=run, execution=EXECUTION)
        forget_stores()
    assert_same_run(run, uninterrupted)
