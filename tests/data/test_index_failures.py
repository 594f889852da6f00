"""What the system fails to read while an index is made, and what is missing then: neither is a
property of the images, so neither is stored for ever."""

import errno
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.data import inspection
from lockstep.data.index import open_index
from lockstep.data.sources import is_file, is_folder
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg, sample, write
from tests.data.indexes import FILES
from tests.data.sets import CONTAINERS

FAILING = Path("/sys/class/net/lo/speed")
"""Linux refuses to read this regular file, whose length is 4096: a loopback has no speed."""
NAMES = {"recordio": "x.rec", "tfrecord": "x.tfrecord", "webdataset": "x.tar"}


def fail(patch: pytest.MonkeyPatch, path: Path, code: int) -> None:
    """Let reads of a file fail as they do on a bad disk or a lost network."""
    pread, read = os.pread, os.read

    def check(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == path:
            raise OSError(code, os.strerror(code))

    patch.setattr(os, "pread", lambda fd, *how: (check(fd), pread(fd, *how))[1])
    patch.setattr(os, "read", lambda fd, *how: (check(fd), read(fd, *how))[1])


def test_an_image_the_system_refuses_to_read_stops_the_index(root: Path, tmp_path: Path) -> None:
    if not FAILING.exists():
        pytest.skip("no loopback in /sys")
    target = tmp_path / "target"
    target.symlink_to(FAILING)
    (root / "owl/x.jpg").symlink_to(target)
    with pytest.raises(DataError, match=r"owl/x\.jpg cannot be read: Inv") as refusal:
        open_index(root)
    assert f"lockstep data check {shlex.quote(str(root))} --quarantine" in str(refusal.value)
    target.unlink()
    target.write_bytes(jpeg())
    assert len(open_index(root)) == len(FILES) + 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_an_image_is_not_left_out_because_of_a_bad_moment(code: int, root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, root / "owl/a.jpg", code)
        with pytest.raises(DataError, match=f"owl/a.jpg cannot be read: {os.strerror(code)}"):
            open_index(root)
    index = open_index(root)
    assert (len(index), index.quarantined) == (len(FILES), ())


@pytest.mark.parametrize("format", CONTAINERS)
def test_a_bad_moment_of_a_file_of_images_names_the_file(format: str, tmp_path: Path) -> None:
    path = write(format, tmp_path / NAMES[format], [sample(i, 0) for i in range(3)])
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, path, errno.EIO)
        with pytest.raises(OSError, match=path.name):
            open_index(tmp_path)
    index = open_index(tmp_path)
    assert len(index) == 3
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, path, errno.EIO)
        with pytest.raises(DataError, match=rf"{path.name}@\d+ cannot be read: Input") as refusal:
            index.read(1)
    assert "data index" not in str(refusal.value)


def test_a_bad_moment_in_training_is_no_change_of_the_image(root: Path) -> None:
    index = open_index(root)
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, root / "cat/z.jpg", errno.EIO)
        with pytest.raises(DataError, match=r"cat/z.jpg cannot be read: Input/output") as refusal:
            index.read(0)
    assert "data index" not in str(refusal.value)
    assert index.read(0) == FILES["cat/z.jpg"]


def test_little_memory_is_not_the_images_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(data: bytes) -> tuple[int, int]:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError(type(error).__name__) from None

    monkeypatch.setattr(inspection, "check", check)
    with pytest.raises(DataError, match="cannot be read: Cannot allocate memory"):
        open_index(root)


def test_a_missing_target_is_retried(root: Path, tmp_path: Path, decodings: list[bytes]) -> None:
    (root / "owl/late.jpg").symlink_to(tmp_path / "annex" / "object")
    for _ in range(2):
        index = open_index(root)
        assert [bad.file for bad in index.quarantined] == ["owl/late.jpg"]
        assert len(decodings) == len(FILES)
    (tmp_path / "annex").mkdir()
    (tmp_path / "annex" / "object").write_bytes(jpeg())
    index = open_index(root)
    assert (len(index), index.quarantined) == (len(FILES) + 1, ())


def test_an_unfinished_image_is_looked_at_again(root: Path, decodings: list[bytes]) -> None:
    path = root / "owl/late.jpg"
    path.write_bytes(jpeg(50, 50)[:200])
    time = path.stat().st_mtime_ns
    for _ in range(2):
        assert [bad.file for bad in open_index(root).quarantined] == ["owl/late.jpg"]
        # Only the damaged one is decoded again.
        assert len(FILES) < len(decodings) < 2 * len(FILES)
    with path.open("r+b") as file:  # the time of the folder stays
        file.write(jpeg(50, 50))
    os.utime(path, ns=(time, time))
    assert len(open_index(root)) == len(FILES) + 1


def test_an_image_whole_meanwhile_is_retried(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "cat/late.jpg"
    path.write_bytes(jpeg(50, 50)[:200])
    check = inspection.check

    def copy_meanwhile(data: bytes) -> tuple[int, int]:
        if len(data) == 200:
            with path.open("r+b") as file:  # the time of the folder stays
                file.write(jpeg(50, 50))
        return check(data)

    with monkeypatch.context() as patch:
        patch.setattr(inspection, "check", copy_meanwhile)
        assert [bad.file for bad in open_index(root).quarantined] == ["cat/late.jpg"]
    index = open_index(root)
    assert (len(index), index.quarantined) == (len(FILES) + 1, ())


@pytest.mark.parametrize("reason", [os.strerror(errno.EIO), os.strerror(errno.EACCES), "None"])
def test_an_older_index_that_lost_an_image_to_a_bad_moment_is_made_again(
    reason: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions stored the system's reason."""
    check = inspection.check
    write("webdataset", tmp_path / "tar" / "x.tar", [sample(i, 0) for i in range(3)])
    for data, victim in ((root, FILES["owl/a.jpg"]), (tmp_path / "tar", sample(1, 0).data)):
        with pytest.MonkeyPatch.context() as patch:

            def refuse(data: bytes, victim: bytes = victim) -> tuple[int, int]:
                if bytes(data) == bytes(victim):
                    raise ValueError(reason)
                return check(data)

            patch.setattr(inspection, "check", refuse)
            assert [bad.reason for bad in open_index(data).quarantined] == [reason]
        assert open_index(data).quarantined == ()


def test_a_class_does_not_vanish_with_a_folder_that_the_system_fails_to_look_at() -> None:
    def answer(code: int) -> bool:
        raise OSError(code, os.strerror(code))

    for look in (is_folder, is_file):
        bad = SimpleNamespace(is_dir=lambda: answer(errno.EIO), is_file=lambda: answer(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            look(bad)
        loop = SimpleNamespace(
            is_dir=lambda: answer(errno.ELOOP), is_file=lambda: answer(errno.ELOOP)
        )
        assert not look(loop)


def test_a_strangers_index_stays_in_its_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = image_folder(root.parent / "outside", {"a.jpg": jpeg()}) / "a.jpg"
    (root / "owl/bad.jpg").write_bytes(b"")
    open_index(root)
    about = root.parent / ".lockstep" / root.name / "index.json"
    looked: list[str] = []
    monkeypatch.setattr(inspection, "read_file", lambda path: looked.append(path))
    for name in ("../outside/a.jpg", str(outside), "owl/../../outside/a.jpg"):
        text = about.read_text().replace("empty file", "Input/output error")
        about.write_text(text.replace('"owl/bad.jpg"', f'"{name}"'))
        open_index(root)
        about.write_text(text)
    assert looked == []
