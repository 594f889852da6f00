"""Data sets on a web server, whose files are named by a pattern."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.index import Index, open_index
from lockstep.data.sources import find_split, name_data
from lockstep.data.stores import mirror
from lockstep.data.stores.mirror import find_folder
from lockstep.data.stores.objects import connect, may_be_plain
from lockstep.data.stores.web import expand_braces
from lockstep.system.errors import DataError
from tests.data.stores.cases import forget_stores, load_batches
from tests.data.stores.web_server import WebServer, serve_files

TARS = "{train-{000000..000003},val-000000}.tar"


@pytest.fixture
def web(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A server of a copy of the images; what was fetched before is forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_stores()
    with serve_files(tmp_path / "own files") as server:
        shutil.copytree(packed, server.root / "a set")
        yield server
    forget_stores()


def open_train(address: str) -> Index:
    """Return the index of the training images, as it is after the server was asked again."""
    forget_stores()
    return open_index(find_split(find_folder(address), "train"))


def list_files(folder: Path) -> str:
    """Return a pattern of the files with images in a folder."""
    names = [path.name for path in folder.iterdir() if path.name.startswith(("train", "val"))]
    return ",".join(name for name in sorted(names) if not name.endswith((".lst", ".idx")))


@pytest.mark.parametrize(
    ("format", "mark"),
    [("webdataset", "ETag"), ("tfrecord", "Last-Modified"), ("recordio", "weak ETag")],
)
def test_web_images_are_the_files(web: WebServer, packed: Path, format: str, mark: str) -> None:
    web.marks = (mark,)
    address = f"{web.url}/a%20set/{format}/{{{list_files(packed / format)}}}"
    there = open_train(address)
    here = open_index(find_split(packed / format, "train"))
    assert there.digest == here.digest
    assert list(there.names) == list(here.names)
    assert there.classes == here.classes
    assert name_data(find_folder(address)) == address
    for batch, other in zip(load_batches(there), load_batches(here), strict=True):
        assert np.array_equal(batch, other)
    os.close(mirror._open_mirror(there.root).lock)
    web.requests.clear()
    load_batches(open_train(address))  # as the next run does
    assert {wanted for _, wanted in web.requests} <= {"", "bytes=0-0"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"sends_parts": False}, "the server does not send parts of a file"),
        ({"marks": ()}, "has neither an ETag nor a Last-Modified"),
    ],
)
def test_poor_servers_are_refused(web: WebServer, fault: dict[str, object], message: str) -> None:
    for name, value in fault.items():
        setattr(web, name, value)
    with pytest.raises(DataError, match=rf"/train-00000\d.tar.* {message}"):
        find_folder(f"{web.url}/a%20set/webdataset/{TARS}")


def test_a_file_that_is_missing_is_named(web: WebServer) -> None:
    (web.root / "a set/webdataset/train-000002.tar").unlink()
    with pytest.raises(DataError, match=r"/a%20set/webdataset/train-000002.tar cannot be .*404"):
        find_folder(f"{web.url}/a%20set/webdataset/{TARS}")


def test_a_page_is_no_list_of_classes(web: WebServer, packed: Path) -> None:
    web.answers_pages = True
    for path in (web.root / "a set/webdataset").glob("*.txt"):
        path.unlink()
    there = open_train(f"{web.url}/a%20set/webdataset/{TARS}")
    assert there.classes == open_index(find_split(packed / "webdataset", "train")).classes


@pytest.mark.parametrize(
    ("mark", "is_time_kept"),
    [("ETag", True), ("weak ETag", True), ("Last-Modified", False), ("Last-Modified", True)],
)
def test_a_file_that_changes_is_noticed(web: WebServer, mark: str, is_time_kept: bool) -> None:
    web.marks = (mark,)
    address = f"{web.url}/a%20set/webdataset/{TARS}"
    before = open_train(address)
    shutil.rmtree(before.root / ".parts")
    index = open_train(address)
    other = web.root / "a set/webdataset/train-000000.tar"
    path = other.with_name("train-000001.tar")
    time = path.stat().st_mtime
    path.write_bytes(other.read_bytes() + b"0")
    os.utime(path, (time, time) if is_time_kept else (1, 1))
    with pytest.raises(DataError, match=r"train-000001.tar was written again"):
        load_batches(index)
    assert open_train(address).digest != before.digest


@pytest.mark.parametrize(
    "address",
    [
        "https://user:secret@host/train-{0..3}.tar",
        "https://host/train-{0..3}.tar?X-Amz-Signature=secret",
        "https://host/train-{0..3}.tar#secret",
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_printed(address: str) -> None:
    with pytest.raises(DataError, match="expected no user, password or query") as raised:
        find_folder(address)
    assert "secret" not in str(raised.value)
    assert connect.cache_info().currsize == 0


def test_redirects_to_a_server_without_tls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert may_be_plain("s3://bucket/images")
    assert may_be_plain("http://127.0.0.1/images")
    assert not may_be_plain("https://host.example/images")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://host.example/train-{0..3}.tar", "read without encryption; expected https://"),
        ("https://host.example/images/", "names images; expected names that end in .tar"),
        ("https://host.example/{train,val}/deep/0.tar", "in one folder or in train/ and val/"),
        ("https://host{0..3}/train.tar", "names no files of a server"),
        ("https://host.example/train-{0000-0003}.tar", "{0000-0003} in the address is no pattern"),
        ("https://host.example/train-{3..0}.tar", "{3..0} in the address is no pattern"),
        ("https://host.example/train-{0,1.tar", "{0,1.tar in the address is no pattern"),
        ("https://host.example/train-{0..999999999}.tar", "names more than 100000 files"),
        ("https://host.example/{0..999}{0..999}.tar", "names more than 100000 files"),
        ("https://host.example/{{0..99999},{0..9}}.tar", "names more than 100000 files"),
        ("https://host.example/" + "{0..0}" * 2000, "has too many braces"),
        ("https://host.example/{0.." + "9" * 5000 + "}.tar", "9 in the address is no pattern"),
        ("https://host.example/%2e%2e%2ftrain.tar", "names ../train.tar; expected"),
        ("https://host.example/%2ftrain.tar", "names /train.tar; expected"),
        ("https://[::1/train.tar", "names no files of a server"),
    ],
)
def test_an_address_that_names_no_files_is_refused(address: str, message: str) -> None:
    with pytest.raises(DataError) as raised:
        find_folder(address)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "train-{0000..0012}.tar",
        "{8..11}{a,b}",
        "{train-{00..02},val-{0..1}}.tar",
        "{train/{00..02},val/x,test}.{tar,rec}",
        "{,x}y",
        "plain.tar",
    ],
)
def test_patterns_are_those_of_shells(pattern: str) -> None:
    shell = shutil.which("bash")
    assert shell is not None
    command = [shell, "-c", f"printf '%s\\n' {pattern}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert expand_braces(pattern) == output.splitlines()
