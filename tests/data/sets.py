"""A data set with all difficult kinds of names and images, and what every storage format must hold
of it."""

import io
import os
from pathlib import Path

from PIL import Image

from lockstep.data.listing import Listing, list_images
from lockstep.data.packing import Packing, pack
from lockstep.data.sources import find_split
from tests.data.cases import image_folder, jpeg

FORMATS = ("folder", "recordio", "tfrecord", "webdataset")
CONTAINERS = FORMATS[1:]


def encode_blank(kind: str, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> bytes:
    """Return an image in one of Pillow's formats and modes."""
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


MAGIC = bytes.fromhex("0a23d7ce")
"""RecordIO's magic number."""
NOT_UTF8 = os.fsdecode(b"\xff\xe9.jpg"), os.fsdecode(b"\xff\xfcro")
TRAIN = {
    # Some names begin with other names. Bytes and code points give different orders of the last two
    # names and classes.
    "a/1.jpg": jpeg(30, 40, 1),
    "a/10.jpg": jpeg(30, 40, 2),
    "a/Käuzchen 3.jpg": jpeg(31, 41, 3),
    "a/\ue000.jpg": jpeg(32, 42, 4),
    f"a/{NOT_UTF8[0]}": jpeg(33, 43, 5),
    "\ue000/grey.jpg": encode_blank("JPEG", "L"),
    "a b/cmyk.jpg": encode_blank("JPEG", "CMYK"),
    "a b/image.png": encode_blank("PNG", "P"),
    "a b/no ending": encode_blank("PNG", "RGBA"),
    "a-b/half.jpg": jpeg(60, 80),
    "a-b/magic.jpg": jpeg(50, 51) + b"\0" * (-len(jpeg(50, 51)) % 4) + MAGIC * 3,
    "a-b/tail.jpg": jpeg(24, 25) + b"<html>404</html>",
    "a-b/upright.jpg": jpeg(26, 12),
    f"{NOT_UTF8[1]}/x.jpg": jpeg(20, 21),
    "Vögel/1.jpg": jpeg(22, 23),
}
VAL = {"a/v.jpg": jpeg(30, 31, 9), "a-b/v.jpg": jpeg(31, 30, 9), "Vögel/v.jpg": jpeg(32, 32, 9)}
SPLITS = {"train": TRAIN, "val": VAL}
CLASSES = ("Vögel", "a", "a b", "a-b", "\ue000", NOT_UTF8[1])


def sort_images(
    files: dict[str, bytes], classes: tuple[str, ...] = CLASSES
) -> list[tuple[str, str, bytes]]:
    """Return class, name and bytes of the images of a folder, sorted by class, then by the bytes of
    the name."""
    parted = [(*name.split("/"), data) for name, data in files.items()]
    return sorted(parted, key=lambda image: (classes.index(image[0]), os.fsencode(image[1])))


def data_set(root: Path) -> Path:
    for split, files in SPLITS.items():
        image_folder(root / split, files)
    return root


def pack_as(source: Path, target: Path, format: str, **how: int) -> Path:
    pack(source, target, Packing(format, **how))
    return target


def read_all(listing: Listing) -> list[tuple[str, str, bytes]]:
    """Return class, name without folders, and bytes of every image."""
    return [
        (listing.classes[label], listing.name(i).rpartition("/")[2], listing.read_encoded(i))
        for i, label in enumerate(listing.rows["label"].tolist())
    ]


def listings(data: Path) -> dict[str, Listing]:
    train = list_images(find_split(data, "train"))
    return {"train": train, "val": list_images(find_split(data, "val"), train.classes)}


def files_of(root: Path) -> dict[str, bytes]:
    """Return all files in a folder except Lockstep's own."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in paths
        if ".lockstep" not in path.parts
    }
