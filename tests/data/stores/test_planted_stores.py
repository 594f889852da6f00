"""Folders of other people that look as if they stood for an object store."""

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.data.sources import MEMBERS, find_store_folder
from lockstep.system.files import user_cache
from tests.cli.cases import call
from tests.data.cases import image_folder, jpeg, sample, write

KEPT = "kept.txt"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port of loopback at which nothing may arrive."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the user that the data set links to."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / KEPT).write_text("mine")
    return folder


def plant(data: Path, victim: Path, listener: socket.socket, names: list[str]) -> None:
    """Make a data set look as if it stood for a store at the listener's address."""
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/{{train,val}}-000000.tar"
    objects = [{"name": name, "size": 2**34, "version": "1", "modified": 0.0} for name in names]
    about = {"url": address, "address": address, "objects": objects}
    (data / ".store.json").write_text(json.dumps(about))
    machine = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    (data / ".parts").mkdir()
    (data / ".parts" / f"{machine}-0").symlink_to(victim)


def test_a_planted_store_is_unused(tmp_path: Path, victim: Path, listener: socket.socket) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "val"):
        samples = [sample(i, i % 2, name=f"{i}.jpg") for i in range(4)]
        write("webdataset", data / f"{split}-000000.tar", samples)
    plant(data, victim, listener, ["train-000000.tar", "val-000000.tar"])

    code, _, errors = call("data", "check", data)

    assert code == 1, errors  # the images are small
    assert (victim / KEPT).read_text() == "mine"
    assert [path.name for path in victim.iterdir()] == [KEPT]
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_planted_list_is_a_file(tmp_path: Path, victim: Path, listener: socket.socket) -> None:
    data = tmp_path / "data"
    for split in ("train", "val"):
        image_folder(data / split, {f"{name}/{i}.jpg": jpeg() for name in "ab" for i in range(2)})
        (data / split / "a" / MEMBERS).write_text('["x.jpg", 17179869184, "1"]')
        (data / split / "a" / MEMBERS.removesuffix(".jsonl")).write_bytes(b"")
    plant(data, victim, listener, ["train/a/.lockstep-objects", "val/a/.lockstep-objects"])

    code, output, errors = call("data", "info", data)

    assert code == 0, errors
    assert "2 to 2 images each" in " ".join(output.split())
    assert [path.name for path in victim.iterdir()] == [KEPT]
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_link_in_the_cache_is_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = user_cache() / "stores" / "0123"
    cached.mkdir(parents=True)
    (tmp_path / "data").symlink_to(cached)

    assert find_store_folder(cached / "train" / "a.tar") == cached
    assert find_store_folder(tmp_path / "data" / "train" / "a.tar") is None
    assert find_store_folder(cached.parent) is None
