"""Training photos that show a validation photo in another way, and images that show nothing."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep.data.checking import examine
from lockstep.data.checking.near_duplicates import find_candidates, hash_image
from tests.data.cases import image_folder
from tests.data.checking.cases import kinds, picture

Change = Callable[[Image.Image], Image.Image]


def photo(seed: int) -> Image.Image:
    """Return an image of 300 x 220 pixels that has, as photos, more of lower frequencies."""
    random = np.random.default_rng(seed)
    pixels = np.full((220, 300, 3), 128.0)
    for size, contrast in ((3, 60), (6, 40), (12, 25), (60, 12)):
        coarse = random.normal(0, contrast, (size, size, 3)).astype(np.float32)
        for colour in range(3):
            layer = Image.fromarray(coarse[..., colour])
            pixels[..., colour] += np.asarray(layer.resize((300, 220), Image.Resampling.BICUBIC))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def save(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def turn(image: Image.Image) -> bytes:
    """Store an image on its side, with the orientation that turns it back."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return save(image.transpose(Image.Transpose.ROTATE_90), exif=exif)


CHANGES: dict[str, Callable[[Image.Image], bytes]] = {
    "encoded.jpg": lambda image: save(image, quality=35),
    "lossless.png": lambda image: save(image, "PNG"),
    "half.jpg": lambda image: save(image.resize((150, 110), Image.Resampling.LANCZOS)),
    "square.jpg": lambda image: save(image.resize((256, 256), Image.Resampling.BICUBIC)),
    "large.webp": lambda image: save(image.resize((600, 440)), "WEBP"),
    "grey.jpg": lambda image: save(image.convert("L")),
    "bright.jpg": lambda image: save(image.point(lambda level: min(255, int(level * 1.1) + 5))),
    "cropped.jpg": lambda image: save(image.crop((8, 6, 292, 214))),
    "cropped_more.jpg": lambda image: save(image.crop((15, 11, 285, 209))),
    "turned.jpg": turn,
}


def test_a_photo_in_another_encoding_size_or_crop_is_found(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for seed, (name, change) in enumerate(CHANGES.items()):
        files[f"val/cat/{seed}.jpg"] = save(photo(seed), quality=95)
        files[f"train/cat/{name}"] = change(photo(seed))
        files[f"train/cat/other{seed}.jpg"] = save(photo(100 + seed))
    likenesses = {
        finding.place: finding.detail
        for finding in examine(image_folder(tmp_path, files)).findings
        if finding.kind not in ("rotated", "another-format")
    }
    assert likenesses == {f"cat/{name}": f"val/cat/{seed}.jpg" for seed, name in enumerate(CHANGES)}
    assert {f.kind for f in examine(tmp_path).findings} == {"near-duplicate", "rotated"}


def test_equal_images_are_no_near_duplicates_too(tmp_path: Path) -> None:
    files = {f"{split}/cat/equal.jpg": save(photo(0)) for split in ("train", "val")}
    files |= {"train/cat/a.jpg": save(photo(1)), "val/cat/b.jpg": save(photo(2))}
    report = examine(image_folder(tmp_path, files))
    assert kinds(report) == ["in-train-and-val"]


FLAT = {
    "black": (np.zeros((60, 80, 3)), "constant"),
    "grey": (np.full((60, 80, 3), 130), "constant"),
    "dark": (np.random.default_rng(0).integers(0, 7, (60, 80, 3)), "nearly black"),
    "bright": (255 - np.random.default_rng(1).integers(0, 7, (60, 80, 3)), "nearly white"),
}


def test_images_that_show_nothing_are_named_and_are_not_like_each_other(tmp_path: Path) -> None:
    files = {}
    for name, (pixels, _) in FLAT.items():
        image = Image.fromarray(pixels.astype(np.uint8))
        files |= {
            f"train/cat/{name}.png": save(image, "PNG"),
            f"val/cat/{name}.bmp": save(image, "BMP"),
        }
    for i in range(3):
        files |= {f"train/cat/{i}.jpg": picture(i), f"val/cat/{i}.jpg": picture(10 + i)}
    report = examine(image_folder(tmp_path, files))
    expected = {(f"cat/{name}", f"blank: {kind}") for name, (_, kind) in FLAT.items()}
    assert {
        (finding.place[:-4], f"{finding.kind}: {finding.detail}") for finding in report.findings
    } == expected
    assert len(report.findings) == 8


def test_many_images_that_show_nothing_are_a_finding_of_the_split(tmp_path: Path) -> None:
    files = {}
    for i in range(9):
        image = Image.new("RGB", (40, 40), (20 * i, 0, 0))
        files |= {f"cat/blank{i}.png": save(image, "PNG"), f"cat/{i}.jpg": picture(i)}
    findings = examine(image_folder(tmp_path, files)).findings
    assert [finding.kind for finding in findings] == ["many-blank"] + ["blank"] * 9
    assert findings[0].detail == "9 images, 50.0 % of them"


def test_a_slope_and_stripes_without_details_have_no_hash() -> None:
    rows, columns = np.mgrid[0:100, 0:120]
    for pixels in (rows, columns, rows + columns, 0 * rows + 7):
        image = np.repeat(pixels[..., None], 3, axis=2).astype(np.uint8)
        assert not hash_image(image).any()


def test_candidates_are_those_of_all_pairs() -> None:
    """Every pair that differs in up to 7 bits, and none that differs in more than 10."""
    random = np.random.default_rng(0)
    validation = random.integers(1, 2**64, (300, 3), np.uint64)
    training = random.integers(1, 2**64, (700, 3), np.uint64)
    bits = random.integers(0, 14, 300)
    for i, count in enumerate(bits.tolist()):
        places = random.choice(64, count, replace=False).tolist()
        training[2 * i, 0] = validation[i, 0] ^ np.uint64(sum(1 << place for place in places))
    candidates = find_candidates(training, validation)
    near = {2 * i for i in range(300) if bits[i] <= 7}
    possible = {2 * i for i in range(300) if bits[i] <= 10}
    assert near <= candidates.keys() <= possible
    assert all(js == [i // 2] for i, js in candidates.items())


@pytest.mark.parametrize("value", [0, 5])
def test_of_many_equal_hashes_a_few_are_compared(value: int) -> None:
    """A hash of 0 is that of an image without details."""
    hashes = np.full((500, 3), value, np.uint64)
    candidates = find_candidates(hashes, hashes)
    assert sum(map(len, candidates.values())) <= 3 * 256 * bool(value)


PLANTED = {
    "empty-class": "train/old",
    "nested-folder": "train/dog/2023",
    "hidden": "train/cat/.DS_Store",
    "stray-file": "train/cat/Thumbs.db",
    "duplicate": "train/cat/twice.jpg",
    "duplicate-other-label": "train/dog/cat.jpg",
    "in-train-and-val": "train/cat/leaked.jpg",
    "near-duplicate": "train/cat/small.jpg",
    "blank": "train/cat/black.jpg",
    "cmyk": "train/cat/print.jpg",
    "tiny": "train/cat/thumbnail.jpg",
    "another-format": "train/cat/really.png.jpg",
    "rotated": "train/cat/phone.jpg",
    "truncated": "train/dog/half.jpg",
    "empty": "train/dog/zero.jpg",
    "not-an-image": "train/dog/error.jpg",
    "damaged": "train/dog/flipped.png",
}
"""What `make_messy_folder` plants, besides problems that concern all of a class or a side."""


def make_messy_folder(folder: Path) -> None:
    """Write a data set with one problem of each of many kinds."""
    random = np.random.default_rng(0)
    for name in ("train/cat", "train/dog", "train/dog/2023", "train/old", "val/cat", "val/owl"):
        (folder / name).mkdir(parents=True)
    (folder / "train/classes.txt").write_text("cat")
    cats = folder / "train/cat"
    dogs = folder / "train/dog"

    def draw() -> Image.Image:
        coarse = Image.fromarray(random.integers(0, 256, (9, 12, 3), np.uint8))
        return coarse.resize((160, 120), Image.Resampling.BICUBIC)

    for name in ("train/cat/1", "train/cat/2", "train/dog/1", "val/cat/1", "val/owl/1"):
        draw().save(folder / f"{name}.jpg", quality=90)
    shutil.copy(cats / "1.jpg", cats / "twice.jpg")
    shutil.copy(cats / "1.jpg", dogs / "cat.jpg")
    shutil.copy(folder / "val/cat/1.jpg", cats / "leaked.jpg")
    smaller = Image.open(folder / "val/cat/1.jpg").resize((120, 90))
    smaller.save(cats / "small.jpg", quality=60)
    Image.new("RGB", (160, 120)).save(cats / "black.jpg")
    draw().convert("CMYK").save(cats / "print.jpg")
    draw().resize((24, 18)).save(cats / "thumbnail.jpg")
    draw().save(cats / "really.png.jpg", "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    draw().save(cats / "phone.jpg", exif=exif)
    (cats / ".DS_Store").touch()
    (cats / "Thumbs.db").write_text("thumbnails")
    whole = (dogs / "1.jpg").read_bytes()
    (dogs / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (dogs / "zero.jpg").touch()
    (dogs / "error.jpg").write_text("<html>404</html>")
    draw().save(dogs / "flipped.png")
    damaged = bytearray((dogs / "flipped.png").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (dogs / "flipped.png").write_bytes(damaged)


def test_the_messy_folder_is_understood(tmp_path: Path) -> None:
    """Every problem is found once, and nothing else is."""
    make_messy_folder(tmp_path / "messy")
    findings = examine(tmp_path / "messy").findings
    places = {finding.kind: f"{finding.split}/{finding.place}" for finding in findings}
    of_classes = {"class-list", "unknown-classes", "classes-without-val"}
    assert places.keys() == PLANTED.keys() | of_classes
    assert {kind: places[kind] for kind in PLANTED} == PLANTED
    assert len(findings) == len(places)
