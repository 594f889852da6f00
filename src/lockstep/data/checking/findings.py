"""The kinds of problems of a data set, and the report of them."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.data.images import printable
from lockstep.data.index import read_quarantine
from lockstep.data.sources import CLASSES, FOLDER, QUARANTINE, Source
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
    harmless: bool = False
    """Whether a sound data set can have it, so that it does not change the exit code."""


_FETCH = "Fetch the file again, or leave the image out: --quarantine"
_LEAVE_OUT = "Leave it out: --quarantine"
_OR_LIST = f"or add it to {QUARANTINE}"  # --quarantine lists no warnings
_PACK = "lockstep data pack"


_error = partial(Kind, ERROR, False)
_warning = partial(Kind, WARNING, False)
_bad_image = partial(Kind, ERROR, True)
_odd_image = partial(Kind, WARNING, True)

KINDS = {
    # The layout.
    "flat": _error(
        "images without class folders", "Sort them into classes: lockstep data sort-val"
    ),
    "empty-class": _error(
        "a class folder without images", "Put its images back, or remove the folder"
    ),
    "nested-folder": _error("a folder inside a class folder", "Move its images to <class>/<image>"),
    "loose-image": _warning(
        "an image outside the class folders, left out",
        "Move it into a class folder, or out of the data set",
    ),
    "stray-file": _warning(
        "a file that is not an image, left out", "Ignore it, or move it elsewhere", harmless=True
    ),
    "hidden": _warning(
        "a hidden file, left out", "Ignore it, or rename it if it is an image", harmless=True
    ),
    "class-list": _warning(
        f"a {CLASSES} that does not list every class folder; it is ignored, and the class folders"
        " are sorted by name",
        "Correct the list, or remove it",
    ),
    "link": _warning(
        "a link in a tar, left out",
        "Write the tar with: tar --dereference --hard-dereference",
    ),
    "extra-image": _warning(
        "one of several images of a sample, left out",
        "Ignore it, or make it a separate sample",
        harmless=True,
    ),
    "no-end": _warning(
        "a tar without the two blocks of zeros that end it: images may be missing",
        "Compare its size with that of the original, or write it again",
    ),
    "neighbour": _warning(
        "a folder, file or image next to the images that are read, left out",
        "Ignore it if it holds the same images; else move them, or rename the folder train or val;"
        f" {QUARANTINE} belongs next to the class folders",
    ),
    "no-images": _error(
        "no image that can be used", "Add images to this folder or file, or remove it"
    ),
    "two-formats": _error(
        "images in two formats in one folder", "Put each format in a separate folder"
    ),
    "unfinished": _error(f"{_PACK} is writing, or was interrupted", "Run the same command again"),
    "missing-shard": _error("a numbered file is missing", "Put it back"),
    "compressed": _error(
        "a file whose images cannot be read by offset", "Unpack it with the command in the detail"
    ),
    "unreadable-file": _error(
        "a file or folder that cannot be read", "Check its permissions and the disk"
    ),
    "refused": _error("images that cannot be loaded", "Correct what the detail names"),
    "bad-quarantine": _error(
        f"a {QUARANTINE} that is not a list of images", "Correct or remove it"
    ),
    "not-left-out": _warning(
        f"an entry of {QUARANTINE} that matches no image",
        "Ignore it if the image is gone; else write its name as other findings do",
        harmless=True,
    ),
    "idx": _error("an .idx that does not match its .rec", f"Write both again: {_PACK}"),
    "lst": _warning("a .lst with more or fewer lines than images", f"Write both again: {_PACK}"),
    "unequal-shards": _warning(
        "NVIDIA's reader counts images wrong: it assumes that every file is as long as the first",
        f"Write the files again: {_PACK}",
    ),
    "image-count": _warning(
        "more or fewer images than ImageNet has", "Look for missing or added images"
    ),
    "many-blank": _warning(
        "many images that show nothing", "Find the cause, such as a failed download"
    ),
    "not-compared": _warning(
        "too many images to look for near-duplicates", "Compare parts of the data set"
    ),
    # The labels.
    "labels-from-1": _error(
        "the first class is 1 instead of 0", f"Write them again: {_PACK} --first-label 1"
    ),
    "too-many-classes": _error(
        f"more classes than the model has outputs or {CLASSES} has lines",
        f"Train with --set logits=N, complete {CLASSES}, or remove what is not a class (such as a"
        " background)",
    ),
    "mixed-labels": _error(
        "some images have a number as their class, others a folder", f"Write them again: {_PACK}"
    ),
    "unknown-classes": _error(
        "val has classes that train lacks", "Use train and val of the same data set"
    ),
    "classes-without-val": _warning(
        "train has classes that val lacks", "Use train and val of the same data set"
    ),
    "missing-label": _bad_image(
        "an image without a label", f"Write its class into .cls, or {_LEAVE_OUT.lower()}"
    ),
    "label-out-of-range": _bad_image(
        "a label that is not a class", f"Correct it, or {_LEAVE_OUT.lower()}"
    ),
    # The images.
    "bad-record": _bad_image("bytes of a file that hold no usable image", _FETCH),
    "unreadable": _bad_image(
        "an image file that cannot be read", "Check its link, its permissions and the disk"
    ),
    "empty": _bad_image("an image of 0 bytes", _FETCH),
    "truncated": _bad_image("the end of the image is missing", _FETCH),
    "damaged": _bad_image("an image that cannot be decoded", _FETCH),
    "needs-plug-in": _error(
        "an image in a format that needs a plug-in",
        "Install the plug-in with the command in the detail",
    ),
    "not-an-image": _bad_image(
        "not an image in a known format", f"Convert it to JPEG, remove it, or {_LEAVE_OUT.lower()}"
    ),
    "too-large": _bad_image(
        "more bytes or pixels than an image may have", f"Reduce it, or {_LEAVE_OUT.lower()}"
    ),
    "duplicate-other-label": _error(
        "the same bytes as an image of another class",
        "Look at both, and move or remove the one with the wrong label",
    ),
    "in-train-and-val": _bad_image("a training image that is also in val", _LEAVE_OUT),
    "duplicate": _odd_image("the same bytes as another image of its class", "Keep one of them"),
    "near-duplicate": _odd_image(
        "a training image that repeats a val image: re-encoded, resized or slightly cropped",
        f"Look at both; if they show the same, remove one, {_OR_LIST}",
    ),
    "blank": _odd_image(
        "an image that shows nothing: constant, nearly black or nearly white",
        f"Remove it, {_OR_LIST}",
    ),
    "wrong-checksum": _odd_image(
        "parts of a PNG with a wrong checksum, left out", "Fetch the file again"
    ),
    "cmyk": _odd_image(
        "a CMYK image, which libraries convert to different colours", "Convert it to RGB"
    ),
    "another-format": _odd_image(
        "a format that differs from the ending of the name", "Rename or convert it"
    ),
    "rotated": _odd_image(
        "an EXIF orientation, which only recipes with exif_orientation apply, such as my-images",
        "Turn the stored pixels, or train with exif_orientation=true",
    ),
    "tiny": _odd_image(
        "an image whose shorter side must be enlarged many times", "Check whether it is a thumbnail"
    ),
}
"""All kinds of findings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that was found."""

    kind: str
    """One of `KINDS`."""
    split: str
    """"train" or "val"; empty where one folder was examined."""
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

    def describe(self) -> dict[str, str]:
        """Return the finding as plain values."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "split": self.split,
            "place": printable(self.place),
            "name": printable(self.name),
            "detail": printable(self.detail),
        }


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

    def describe(self) -> dict[str, object]:
        """Return the split as plain values."""
        return {
            "name": self.name,
            "format": self.format,
            "root": printable(str(self.root)),
            "images": self.images,
            "classes": self.classes,
            "bytes": self.total_bytes,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class Report:
    """What `examine` found."""

    data: Path
    splits: tuple[Split, ...]
    findings: tuple[Finding, ...]
    """By split: first those that are not about one image, then those of images. The same data gives
    the same order."""

    def count_kinds(self) -> dict[str, int]:
        """Return the number of findings by kind, for the kinds that there are, in the order of
        `KINDS`."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    def describe(self) -> dict[str, object]:
        """Return the report as plain values; bytes of names that are not UTF-8 are replaced."""
        kinds = {}
        for name, count in self.count_kinds().items():
            kind = KINDS[name]
            kinds[name] = {
                "count": count,
                "severity": kind.severity,
                "meaning": kind.meaning,
                "remedy": kind.remedy,
            }
        return {
            "data": printable(str(self.data)),
            "splits": [split.describe() for split in self.splits],
            "kinds": kinds,
            "findings": [finding.describe() for finding in self.findings],
        }

    def write_quarantine(self) -> list[Path]:
        """Add every image with an error to the quarantine next to the images; return the files
        written.

        `open_index` then leaves these images out. Nothing is written for images without class
        folders, because their places change when they are sorted. Raises `DataError` if the
        existing file is not a quarantine, `OSError` if it cannot be written.
        """
        roots = {split.name: split.root for split in self.splits if split.format != FLAT}
        images: dict[Path, dict[str, str]] = {}
        for finding in self.findings:
            is_unusable = finding.severity == ERROR and KINDS[finding.kind].of_image
            if is_unusable and finding.split in roots:
                reasons = images.setdefault(roots[finding.split], {})
                before = f"{reasons[finding.place]}; " if finding.place in reasons else ""
                reasons[finding.place] = f"{before}{finding.kind}: {finding.detail}"
        return [_write_quarantine(root, reasons) for root, reasons in images.items()]


def _write_quarantine(root: Path, reasons: dict[str, str]) -> Path:
    images = read_quarantine(Source(FOLDER, root)) | reasons
    with written_text(root / QUARANTINE) as file:
        json.dump({"images": images}, file, indent=1, allow_nan=False)
    return root / QUARANTINE
