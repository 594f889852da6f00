"""Runs whose images are read over a network: they end with the bits of a run from a disk."""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import lockstep
from lockstep.data.packing import Packing, pack
from lockstep.recipes import Recipe
from tests.data.stores.cases import forget_stores
from tests.data.stores.servers import run_rclone, serve
from tests.runs.cases import EXECUTION, STEPS, assert_same_run, stop_at, train_until
from tests.runs.reading import read_batches, run_ranks


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


def test_a_kill_and_another_number_of_ranks_leave_the_batches_as_they_are(
    tiny_recipe: Recipe, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ("first of two", "second of two", "resumed", "from the disk")
    first, second, resumed, whole = (tmp_path / name for name in names)
    with serve_class_folders(textures, tmp_path / "served", monkeypatch) as data:
        assert run_ranks([first, second], data, tiny_recipe, killed=5) == [-signal.SIGKILL] * 2
        forget_stores()
        read_batches(data, tiny_recipe, resumed, first=3)
        forget_stores()
    read_batches(str(textures), tiny_recipe, whole)
    notes = [note for note in read_lines(first, second) if int(note.split()[0]) < 3]
    notes += read_lines(resumed)
    assert len(notes) == STEPS * tiny_recipe.global_batch_images
    assert sorted(notes) == sorted(read_lines(whole))


def read_lines(*files: Path) -> list[str]:
    return [note for file in files for note in file.read_text().splitlines()]
