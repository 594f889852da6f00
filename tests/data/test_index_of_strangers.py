"""The index of someone else's data set: what it says is checked before it is believed."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data import index_files
from lockstep.data.images import ROW
from lockstep.data.index import find_index, open_index
from lockstep.data.sources import find_source
from lockstep.data.split import note_skipped
from tests.data.cases import image_folder, jpeg, sample, write
from tests.data.indexes import FILES, paths

Change = Callable[[dict[str, np.ndarray], dict[str, Any]], None]


def forge(cache: Path, change: Change) -> None:
    """Change the files of an index, with the checksums that belong to them."""
    about = json.loads((cache / "index.json").read_text())
    arrays = {}
    for name, dtype in (index_files._ARRAYS | {"checksums": np.dtype("<u4")}).items():
        arrays[name] = np.fromfile(cache / name, dtype)
    change(arrays, about)
    index_files.write_index(cache, about, arrays)


def put(array: str, sample: int, value: int, column: str = "") -> Change:
    def change(arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        values = arrays[array][column] if column else arrays[array]
        values[sample] = value

    return change


def drop_last(array: str) -> Change:
    def change(arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        arrays[array] = arrays[array][:-1]

    return change


def name(*names: str) -> Change:
    """Name the first images."""

    def change(arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
        texts = [text.encode() for text in names]
        before = arrays["names"].tobytes()
        ends = arrays["name_ends"].tolist()
        texts += [before[a:b] for a, b in zip([0, *ends], ends, strict=False)][len(texts) :]
        arrays["names"] = np.frombuffer(b"".join(texts), np.uint8)
        arrays["name_ends"] = np.cumsum([len(text) for text in texts]).astype(np.uint32)

    return change


def say(**fields: Any) -> Change:
    return lambda arrays, about: about.update(fields)


WRONG = {
    "label-above": put("rows", 1, 3, "label"),
    "label-below": put("rows", 1, -1, "label"),
    "label-of-another-class": put("rows", 1, 2, "label"),
    "no-length": put("rows", 1, 0, "length"),
    "too-long": put("rows", 1, 2**30 + 1, "length"),
    "no-height": put("rows", 1, 0, "height"),
    "no-width": put("rows", 1, 0, "width"),
    "file": put("rows", 1, 1, "file"),
    "orientation-0": put("orientations", 0, 0),
    "orientation-9": put("orientations", 3, 9),
    "ends-fall": put("name_ends", 1, 3),
    "parent": name("../outside.jpg"),
    "parent-of-class": name("cat/../../outside.jpg"),
    "parent-after-class": name("cat/.."),
    "class-itself": name("cat/."),
    "absolute": name("/etc/passwd"),
    "no-file": name("cat/"),
    "no-class": name("outside.jpg"),
    "nul": name("cat/a\0.jpg"),
    "another-class": name("owl/a.jpg"),
    "long": name("cat/" + 3000 * "a"),
    "class-outside": say(classes=["..", "newt", "owl"]),
    "class-of-two": say(classes=["cat", "cat", "owl"]),
    "classes-are-numbers": say(classes=[1, 2, 3]),
    "classes-are-text": say(classes="abc"),
    "numbered": say(numbered="no"),
    "states": say(states=[[1, 2]]),
    "quarantined": say(quarantined=[["a", 1]]),
    "skipped": say(skipped=[["hidden"]]),
    "skipped-kind": say(skipped=[["eaten", "cat/a"]]),
    "digest": say(digest="0" * 64),
    "no-digest": say(digest=None),
    **{
        f"{array}-short": drop_last(array)
        for array in ("rows", "names", "name_ends", "times", "orientations", "checksums")
    },
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_strangers_index_with_a_wrong_value_is_made_again(
    change: Change, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root.parent / "outside.jpg").write_bytes(jpeg())
    right = open_index(root)
    cache = root.parent / ".lockstep" / root.name
    forge(cache, change)
    assert find_index(find_source(root), classes=right.classes) is None
    again = open_index(root)
    assert paths(again) == paths(right)
    assert np.array_equal(again.rows, right.rows)
    [note] = note_skipped(root, [again])
    assert note.startswith(f"the index in {cache} is unusable and is rebuilt: ")
    assert note_skipped(root, [open_index(root)]) == []


PLACES = {
    "before": put("rows", 0, -(10**6), "offset"),
    "behind": put("rows", 0, 10**6, "offset"),
    "far-behind": put("rows", 0, 2**63 - 1, "offset"),
    "far-before": put("rows", 0, -(2**63), "offset"),
    "over-the-end": put("rows", 0, 10**5, "length"),
    "file": put("rows", 0, 1, "file"),
    "times": say(states=[[10**9, 1]]),
    "label": put("rows", 0, 9, "label"),
}


@pytest.mark.parametrize("change", PLACES.values(), ids=PLACES)
def test_places_of_a_strangers_index_are_in_its_files(change: Change, tmp_path: Path) -> None:
    write("webdataset", tmp_path / "x.tar", [sample(i, 0) for i in range(3)])
    right = open_index(tmp_path)
    forge(tmp_path / ".lockstep", change)
    again = open_index(tmp_path)
    assert np.array_equal(again.rows, right.rows)
    assert len(again.notes) == 1


def test_a_file_of_zeros_larger_than_the_disk_is_not_hashed(root: Path) -> None:
    """A sparse file takes no room; hashing this one would take minutes."""
    open_index(root)
    cache = root.parent / ".lockstep" / root.name
    count = 3 * 10**11 // ROW.itemsize
    for name, size in (("rows", 24), ("name_ends", 4), ("times", 4), ("orientations", 1)):
        os.truncate(cache / name, count * size)
    os.truncate(cache / "checksums", count * 4)
    os.truncate(cache / "names", 0)
    with (cache / "name_ends").open("r+b") as file:
        file.write(bytes(16))
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert len(open_index(root)) == len(FILES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - began < 20


def test_a_description_nested_too_deep_or_of_another_kind_is_made_again(root: Path) -> None:
    open_index(root)
    about = root.parent / ".lockstep" / root.name / "index.json"
    for text in ("[" * 10**5, "[]", "7", '"', '{"stamp": []}', "\x00", "1" * 5000):
        about.write_text(text)
        assert len(open_index(root)) == len(FILES)


def test_no_file_of_a_strangers_index_is_a_link(root: Path, tmp_path: Path) -> None:
    open_index(root)
    cache = root.parent / ".lockstep" / root.name
    (cache / "rows").rename(tmp_path / "rows")
    (cache / "rows").symlink_to(tmp_path / "rows")
    assert open_index(root).notes[0].endswith("rows is a link, expected a file")
    assert not (cache / "rows").is_symlink()


def test_an_index_of_an_older_version_is_used_as_it_is(root: Path, decodings: list[bytes]) -> None:
    """It has no checksums, and perhaps those of a newer index that it has replaced."""
    built = open_index(root)
    cache = root.parent / ".lockstep" / root.name
    about = json.loads((cache / "index.json").read_text())
    del about["checksums"]
    (cache / "index.json").write_text(json.dumps(about))
    (cache / "checksums").write_bytes(b"of others")
    decodings.clear()
    old = open_index(root)
    assert (len(old.checksums), old.digest, decodings) == (0, built.digest, [])
    assert old.read(0) == FILES["cat/z.jpg"]
    assert len(open_index(root, anew=True).checksums) == len(FILES)
    assert open_index(root).digest == built.digest


def test_a_folder_of_one_class_with_many_names_is_its_own(tmp_path: Path) -> None:
    """More than one part of the names is checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_files, "_AT_ONCE", 3)
        names = [f"{label}/{'x' * i}y.jpg" for label in ("a", "bb") for i in range(8)]
        root = image_folder(tmp_path / "images", dict.fromkeys(names, jpeg()))
        open_index(root)
        assert open_index(root).notes == ()
        assert paths(open_index(root)) == sorted(names)
        forge(tmp_path / ".lockstep" / "images", put("names", -5, ord("y")))
        assert len(open_index(root)) == 16  # another name in the folder: its file is missing
