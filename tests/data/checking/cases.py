"""Data sets for the tests of the check: good ones and ways to damage them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.data.checking import Finding, Report
from lockstep.data.containers import Sample, recordio, tfrecord, webdataset
from lockstep.data.index import Index, open_index
from lockstep.data.listing import list_images
from lockstep.data.sources import ALIASES, find_split
from tests.data.cases import WRITERS, image_folder

Images = dict[str, bytes]
STORED = {
    "recordio": recordio.scan_images,
    "tfrecord": tfrecord.scan_images,
    "webdataset": webdataset.scan_images,
}
FILES = {"recordio": "{}.rec", "tfrecord": "{}-00000-of-00001", "webdataset": "{}-000000.tar"}
FORMATS = ["folder", *WRITERS]


def picture(
    seed: int,
    format: str = "JPEG",
    mode: str = "RGB",
    size: tuple[int, int] = (48, 40),
    **options: object,
) -> bytes:
    """Return an image; every seed gives another one."""
    image = Image.frombytes("RGB", size, np.random.default_rng(seed).bytes(size[0] * size[1] * 3))
    file = io.BytesIO()
    image.convert(mode).save(file, format, **options)
    return file.getvalue()


def write_rotated(orientation: int, format: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return picture(50, format, exif=exif)


CLASSES = ("ant", "bee", "cat")
SOUND: Images = {
    f"{split}/{name}/{split}{i}.jpg": picture(10 * label + i + (5 if split == "val" else 0))
    for split, count in (("train", 3), ("val", 2))
    for label, name in enumerate(CLASSES)
    for i in range(count)
}


def write_file(format: str, path: Path, samples: list[Sample]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with WRITERS[format](path) as writer:
        writer.extend(map(writer.record, samples))
        writer.describe([(sample.number, sample.label, sample.name) for sample in samples])
        writer.finish()
    return path


def samples_of(images: Images, split: str) -> list[Sample]:
    map_kinds = {
        name.partition("/")[2]: data
        for name, data in sorted(images.items())
        if name.startswith(f"{split}/")
    }
    classes = sorted({name.split("/")[1] for name in images})
    return [
        Sample(i, name, classes.index(name.partition("/")[0]), name.partition("/")[0], data, 40, 48)
        for i, (name, data) in enumerate(map_kinds.items())
    ]


def write(format: str, data: Path, images: Images) -> Path:
    """Write a data set of files `split/class/image`."""
    if format == "folder":
        return image_folder(data, images)
    for split in sorted({name.partition("/")[0] for name in images}):
        write_file(format, data / FILES[format].format(split), samples_of(images, split))
    return data


def write_labelled(format: str, data: Path, labels: dict[str, list[int]]) -> Path:
    """Write a data set of images without class names, with these labels."""
    for split, of_split in labels.items():
        start = 1000 * len(split)
        samples = [
            Sample(i, f"{i}.jpg", label, "", picture(start + i), 40, 48)
            for i, label in enumerate(of_split)
        ]
        write_file(format, data / FILES[format].format(split), samples)
    return data


def count_openings(data: Path) -> dict[str, Index]:
    indexes: dict[str, Index] = {}
    for split in ALIASES:
        classes = indexes["train"].classes if indexes else None
        indexes[split] = open_index(find_split(data, split), classes=classes)
    return indexes


def place_of(data: Path, name: str) -> str:
    """Return the place of the image `split/class/image`, good or bad, in a data set's listing."""
    split, _, image = name.partition("/")
    source = find_split(data, split)
    listing = list_images(source)
    [place] = [listing.place(i) for i in range(len(listing)) if listing.name(i) == image]
    return place


def kinds(report: Report) -> list[str]:
    return [finding.kind for finding in report.findings]


def only(report: Report, kind: str) -> Finding:
    """Return the finding of this kind, which must be the only finding."""
    assert kinds(report) == [kind], report.findings
    return report.findings[0]


def map_kinds(report: Report) -> dict[str, str]:
    """Return the details of the findings by split and kind."""
    return {f"{finding.split} {finding.kind}": finding.detail for finding in report.findings}
