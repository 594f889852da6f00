"""Files that appear together, from a hidden folder next to them."""

import errno
import os
from pathlib import Path

import pytest

from lockstep.system.files import give_names, own_folder, staging

HIDDEN = ".a.unfinished"


def left_by_a_killed_process(folder: Path, named: list[str], unnamed: list[str]) -> None:
    """Make what `staging` leaves if its process is killed after it gave some names."""
    (folder / HIDDEN).mkdir()
    for name in (*named, *unnamed):
        (folder / HIDDEN / name).write_text("theirs")
    for name in named:
        os.link(folder / HIDDEN / name, folder / name)


def list_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_files_and_folders_appear_with_their_names_and_others_do_not(tmp_path: Path) -> None:
    with staging(tmp_path / "new" / "a") as folder:
        (folder / "a").mkdir()
        for name in ("a/x", "b", "c"):
            (folder / name).write_text(name)
        assert [path.name for path in (tmp_path / "new").iterdir()] == [HIDDEN]
        give_names(folder, ["b", "a"])
    assert list_names(tmp_path) == ["new", "new/a", "new/a/x", "new/b"]
    assert ((tmp_path / "new" / "b").read_text(), (tmp_path / "new" / "a" / "x").read_text()) == (
        "b",
        "a/x",
    )


def test_after_an_error_not_even_new_parents_are_left(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(ValueError, match="mine"),
        staging(tmp_path / "new" / "deeper" / "a") as folder,
    ):
        (folder / "a").mkdir()
        (folder / "a" / "x").write_text("x")
        raise ValueError("mine")
    assert list_names(tmp_path) == []


@pytest.mark.parametrize("name", ["b", "c"])
def test_a_taken_name_is_refused_and_others_are_taken_back(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError), staging(tmp_path / "a") as folder:  # noqa: PT012
        (folder / "b").write_text("theirs")
        (folder / "c").mkdir()
        give_names(folder, ["b", "c"])
    assert list_names(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_names_that_a_killed_process_gave_are_taken_back_unless_it_gave_all(tmp_path: Path) -> None:
    left_by_a_killed_process(tmp_path, named=["certificate"], unnamed=["a"])
    with staging(tmp_path / "a"):
        assert list_names(tmp_path) == [HIDDEN]
    left_by_a_killed_process(tmp_path, named=["a", "certificate"], unnamed=[])
    with staging(tmp_path / "a"):
        assert list_names(tmp_path) == [HIDDEN, "a", "certificate"]


def test_a_file_that_only_has_the_name_of_what_was_left_stays(tmp_path: Path) -> None:
    left_by_a_killed_process(tmp_path, named=[], unnamed=["a", "b"])
    (tmp_path / "b").write_text("mine")
    with staging(tmp_path / "a"):
        pass
    assert list_names(tmp_path) == ["b"]


def test_two_processes_do_not_stage_the_same_path(tmp_path: Path) -> None:
    with staging(tmp_path / "a") as folder:  # another open folder is another process, for a lock
        (folder / "x").write_text("x")
        with (
            pytest.raises(OSError, match="another process is writing it") as caught,
            staging(tmp_path / "a"),
        ):
            pass
        assert caught.value.errno == errno.EBUSY
        assert list_names(tmp_path) == [HIDDEN, f"{HIDDEN}/x"]


def test_a_link_in_place_of_the_hidden_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    (tmp_path / HIDDEN).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"), staging(tmp_path / "a"):
        pass
    assert (tmp_path / "mine" / "x").exists()


def test_a_strangers_folder_is_not_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_folder(tmp_path / "new" / "own"):
        assert (tmp_path / "new" / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "others").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "others")
    with (
        pytest.raises(OSError, match=r"Not a directory|symbolic links"),
        own_folder(tmp_path / "link"),
    ):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="another user"), own_folder(tmp_path / "others"):
        pass
    assert (tmp_path / "others").stat().st_mode & 0o777 == 0o755
