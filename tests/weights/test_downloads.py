"""Downloads of weights, from a server on this machine."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.system.errors import CheckpointError
from lockstep.weights.downloads import check_address, download
from tests.weights.file_server import Server, serve

CONTENT = bytes(range(256)) * 20_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(CONTENT, "w.pth") as server:
        yield server


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_downloaded_once_with_its_progress(server: Server, tmp_path: Path) -> None:
    counts: list[tuple[int, int | None]] = []
    target = tmp_path / "cache" / "w.pth"
    for _ in range(2):
        download(server.address, target, sha256=DIGEST[:8], progress=lambda *c: counts.append(c))
    assert target.read_bytes() == CONTENT
    assert counts[-1] == (len(CONTENT), len(CONTENT))
    assert len(server.requests) == 1
    assert list_names(target.parent) == ["w.pth"]


@pytest.mark.parametrize("sha256", [DIGEST, ""])
def test_broken_connections_are_continued(server: Server, tmp_path: Path, sha256: str) -> None:
    server.cut_after = [1_000_000, 2_000_000]
    download(server.address, tmp_path / "w.pth", sha256=sha256)
    assert (tmp_path / "w.pth").read_bytes() == CONTENT
    assert server.sent == len(CONTENT)
    assert [request.get("Range") for request in server.requests] == [
        None,
        "bytes=1000000-",
        "bytes=3000000-",
    ]


def test_a_part_of_an_earlier_command_is_continued(server: Server, tmp_path: Path) -> None:
    server.cut_after = [1_000_000, 0]
    with pytest.raises(CheckpointError, match="connection broke"):
        download(server.address, tmp_path / "w.pth", sha256=DIGEST)
    assert list_names(tmp_path) == ["w.pth.part", "w.pth.part.etag"]
    download(server.address, tmp_path / "w.pth", sha256=DIGEST)
    assert (tmp_path / "w.pth").read_bytes() == CONTENT
    assert server.sent == len(CONTENT)
    assert list_names(tmp_path) == ["w.pth"]


def test_a_file_that_changed_on_the_server_begins_again(server: Server, tmp_path: Path) -> None:
    server.cut_after = [1_000_000, 0]
    with pytest.raises(CheckpointError):
        download(server.address, tmp_path / "w.pth")
    server.content = CONTENT[::-1]
    server.etag = '"2"'
    download(server.address, tmp_path / "w.pth")
    assert (tmp_path / "w.pth").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("rest", [b"", b"more than the server has"])
def test_complete_and_too_long_parts_work(server: Server, tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "w.pth.part").write_bytes(CONTENT + rest)
    download(server.address, tmp_path / "w.pth", sha256=DIGEST)
    assert (tmp_path / "w.pth").read_bytes() == CONTENT
    assert len(server.requests) == (2 if rest else 0)


def test_a_file_with_another_digest_is_removed(server: Server, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{DIGEST}.*begins with 00000000"):
        download(server.address, tmp_path / "w.pth", sha256="00000000")
    assert "w.pth" not in list_names(tmp_path)
    assert "w.pth.part" not in list_names(tmp_path)


def test_two_at_once_download_one_file(server: Server, tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def get() -> None:
        try:
            download(server.address, tmp_path / "w.pth", sha256=DIGEST)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert server.sent == len(CONTENT)
    assert list_names(tmp_path) == ["w.pth"]


def test_without_a_server_the_message_says_what_to_do(server: Server, tmp_path: Path) -> None:
    address = server.address
    target = tmp_path / "w.pth"
    with pytest.raises(CheckpointError, match="404") as missing:
        download(address.replace("w.pth", "x.pth"), target)
    assert f"put the file at {target}" in str(missing.value)
    server.shutdown()
    server.server_close()
    with pytest.raises(CheckpointError, match="refused") as refused:
        download(address, target)
    assert f"curl -fL -o w.pth {address}" in str(refused.value)


START = 1_000_000
LENGTH = len(CONTENT)
OTHER_PARTS = {
    "from the start": (206, f"bytes 0-{LENGTH - 1}/{LENGTH}", '"1"'),
    "from elsewhere": (206, f"bytes {START + 1}-{LENGTH - 1}/{LENGTH}", '"1"'),
    "beyond the end": (206, f"bytes {START}-{LENGTH}/{LENGTH}", '"1"'),
    "backwards": (206, f"bytes {START}-{START - 1}/{LENGTH}", '"1"'),
    "of an unknown size": (206, f"bytes {START}-{LENGTH - 1}/*", '"1"'),
    "in other digits": (206, f"bytes {START}-{LENGTH - 1}/\xb2", '"1"'),
    "of another unit": (206, f"items {START}-{LENGTH - 1}/{LENGTH}", '"1"'),
    "nowhere": (206, "", '"1"'),
    "of another file": (206, f"bytes {START}-{LENGTH - 1}/{LENGTH}", '"2"'),
    "refused": (416, f"bytes */{LENGTH}", '"1"'),
}


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_other_parts_are_left_out(server: Server, tmp_path: Path, name: str) -> None:
    server.cut_after = [START]
    status, content_range, tag = OTHER_PARTS[name]
    headers = {"Content-Range": content_range, "ETag": tag}
    server.answers = [None, (status, headers, b"x" * (LENGTH - START))]
    download(server.address, tmp_path / "w.pth")
    assert (tmp_path / "w.pth").read_bytes() == CONTENT
    assert [request.get("Range") for request in server.requests] == [None, f"bytes={START}-", None]


def test_a_shorter_part_than_asked_for_is_continued(server: Server, tmp_path: Path) -> None:
    server.cut_after = [START]
    headers = {"Content-Range": f"bytes {START}-{2 * START - 1}/{LENGTH}", "ETag": '"1"'}
    headers["Content-Length"] = str(START)
    server.answers = [None, (206, headers, CONTENT[START : 2 * START])]
    download(server.address, tmp_path / "w.pth")
    assert (tmp_path / "w.pth").read_bytes() == CONTENT
    assert server.requests[-1]["Range"] == f"bytes={2 * START}-"


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (206, {"Content-Range": f"bytes 0-4/{LENGTH}"}, "part of a file.*expected all of it"),
        (206, {}, "part of a file"),
        (204, {}, "answers 204; expected 200"),
        (200, {"Content-Length": "\xb2"}, r"Content-Length is '\\xb2'; expected a number"),
        (200, {"Content-Length": "-5"}, "Content-Length is '-5'; expected a number"),
        (200, {"Content-Length": "+5"}, "Content-Length is .* expected a number"),
        (200, {"Content-Length": "1_0"}, "Content-Length is .* expected a number"),
        (200, {"Content-Length": "5, 7"}, "Content-Length is .* expected a number"),
        (200, {"Content-Length": ""}, "Content-Length is .* expected a number"),
        (200, {"Content-Length": "9" * 5000}, "Content-Length is .* expected a number"),
        (200, {"Content-Length": "9" * 18}, "expected at most 8,589,934,592"),
    ],
)
def test_an_answer_that_is_no_file_gets_one_sentence(
    server: Server, tmp_path: Path, status: int, headers: dict[str, str], message: str
) -> None:
    server.answers = [(status, headers, b"12345")]
    with pytest.raises(CheckpointError, match=message):
        download(server.address, tmp_path / "w.pth")
    assert not (tmp_path / "w.pth").exists()
    download(server.address, tmp_path / "w.pth")  # the next try is not affected
    assert (tmp_path / "w.pth").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "address",
    [
        *("http://example.org/w.pth", "ftp://example.org/w.pth", "file:///etc/passwd"),
        *("https:///w.pth", "https://user:secret@example.org/w.pth", "https://[::1/w.pth"),
        *("https://example.org:99999/w.pth", "https://example.org:port/w.pth"),
        *("https://a..b/w.pth", f"https://{'a' * 64}.org/w.pth", "https://ex\xe4mple.org/w.pth"),
        *("https://example.org/\u0435.pth", "https://example.org/w.pth\0"),
        *("https://example.org/w\n.pth", "https://example.org/a b.pth"),
        *("https://example.org/\ud800.pth", ""),
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(CheckpointError, match="https://HOST"):
        check_address(address)


def test_a_redirect_without_https_is_refused(server: Server, tmp_path: Path) -> None:
    address = server.address.replace("w.pth", "elsewhere")
    with pytest.raises(CheckpointError, match=r"192\.0\.2\.1"):
        download(address, tmp_path / "w.pth")
