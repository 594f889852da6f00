"""HEIC and AVIF: read where Pillow or its plug-in reads them, else named with what to do."""

import io
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from lockstep.data.checking import examine
from lockstep.data.decoding.decode import check, decode, header_size
from lockstep.data.decoding.image_formats import MISSING, readable_formats
from lockstep.data.decoding.orientation import read_orientation, turn_image
from lockstep.data.decoding.size_limits import TooManyPixels
from lockstep.data.index import open_index
from tests.data.cases import image_folder, jpeg

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What changes which formats are read; it is undone at the end."""
    readable_formats.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    readable_formats.cache_clear()


def encode(format: str, orientation: int = 1) -> bytes:
    if format == "HEIF":
        pytest.importorskip("pillow_heif").register_heif_opener()
    elif not features.check("avif"):
        pytest.skip("Pillow is older than 11.3")
    slope = np.linspace(0, 255, 64 * 96).reshape(64, 96)
    pixels = np.stack([slope, slope[::-1], 255 - slope], axis=2).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, quality=95, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_an_image_is_read_and_shown_as_pillow_shows_it(format: str, orientation: int) -> None:
    data = encode(format, orientation)
    pixels = decode(data)
    assert check(data) == header_size(data) == pixels.shape[:2]
    shown = turn_image(pixels, read_orientation(data))
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(shown, expected)
    if format == "AVIF":  # the plug-in for HEIC writes no orientation
        assert shown.shape[:2] == ((64, 96) if orientation == 1 else (96, 64))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
def test_more_pixels_than_the_budget_are_refused_before_they_are_decoded(format: str) -> None:
    data = encode(format)
    sides = struct.pack(">II", 96, 64)
    assert data.count(b"ispe\0\0\0\0" + sides) == 1
    large = data.replace(sides, struct.pack(">II", 12000, 11000))
    with pytest.raises(TooManyPixels, match="12000 x 11000 pixels are too many"):
        check(large)


def test_an_unread_format_is_named(formats: pytest.MonkeyPatch, tmp_path: Path) -> None:
    formats.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(ValueError, match=r"^HEIC is read by a plug-in of Pillow: pip install pil"):
        check(HEIC)
    image_folder(tmp_path, {"cat/IMG_1.HEIC": HEIC, "cat/a.avif": encode("AVIF")})
    [finding] = examine(tmp_path).findings
    assert (finding.kind, finding.place) == ("needs-plug-in", "cat/IMG_1.HEIC")
    assert finding.detail == MISSING["HEIF"]
    assert examine(tmp_path).write_quarantine() == []


def test_newly_read_formats_are_indexed_again(formats: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image_folder(tmp_path, {"cat/a.avif": encode("AVIF"), "cat/b.jpg": jpeg()})
    formats.setattr(features, "check", lambda feature: feature != "avif")
    [bad] = open_index(tmp_path).quarantined
    assert (bad.file, bad.reason) == ("cat/a.avif", MISSING["AVIF"])
    formats.undo()
    readable_formats.cache_clear()
    assert len(open_index(tmp_path)) == 2
