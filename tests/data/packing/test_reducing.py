"""Images that a pack reduces."""

import io
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from lockstep.data.decoding.decode import decode
from lockstep.data.listing import list_images
from lockstep.data.packing.samples import reduce_image
from lockstep.data.sources import find_source
from tests.data.cases import image_folder, jpeg
from tests.data.sets import FORMATS, encode_blank, pack_as, read_all

LARGE = {
    "a/larger.jpg": jpeg(200, 300, 77),
    "a/upright.jpg": jpeg(301, 100, 77),
    "a/png.png": encode_blank("PNG", "RGBA", (400, 200)),
    "a/cmyk.jpg": encode_blank("JPEG", "CMYK", (150, 90)),
}


UNCHANGED = {"a/same.jpg": jpeg(64, 500), "b/smaller.jpg": jpeg(20, 30)}


SIZES = {
    "larger.jpg": (64, 96),
    "upright.jpg": (193, 64),
    "png.jpg": (64, 128),
    "cmyk.jpg": (64, 107),
}


@pytest.mark.parametrize("format", FORMATS)
def test_only_images_with_a_longer_shorter_side_are_reduced(format: str, tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source", LARGE | UNCHANGED)
    target = pack_as(source, tmp_path / "target", format, resize=64, quality=90)
    images = {name: data for _, name, data in read_all(list_images(find_source(target)))}
    assert images.keys() == {name.split("/")[1] for name in UNCHANGED} | SIZES.keys()
    for name, data in UNCHANGED.items():
        assert images[name.split("/")[1]] == data
    for name, size in SIZES.items():
        assert images[name][:2] == b"\xff\xd8"
        assert decode(images[name]).shape == (*size, 3)


def test_a_reduced_image_looks_like_the_larger_one_to_a_filter_written_out() -> None:
    rows, columns = np.mgrid[:128, :192]
    image = np.stack([rows, columns, 128 + 0 * rows], axis=2).astype(np.uint8)
    small = decode(reduce_image(simplejpeg.encode_jpeg(image, 98), 64, 98))
    means = image.reshape(64, 2, 96, 2, 3).mean((1, 3))
    assert np.abs(small - means).mean() < 1.5


def test_a_reduced_photo_keeps_its_orientation() -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (200, 100)).save(file, "JPEG", exif=exif)
    small = Image.open(io.BytesIO(reduce_image(file.getvalue(), 50, 90)))
    assert (small.size, small.getexif()[0x0112]) == ((100, 50), 6)


def test_lower_quality_takes_fewer_bytes() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    data = simplejpeg.encode_jpeg(noise, 95)
    assert len(reduce_image(data, 100, 30)) < len(reduce_image(data, 100, 90)) / 2
