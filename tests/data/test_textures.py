"""The drawn data set: the same pixels on every machine, ten classes of equal size, no image in both
splits."""

import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.data.textures import PATTERNS, draw_data_set, draw_texture

GOLDEN = {
    "blobs": "09d70502852d3e38",
    "bricks": "e9ed2813143f26a3",
    "checks": "5205f50d1f8951c0",
    "dots": "5693f0198edfe8a2",
    "grid": "453a9b2a95b628d6",
    "rays": "ff859f7b31922577",
    "rings": "679e10056bd3ce54",
    "spiral": "06f497541bfff680",
    "stripes": "42dec5baf61f38f7",
    "zigzag": "6adac35137f28760",
}


def test_textures_of_ten_kinds_have_the_pixels_they_always_had() -> None:
    pixels = {kind: draw_texture(kind, 3).tobytes() for kind in PATTERNS}
    assert {kind: hashlib.sha256(pixels[kind]).hexdigest()[:16] for kind in pixels} == GOLDEN


def sizes(folder: Path) -> list[tuple[int, int]]:
    return [Image.open(io.BytesIO(path.read_bytes())).size for path in folder.rglob("*.jpg")]


def test_the_shorter_side_is_96_pixels_and_the_longer_at_most_144(textures: Path) -> None:
    actual = sizes(textures)
    assert {min(size) for size in actual} == {96}
    assert 130 < max(max(size) for size in actual) <= 144


def test_some_images_are_upright_and_some_lie(textures: Path) -> None:
    upright = sum(width < height for width, height in sizes(textures))
    assert 0.25 < upright / 80 < 0.75


@pytest.mark.parametrize(("split", "count"), [("train", 6), ("val", 2)])
def test_every_class_has_its_share_of_the_images(split: str, count: int, textures: Path) -> None:
    counts = {
        folder.name: len(list(folder.glob("*.jpg")))
        for folder in (textures / split).iterdir()
        if folder.name[0] != "."
    }
    assert counts == dict.fromkeys(PATTERNS, count)


def test_no_image_is_both_in_training_and_in_validation(textures: Path) -> None:
    train, val = (
        {path.read_bytes() for path in (textures / split).rglob("*.jpg")}
        for split in ("train", "val")
    )
    assert (len(train), len(val)) == (60, 20)
    assert not train & val


def test_an_image_in_its_file_is_the_texture_of_its_number(textures: Path) -> None:
    stored = np.asarray(Image.open(textures / "val" / "rings" / "00007.jpg")).astype(float)
    drawn = draw_texture("rings", 7)
    assert stored.shape == drawn.shape
    assert np.abs(stored - drawn).mean() < 10


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def draw(root: Path, **settings: object) -> dict[str, bytes]:
    draw_data_set(root, train_images=20, val_images=10, **settings)
    return contents(root)


def test_another_seed_gives_other_files_of_the_same_names(tmp_path: Path) -> None:
    one = draw(tmp_path / "one")
    two = draw(tmp_path / "two", seed=1)
    assert one.keys() == two.keys()
    assert not set(one.values()) & set(two.values())


def test_files_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    draw(tmp_path)
    for path in tmp_path.rglob("*.jpg"):
        os.utime(path, (1, 1))
    kept = tmp_path / "train" / "dots" / "00000.jpg"
    kept.write_bytes(b"mine")
    os.utime(kept, (1, 1))
    draw(tmp_path)
    assert kept.read_bytes() == b"mine"
    assert {path.stat().st_mtime for path in tmp_path.rglob("*.jpg")} == {1}


def test_a_drawing_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    complete = draw(tmp_path)
    for path in list(tmp_path.rglob("*.jpg"))[::3]:
        path.unlink()
    (tmp_path / "train" / "dots" / ".00000.jpg.partial").write_bytes(b"half an image")
    (tmp_path / "train" / "dots" / "00000.jpg").unlink(missing_ok=True)
    assert draw(tmp_path) == complete


def test_only_the_kinds_that_are_asked_for_are_drawn(tmp_path: Path) -> None:
    everything = draw(tmp_path / "all")
    some = draw(tmp_path / "some", kinds=("dots", "rays"))
    assert sorted({path.split("/")[1] for path in some}) == ["dots", "rays"]
    assert len(some) == 30
    assert all(some[path] == everything[path] for path in some.keys() & everything.keys())


def test_progress_counts_every_image(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    draw(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 30) for done in range(1, 31)]
