"""Every kind of bad image, copies, and files that are not images."""

import io
import os
import re
import warnings
from itertools import product
from pathlib import Path

import pytest
from PIL import Image

from lockstep.data.checking import KINDS, examine
from lockstep.data.split import open_sets
from tests.data.cases import image_folder
from tests.data.checking.cases import (
    FORMATS,
    SOUND,
    kinds,
    only,
    picture,
    place_of,
    write,
    write_rotated,
)
from tests.data.pictures import progressive_jpeg
from tests.soak import SOAK

BAD: dict[str, tuple[str, bytes, str]] = {
    "empty": ("x.jpg", b"", "empty file"),
    "truncated": ("x.jpg", picture(50)[:-40], "Premature end of JPEG file"),
    "truncated header": ("x.jpg", picture(50)[:200], "Truncated File Read"),
    "truncated png": ("x.png", picture(50, "PNG")[:-500], "image file is truncated"),
    "truncated ppm": ("x.ppm", picture(50, "PPM")[:10], "not enough image data"),
    "truncated ppm header": ("x.ppm", picture(50, "PPM")[:2], "Reached EOF while reading header"),
    "damaged": ("x.png", picture(50, "PNG").replace(b"IDAT", b"IDAX"), ""),
    "damaged start": ("x.png", picture(50, "PNG")[:10], "not an image in a known format"),
    "not-an-image": ("x.jpg", b"<html>404</html>", "not an image in a known format"),
    "too-large": ("x.png", picture(1, "PNG", size=(65536, 1)), "65536 x 1 pixels are too many"),
    "too-large in scans": (
        "x.jpg",
        progressive_jpeg(repeated=1000),
        "more than 100 scans are too many",
    ),
    "truncated webp": ("x.webp", picture(50, "WEBP")[:-9], "truncated: it has"),
    "wrong-checksum": (
        "x.png",
        picture(50, "PNG", dpi=(72, 72)).replace(b"pHYs\0\0", b"pHYs\0\1"),
        "pHYs",
    ),
    "cmyk": ("x.jpg", picture(50, mode="CMYK"), "CMYK"),
    "another-format": ("x.JPEG", picture(50, "PNG"), "PNG named .JPEG"),
    "rotated": ("x.jpg", write_rotated(6), "orientation 6"),
    "tiny": ("x.jpg", picture(50, size=(31, 80)), "31 x 80 pixels"),
}


@pytest.mark.parametrize(("what", "format"), list(product(BAD, FORMATS))[:: 1 if SOAK else 3])
def test_a_bad_image_is_found_at_its_place(what: str, format: str, tmp_path: Path) -> None:
    name, data, detail = BAD[what]
    write(format, tmp_path, SOUND | {f"train/bee/{name}": data})
    finding = only(examine(tmp_path), next(kind for kind in KINDS if what.startswith(kind)))
    assert (finding.split, finding.place) == ("train", place_of(tmp_path, f"train/bee/{name}"))
    assert finding.name == f"bee/{name}"
    assert detail in finding.detail


@pytest.mark.parametrize("orientation", range(2, 9))
def test_every_orientation_but_the_upright_one_is_found(orientation: int, tmp_path: Path) -> None:
    image_folder(
        tmp_path,
        {"cat/a.jpg": write_rotated(orientation), "cat/b.webp": write_rotated(orientation, "WEBP")},
    )
    assert examine(tmp_path).count_kinds() == {"rotated": 2}


def test_a_jpeg_with_a_preview_behind_it_is_a_jpeg(tmp_path: Path) -> None:
    other = Image.open(io.BytesIO(picture(2)))
    image_folder(tmp_path, {"cat/a.jpg": picture(1, "MPO", save_all=True, append_images=[other])})
    assert Image.open(io.BytesIO((tmp_path / "cat/a.jpg").read_bytes())).format == "MPO"
    assert examine(tmp_path).findings == ()


def test_an_image_can_have_several_findings(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    image_folder(tmp_path, {"cat/a.png": picture(1, mode="CMYK", size=(20, 20), exif=exif)})
    assert kinds(examine(tmp_path)) == ["cmyk", "another-format", "rotated", "tiny"]


def test_the_smallest_side_can_be_chosen(tmp_path: Path) -> None:
    image_folder(tmp_path, {"cat/a.jpg": picture(1)})
    assert examine(tmp_path, smallest=40).findings == ()
    assert only(examine(tmp_path, smallest=41), "tiny").detail == "48 x 40 pixels"


@pytest.mark.parametrize("pixels", [9_000, 4_000], ids=["warning", "error"])
def test_a_decompression_bomb_stays_inside(
    pixels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels)
    image_folder(
        tmp_path, {"cat/a.png": picture(1, "PNG", size=(100, 100)), "cat/b.png": picture(2, "PNG")}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = examine(tmp_path)
    assert kinds(report) == ["too-large"] * (pixels == 4_000)


def test_links_to_nothing_and_in_a_circle_and_a_pipe_are_unreadable(tmp_path: Path) -> None:
    write(format="folder", data=tmp_path, images=SOUND)
    (tmp_path / "val/ant/gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "val/bee/loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "val/loop").symlink_to("loop")
    os.mkfifo(tmp_path / "val/bee/pipe.jpg")
    problems = [
        (finding.kind, finding.split, finding.place, finding.detail)
        for finding in examine(tmp_path).findings
    ]
    assert problems == [
        ("empty-class", "val", "loop", "no images"),
        ("unreadable", "val", "bee/loop.jpg", "Too many levels of symbolic links"),
        ("unreadable", "val", "ant/gone.jpg", "No such file or directory"),
        ("unreadable", "val", "bee/pipe.jpg", "it is a pipe, not a regular file"),
    ]


def test_a_file_too_long_for_an_image_is_not_read(tmp_path: Path) -> None:
    image_folder(tmp_path, {"cat/a.jpg": picture(1)})
    with (tmp_path / "cat/huge.jpg").open("wb") as file:
        file.truncate(2**32)
    finding = only(examine(tmp_path), "too-large")
    assert finding.place == "cat/huge.jpg"
    assert re.search("4,294,967,296 bytes.* 1,073,741,824 ", finding.detail)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("copy", "kind", "place_of_first"),
    [
        ("train/bee/x.jpg", "duplicate", "train/bee/train0.jpg"),
        ("train/cat/x.jpg", "duplicate-other-label", "train/bee/train0.jpg"),
        ("val/bee/x.jpg", "in-train-and-val", "val/bee/x.jpg"),
        ("val/cat/x.jpg", "duplicate-other-label", "val/cat/x.jpg"),
    ],
)
def test_a_copy_is_found_and_names_the_first(
    copy: str, kind: str, place_of_first: str, format: str, tmp_path: Path
) -> None:
    write(format, tmp_path, SOUND | {copy: SOUND["train/bee/train0.jpg"]})
    report = examine(tmp_path)
    finding = only(report, kind)
    in_val = copy.startswith("val")
    at_fault = "train/bee/train0.jpg" if in_val else copy
    assert (finding.split, finding.place) == ("train", place_of(tmp_path, at_fault))
    split = "val/" if in_val else "train/"
    assert finding.detail == split + place_of(tmp_path, place_of_first)
    assert bool(report.write_quarantine()) == (kind == "in-train-and-val")


def test_copies_on_both_sides_of_the_share_that_a_run_sets_apart_are_found(tmp_path: Path) -> None:
    """The sides are those of a run, and contradicting labels are for the user."""
    names = [f"{label}/{i}.jpg" for label in ("ant", "bee") for i in range(8)]
    photos = {name: picture(number) for number, name in enumerate(names)}
    photos |= {f"bee/copy{i}.jpg": photos["bee/1.jpg"] for i in range(6)}
    image_folder(tmp_path, photos | {"ant/bee.jpg": photos["bee/2.jpg"]})
    for share in (None, 0.6):
        training, validation, *_ = open_sets(
            tmp_path, share or 0.3, lambda _: lambda done, all: None
        )
        sides = [
            {one.name(i): one.read(i) for i in range(len(one))} for one in (training, validation)
        ]
        left, right = (
            {name for name in side if side[name] == photos["bee/1.jpg"]} for side in sides
        )
        assert min(len(left), len(right)) > 0
        report = examine(tmp_path, share=share)
        places = {
            kind: {one.place for one in report.findings if one.kind == kind} for kind in KINDS
        }
        assert places["in-train-and-val"] == left
        assert places["duplicate"] == right - {min(right)}
        assert len(places["duplicate-other-label"]) == 1
    assert examine(tmp_path, share=0).count_kinds() == {"duplicate-other-label": 1, "duplicate": 6}


def test_of_many_copies_all_but_the_first_are_found(tmp_path: Path) -> None:
    one = picture(100)
    two = picture(101)
    train = {
        "train/ant/a.jpg": one,
        "train/ant/b.jpg": one,
        "train/bee/c.jpg": one,
        "train/cat/d.jpg": two,
        "train/cat/e.jpg": two,
    }
    val = {"val/bee/x.jpg": one, "val/bee/y.jpg": one, "val/cat/z.jpg": one}
    image_folder(tmp_path, SOUND | train | val)
    problems = [
        (finding.split, finding.kind, finding.place, finding.detail)
        for finding in examine(tmp_path).findings
    ]
    assert problems == [
        ("train", "duplicate-other-label", "ant/a.jpg", "val/bee/x.jpg"),
        ("train", "duplicate-other-label", "ant/b.jpg", "val/bee/x.jpg"),
        ("train", "in-train-and-val", "bee/c.jpg", "val/bee/x.jpg"),
        ("train", "duplicate", "cat/e.jpg", "train/cat/d.jpg"),
        ("val", "duplicate", "bee/y.jpg", "val/bee/x.jpg"),
        ("val", "duplicate-other-label", "cat/z.jpg", "val/bee/x.jpg"),
    ]


def test_bad_images_are_no_copies_of_each_other(tmp_path: Path) -> None:
    image_folder(
        tmp_path, SOUND | {"train/ant/x.jpg": b"", "train/bee/x.jpg": b"", "val/cat/x.jpg": b""}
    )
    assert examine(tmp_path).count_kinds() == {"empty": 3}
