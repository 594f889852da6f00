"""Nothing vanishes: what is written is listed, or left out with its reason and counted."""

import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from lockstep.data.class_folders import describe_skipped
from lockstep.data.containers import recordio, tfrecord, webdataset
from lockstep.data.decoding.image_formats import FORMAT_OF
from lockstep.data.images import Images, Names
from lockstep.data.index import open_index
from lockstep.data.inspection import _arrange, inspect_images
from lockstep.data.listing import Listing, list_images
from lockstep.data.sources import find_source
from lockstep.data.tar_folders import find_classes
from lockstep.system.crc import compute_crc
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg, write_tar

IMAGE = jpeg()
ENDINGS = [*FORMAT_OF, ".JPG", ""]
FILES = {
    f"{name}/{file}": IMAGE + f"{name}/{file}".encode()
    for name in ("ant", "cat")
    for ending in ENDINGS
    for file in (f"photo.2024.{ending.strip('.')}1{ending}", f"one stem{ending}", f"x{ending}")
} | {
    "cat/begins.as-image": IMAGE,
    "cat/a.json": b"{}",
    "ant/note.txt": b"text",
    "ant/.hidden.jpg": IMAGE,
    "ant/._x.jpg": b"of macOS",
    "cat/2023/inside.jpg": IMAGE,
    "beside.txt": b"text",
}
"""In `train`, with a nested folder. Every image has other bytes."""


def count_kinds(listing: Listing) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in listing.skipped:
        counts[item.kind] = counts.get(item.kind, 0) + item.amount
    return counts


def describe(listing: Listing) -> list[tuple[str, str, bytes]]:
    return [
        (listing.classes[label], Path(listing.name(i)).name, listing.read_encoded(i))
        for i, label in enumerate(listing.rows["label"].tolist())
    ]


@pytest.mark.parametrize("where", ["inside", "around", "entries"])
def test_a_tar_of_a_folder_reads_as_the_folder(where: str, tmp_path: Path) -> None:
    root = image_folder(tmp_path / "folder/train", FILES)
    (root / "empty").mkdir()
    names = {
        "inside": ["-C", str(root), "."],
        "around": ["-C", str(root.parent), "train"],
        "entries": ["-C", str(root), "cat", "ant", "empty", "beside.txt"],
    }
    (tmp_path / "tar").mkdir()
    command = ["tar", "cf", str(tmp_path / "tar/train.tar"), *names[where]]
    subprocess.run(command, check=True, timeout=60)
    folder = list_images(find_source(root))
    tar = list_images(find_source(tmp_path / "tar"))
    assert len(tar) == 2 * 3 * len(ENDINGS) + 1
    assert describe(tar) == describe(folder)
    assert tar.classes == folder.classes
    # What is next to class folders, the folder's check lists by itself.
    kinds = {"hidden": 2, "stray-file": 2, "empty-class": 1, "nested-folder": 1}
    assert count_kinds(folder) == kinds
    assert count_kinds(tar) == kinds | {"stray-file": 3}
    assert tar.damaged == folder.damaged == ()


def test_links_and_folders_in_a_tar_are_counted(tmp_path: Path) -> None:
    members = {"cat": None, "cat/a.jpg": IMAGE, "cat/b.jpg": b"-> a.jpg", "dog/": None}
    write_tar(tmp_path / "train.tar", members)
    listing = list_images(find_source(tmp_path))
    assert (len(listing), count_kinds(listing)) == (1, {"link": 1, "empty-class": 1})
    result = describe_skipped(listing.skipped)
    assert result == "1 empty class folder (train.tar/dog), 1 link in a tar (train.tar/cat/b.jpg)"


def test_the_folders_of_all_tars_together_decide_what_is_a_class(tmp_path: Path) -> None:
    """A shard alone may hold only a nested folder, or only the folder of a class."""
    shards = [
        {"cat": None, "dog": None, "eel": None, "cat/a.jpg": IMAGE},
        {"dog": None, "cat/2023/b.jpg": IMAGE},
        {"cat": None, "cat/c.jpg": IMAGE, "dog/d.jpg": IMAGE, "e.jpg/f.jpg": IMAGE},
    ]
    for number, members in enumerate(shards):
        write_tar(tmp_path / f"train-{number:06d}.tar", members)
    listing = list_images(find_source(tmp_path))
    assert listing.classes == ("cat", "dog", "e.jpg")
    result = [listing.name(i) for i in range(4)]
    assert result == [*("cat/a.jpg", "cat/c.jpg", "dog/d.jpg", "e.jpg/f.jpg")]
    assert [item[:2] for item in listing.skipped] == [
        ("empty-class", "train-000000.tar/eel"),
        ("nested-folder", "train-000001.tar/cat/2023"),
    ]


def test_a_list_next_to_tars_orders_folders_as_class_folders(tmp_path: Path) -> None:
    files = {"ant/a.jpg": IMAGE, "cat/b.jpg": IMAGE}
    image_folder(tmp_path / "folder", files)
    write_tar(tmp_path / "tar/train.tar", dict(files))
    for text, classes in (("cat\nant\n", ("cat", "ant")), ("cat\n", ("ant", "cat"))):
        for root in (tmp_path / "folder", tmp_path / "tar"):
            (root / "classes.txt").write_text(text)
            listing = list_images(find_source(root))
            assert listing.classes == classes
            assert count_kinds(listing) == ({"class-list": 1} if "ant" not in text else {})


def test_an_image_next_to_the_class_folders_of_a_tar_is_named(tmp_path: Path) -> None:
    members = {"set/cat/a.jpg": IMAGE, "set/stray.jpg": IMAGE, "set/dog/b.jpg": IMAGE}
    write_tar(tmp_path / "train.tar", members)
    listing = list_images(find_source(tmp_path))
    assert (len(listing), listing.classes) == (2, ("cat", "dog"))
    assert listing.skipped == (("loose-image", "train.tar/set/stray.jpg", 1),)


WEBDATASET = {
    "a.cls": b"1",
    "a.jpg": IMAGE + b"1",
    "a.seg.png": IMAGE + b"mask",
    "a.png": IMAGE + b"2",
    "a.txt": b"a caption",
    "b.2024.01.jpg": IMAGE + b"3",
    "b.2024.01.cls": b"0",
    "b.2024.02.cls": b"2",
    "b.2024.02.jpg": IMAGE + b"4",
    "c.cls": b"0",
    "c.rgb.jpeg": IMAGE + b"5",
    "d.cls": b"1",
    "e.jpg": IMAGE,
    "e.txt": b"0",
    "f.jpg": IMAGE,
    "f.cls": b"0 1",
    "g.jpg": IMAGE,
    "g.cls": b"0",
    "g.CLS": b"1",
    "README": b"text",
}


def test_members_of_webdataset_are_images_or_describe_them_or_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", WEBDATASET)
    listing = list_images(find_source(tmp_path))
    labels = {listing.read_encoded(i)[-1:]: int(listing.rows["label"][i]) for i in range(4)}
    assert labels == {b"1": 1, b"3": 0, b"4": 2, b"5": 0}
    assert len(listing) == 4
    # a.seg.png, a.png; a.txt, d.cls, e.txt, README
    assert count_kinds(listing) == {"extra-image": 2, "stray-file": 4}
    reasons = [bad.reason.partition(": ")[2] for bad in listing.damaged]
    result = [reason[:14] for reason in reasons]
    assert result == ["its label is m", "f.cls is '0 1'", "it has two lab"]


def test_a_tar_that_is_cut_between_members_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "train.tar"
    write_tar(path, {"cat/a.jpg": IMAGE, "cat/b.jpg": IMAGE, "dog/": None, "cat/c.jpg": IMAGE})
    whole = path.read_bytes()
    with tarfile.open(path) as opened:
        ends = [member.offset for member in opened.getmembers()[1:]]
    last = len(whole.rstrip(b"\0"))
    end = last + -last % 512
    for size, images in ((ends[0], 1), (ends[1], 2), (ends[2], 2), (end, 3), (end + 512, 3)):
        path.write_bytes(whole[:size])
        listing = list_images(find_source(tmp_path))
        assert (len(listing), count_kinds(listing)["no-end"]) == (images, 1)
        assert "1 tar without its end (train.tar)" in describe_skipped(listing.skipped)
    path.write_bytes(whole[: end + 1024])
    assert count_kinds(list_images(find_source(tmp_path))) == {"empty-class": 1}


def test_a_tar_without_labels_is_refused_for_that(tmp_path: Path) -> None:
    write_tar(tmp_path / "train.tar", {"0.jpg": IMAGE, "0.txt": b"a cat", "1.jpg": IMAGE})
    with pytest.raises(DataError, match=r"no image can be read; .*its label is missing"):
        open_index(tmp_path)


@pytest.mark.parametrize(
    ("folders", "classes"),
    [
        (["a/b/cat", "a/b/dog"], ["cat", "dog"]),
        (["one/cat", "two/dog"], ["cat", "dog"]),
        (["cat", "cat/2023"], ["cat"]),
        (["set", "set/cat", "set/dog", "set/dog/2023"], ["cat", "dog"]),
        (["train", "train/cat", "train/dog"], ["cat", "dog"]),
        (["cat/2023", "dog/2023"], []),
    ],
)
def test_folders_of_a_tar_are_classes(folders: list[str], classes: list[str]) -> None:
    assert sorted(find_classes(folders).names.values()) == classes


def test_empty_records_are_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 stand for a million: no more are kept one by one."""
    for format, name, record in (
        (recordio, "a.rec", recordio.frame_record(b"")),
        (tfrecord, "a.tfrecord", tfrecord.frame_record(b"")),
    ):
        root = tmp_path / name[2:]
        root.mkdir()
        (root / name).write_bytes(b"".join(record) * 1000)
        assert sum(1 for _ in format.scan_images(root / name)) == 1000
        listing = list_images(find_source(root))
        assert (len(listing.damaged), len(listing.skipped)) == (100, 21)
        assert count_kinds(listing) == {"bad-record": 900}
        assert describe_skipped(listing.skipped).startswith("900 damaged places without images (")


def test_what_was_inspected_is_kept_for_the_images_that_are_listed(tmp_path: Path) -> None:
    """Images of a store are decoded before all folders of their tar are known."""
    members = {"cat/2023/a.jpg": jpeg(9, 9), "cat/b.jpg": jpeg(10, 9), "dog/c.jpg": b"no image"}
    write_tar(tmp_path / "train.tar", members)
    source = find_source(tmp_path)
    inspected = []

    def inspect(rows: np.ndarray) -> None:
        images = Images(source, rows, Names.of(()), (), numbered=True)
        inspected.append((rows, inspect_images(images, lambda done, total: None)))

    listing = list_images(source, inspect=inspect)
    facts = _arrange(listing.rows, inspected)
    assert [listing.name(i) for i in range(2)] == ["cat/b.jpg", "dog/c.jpg"]
    assert listing.rows["height"].tolist() == [10, 0]
    assert facts.checksums.tolist()[0] == compute_crc(jpeg(10, 9))
    assert list(facts.bad) == [1]


def test_samples_are_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are looked at together end in the middle of one."""
    monkeypatch.setattr(webdataset, "_MOST_TOGETHER", 4)
    members: dict[str, bytes | None] = {}
    for i in range(5):
        parts = {"jpg": IMAGE, "cls": b"%d" % i, "json": b"{}"}
        members |= {f"photo.{i}.{ending}": data for ending, data in parts.items()}
    listing = list_images(find_source(write_tar(tmp_path / "train.tar", members).parent))
    assert listing.rows["label"].tolist() == [0, 1, 2, 3, 4]
    assert (listing.damaged, listing.skipped) == ((), ())
