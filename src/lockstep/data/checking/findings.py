"""The kinds of problems of a data set, and the report of them."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.index import QUARANTINE, read_quarantine
from lockstep.data.listing import CLASSES, printable
from lockstep.data.sources import FOLDER, Source
from lockstep.system.files import written_text

ERROR = "error"
WARNING = "warning"
FLAT = "flat"
"""The format of a folder of images without class folders, which no loader accepts."""


@dataclass(frozen=True)
class Kind:
    """A kind of finding: its severity, its meaning and the remedy."""

    severity: str
    """`ERROR`: the data cannot or must not be used as it is. `WARNING`: it can be used, but perhaps
    should not."""
    of_image: bool
    """Whether it is about one image, or about bytes where an image should be. Such errors are
    written to the quarantine."""
    meaning: str
    remedy: str


_FETCH = "Fetch the file again, or leave the image out with the quarantine"
_LEAVE_OUT = "Leave it out with the quarantine"
_PACK = "lockstep data pack"
KINDS = {
    # The layout.
    "flat": Kind(ERROR, False, "images without class folders", "Sort them into classes: lockstep data sort-val"),
    "empty-class": Kind(ERROR, False, "a class folder without images", "Put its images back, or remove the folder"),
    "nested-folder": Kind(ERROR, False, "a folder inside a class folder", "Move its images to <class>/<image>"),
    "no-images": Kind(ERROR, False, "no image that can be used", "Put the images there, or remove it"),
    "two-formats": Kind(ERROR, False, "images in two formats in one folder", "Put each format in a separate folder"),
    "unfinished": Kind(ERROR, False, f"{_PACK} is writing, or was interrupted", "Run the same command again"),
    "missing-shard": Kind(ERROR, False, "a numbered file is missing", "Put it back"),
    "compressed": Kind(ERROR, False, "a tar whose images cannot be read by offset", "Unpack it, for example with gunzip"),
    "unreadable-file": Kind(ERROR, False, "a file or folder that cannot be read", "Check its permissions and the disk"),
    "refused": Kind(ERROR, False, "loaders refuse the images", "Do what the message says"),
    "bad-quarantine": Kind(ERROR, False, f"a {QUARANTINE} that is not a list of images", "Correct or remove it"),
    "idx": Kind(ERROR, False, "an .idx that does not match its .rec", f"Write both again: {_PACK}"),
    "lst": Kind(WARNING, False, "a .lst with more or fewer lines than images", f"Write both again: {_PACK}"),
    "unequal-shards": Kind(
        WARNING, False, "NVIDIA's reader counts images wrong: it assumes that every file is as long as the first",
        f"Write the files again: {_PACK}",
    ),
    "image-count": Kind(WARNING, False, "more or fewer images than ImageNet has", "Look for missing or added images"),
    # The labels.
    "labels-from-1": Kind(ERROR, False, "the first class is 1 instead of 0", f"Write them again: {_PACK} --first-label 1"),
    "too-many-classes": Kind(
        ERROR, False, f"more classes than the model has outputs or {CLASSES} has lines",
        f"Train with --set logits=N, complete {CLASSES}, or remove what is not a class (such as a background)",
    ),
    "mixed-labels": Kind(
        ERROR, False, "some images have a number as their class, others a folder", f"Write them again: {_PACK}",
    ),
    "unknown-classes": Kind(ERROR, False, "val has classes that train lacks", "Use train and val of the same data set"),
    "classes-without-val": Kind(
        WARNING, False, "train has classes that val lacks", "Use train and val of the same data set",
    ),
    "label-out-of-range": Kind(ERROR, True, "a label that is not a class", f"Correct it, or {_LEAVE_OUT.lower()}"),
    # The images.
    "bad-record": Kind(ERROR, True, "bytes of a file that hold no usable image", _FETCH),
    "unreadable": Kind(ERROR, True, "an image file that cannot be read", "Check its link, its permissions and the disk"),
    "empty": Kind(ERROR, True, "an image of 0 bytes", _FETCH),
    "truncated": Kind(ERROR, True, "the end of the image is missing", _FETCH),
    "damaged": Kind(ERROR, True, "an image that cannot be decoded", _FETCH),
    "not-an-image": Kind(ERROR, True, "not an image in a known format", "Remove it, or leave it out with the quarantine"),
    "too-large": Kind(ERROR, True, "more bytes or pixels than an image may have", f"Reduce it, or {_LEAVE_OUT.lower()}"),
    "duplicate-other-label": Kind(ERROR, True, "the same bytes as an image of another class", _LEAVE_OUT),
    "in-train-and-val": Kind(ERROR, True, "a training image that is also in val", _LEAVE_OUT),
    "duplicate": Kind(WARNING, True, "the same bytes as another image of its class", "Keep one of them"),
    "cmyk": Kind(WARNING, True, "a CMYK image, which libraries convert to different colours", "Convert it to RGB"),
    "another-format": Kind(WARNING, True, "a format that differs from the ending of the name", "Rename or convert it"),
    "rotated": Kind(
        WARNING, True, "an EXIF orientation, which only recipes with exif_orientation apply, such as my-images",
        "Turn the stored pixels, or train with exif_orientation=true",
    ),
    "tiny": Kind(WARNING, True, "a short side that will be enlarged many times", "Check whether it is a thumbnail"),
}  # fmt: skip
"""All kinds of findings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that was found."""

    kind: str
    """One of `KINDS`."""
    split: str
    """ "train" or "val"; empty where one folder was examined."""
    place: str
    """The place as `Index.place` writes it: `class/image`, or `file@first byte`. If the problem is
    not about one image, a file or folder relative to the root of the split; "." is all of the
    split."""
    name: str
    """The name of the image, if its format stores one."""
    detail: str
    """What was found. For a copy, this is the place of the first image with these bytes."""

    @property
    def severity(self) -> str:
        """`ERROR` or `WARNING`."""
        return KINDS[self.kind].severity


@dataclass(frozen=True)
class Split:
    """A split that was examined."""

    name: str
    """The name, as in `Finding.split`."""
    format: str
    """One of `FORMATS`, `FLAT`, or empty if nothing could be examined."""
    root: Path
    images: int
    """The number of images, bad ones included, without those that the quarantine already left out.
    """
    classes: int
    total_bytes: int
    """The bytes of all images that could be read."""
    left_out: int
    """The number of images that an existing quarantine left out."""


@dataclass(frozen=True)
class Report:
    """What `examine` found."""

    data: Path
    splits: tuple[Split, ...]
    findings: tuple[Finding, ...]
    """By split: first those that are not about one image, then those of images. The same data gives
    the same order."""

    def count_kinds(self) -> dict[str, int]:
        """Return the number of findings by kind, for the kinds that were found, in the order of
        `KINDS`."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    def describe(self) -> dict[str, object]:
        """Return the report as plain values; bytes of names that are not UTF-8 are replaced."""
        return {
            "data": printable(str(self.data)),
            "splits": [
                {
                    "name": split.name,
                    "format": split.format,
                    "root": printable(str(split.root)),
                    "images": split.images,
                    "classes": split.classes,
                    "bytes": split.total_bytes,
                    "left_out": split.left_out,
                }
                for split in self.splits
            ],
            "kinds": {
                kind: {
                    "count": count,
                    "severity": KINDS[kind].severity,
                    "meaning": KINDS[kind].meaning,
                    "remedy": KINDS[kind].remedy,
                }
                for kind, count in self.count_kinds().items()
            },
            "findings": [
                {
                    "kind": finding.kind,
                    "severity": finding.severity,
                    "split": finding.split,
                    "place": printable(finding.place),
                    "name": printable(finding.name),
                    "detail": printable(finding.detail),
                }
                for finding in self.findings
            ],
        }

    def write_quarantine(self) -> list[Path]:
        """Add every image with an error to the quarantine next to the images; return the files
        written.

        `open_index` then leaves these images out. Nothing is written for images without class
        folders, because their places change when they are sorted. Raises `DataError` if the
        existing file is not a quarantine, `OSError` if it cannot be written.
        """
        roots = {split.name: split.root for split in self.splits if split.format != FLAT}
        reasons: dict[Path, dict[str, list[str]]] = {}
        for finding in self.findings:
            if (
                finding.severity == ERROR
                and KINDS[finding.kind].of_image
                and finding.split in roots
            ):
                of_root = reasons.setdefault(roots[finding.split], {})
                of_root.setdefault(finding.place, []).append(f"{finding.kind}: {finding.detail}")
        return [
            _write_quarantine(root, {place: "; ".join(why) for place, why in of.items()})
            for root, of in reasons.items()
        ]


def _write_quarantine(root: Path, images: dict[str, str]) -> Path:
    listed = read_quarantine(Source(FOLDER, root)) | images
    with written_text(root / QUARANTINE) as file:
        json.dump({"images": listed}, file, indent=1, allow_nan=False)
    return root / QUARANTINE
