"""What can be wrong with a data set, and the report of it."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.containers import atomically
from lockstep.data.index import QUARANTINE, quarantine_of
from lockstep.data.listing import CLASSES, printable
from lockstep.data.sources import FOLDER, Source

ERROR, WARNING = "error", "warning"
FLAT = "flat"
"""The format of a folder of images without class folders, which no loader takes."""


@dataclass(frozen=True)
class Kind:
    """What a sort of finding means."""

    severity: str
    """`ERROR`: it cannot or must not be used as it is. `WARNING`: it can, and perhaps should not."""
    of_image: bool
    """Whether it concerns a single image, or the bytes where one should be; an error of this sort goes to the quarantine."""
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
    "two-formats": Kind(ERROR, False, "images in two formats in one folder", "Give each format a folder of its own"),
    "unfinished": Kind(ERROR, False, f"{_PACK} is writing, or was interrupted", "Give the same command again"),
    "missing-shard": Kind(ERROR, False, "a numbered file is missing", "Put it back"),
    "compressed": Kind(ERROR, False, "a tar in which nothing can be read by place", "Unpack it, say with gunzip"),
    "unreadable-file": Kind(ERROR, False, "a file or folder that cannot be read", "See to its permissions and disk"),
    "refused": Kind(ERROR, False, "loaders refuse the images", "Do as the message says"),
    "bad-quarantine": Kind(ERROR, False, f"a {QUARANTINE} that is no list of images", "Correct or remove it"),
    "idx": Kind(ERROR, False, "an .idx that does not match its .rec", f"Write both anew: {_PACK}"),
    "lst": Kind(WARNING, False, "a .lst with another number of lines than images", f"Write both anew: {_PACK}"),
    "unequal-shards": Kind(
        WARNING, False, "NVIDIA's reader counts images wrong: it takes every file to be as long as the first",
        f"Write the files anew: {_PACK}",
    ),
    "image-count": Kind(WARNING, False, "not as many images as ImageNet has", "Look for what is missing or was added"),
    # The labels.
    "labels-from-1": Kind(ERROR, False, "the first class is 1 instead of 0", f"Write them anew: {_PACK} --first-label 1"),
    "too-many-classes": Kind(
        ERROR, False, f"more classes than the model has outputs or {CLASSES} has lines",
        f"Train with --set logits=N, complete {CLASSES}, or remove what is no class (such as a background)",
    ),
    "mixed-labels": Kind(ERROR, False, "numbers as classes of some images, folders of others", f"Write them anew: {_PACK}"),
    "unknown-classes": Kind(ERROR, False, "val has classes that train lacks", "Take train and val from one data set"),
    "classes-without-val": Kind(WARNING, False, "train has classes that val lacks", "Take train and val from one data set"),
    "label-out-of-range": Kind(ERROR, True, "a label that is no class", f"Correct it, or: {_LEAVE_OUT.lower()}"),
    # The images.
    "bad-record": Kind(ERROR, True, "bytes of a file that hold no usable image", _FETCH),
    "unreadable": Kind(ERROR, True, "an image file that cannot be read", "See to its link, permissions and disk"),
    "empty": Kind(ERROR, True, "no bytes", _FETCH),
    "truncated": Kind(ERROR, True, "the end of the image is missing", _FETCH),
    "damaged": Kind(ERROR, True, "an image that cannot be decoded", _FETCH),
    "not-an-image": Kind(ERROR, True, "no image in a known format", "Remove it, or leave it out with the quarantine"),
    "too-large": Kind(ERROR, True, "more bytes or pixels than an image may have", f"Reduce it, or: {_LEAVE_OUT.lower()}"),
    "duplicate-other-label": Kind(ERROR, True, "the same bytes as an image of another class", _LEAVE_OUT),
    "in-train-and-val": Kind(ERROR, True, "a training image that is in val too", _LEAVE_OUT),
    "duplicate": Kind(WARNING, True, "the same bytes as another image of its class", "Keep one of them"),
    "cmyk": Kind(WARNING, True, "CMYK, which libraries convert to different colours", "Convert it to RGB"),
    "another-format": Kind(WARNING, True, "another format than the name says", "Rename or convert it"),
    "rotated": Kind(
        WARNING, True, "an EXIF orientation, which is not applied: the image is used as it is stored",
        "Rotate the stored pixels",
    ),
    "tiny": Kind(WARNING, True, "a short side that will be enlarged many times", "Look whether it is a thumbnail"),
}  # fmt: skip
"""Every sort of finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong."""

    kind: str
    """One of `KINDS`."""
    split: str
    """ "train" or "val"; empty where one folder was examined."""
    place: str
    """As `Index.place` spells it: `class/image`, or `file@first byte`. Of what concerns no single image a file or folder
    relative to the root of the split; "." is all of it."""
    name: str
    """The image's name, if its format keeps one."""
    detail: str
    """What was found; of a copy the place of the first one."""

    @property
    def severity(self) -> str:
        """`ERROR` or `WARNING`."""
        return KINDS[self.kind].severity


@dataclass(frozen=True)
class Split:
    """What was examined."""

    name: str
    """As in `Finding.split`."""
    format: str
    """One of `FORMATS`, `FLAT`, or empty if nothing could be examined."""
    root: Path
    images: int
    """Those that the quarantine does not leave out already; bad ones are counted."""
    classes: int
    total_bytes: int
    """Of all images that could be read."""
    left_out: int
    """By a quarantine that was there before."""


@dataclass(frozen=True)
class Report:
    """What `examine` found."""

    data: Path
    splits: tuple[Split, ...]
    findings: tuple[Finding, ...]
    """By split; of each what concerns no single image first, then by image. The same for the same data."""

    def by_kind(self) -> dict[str, int]:
        """Return how often every kind was found that was, in the order of `KINDS`."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    def as_json(self) -> dict[str, object]:
        """Return the report as plain values; what is not UTF-8 in a name is replaced."""
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
                for kind, count in self.by_kind().items()
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
        """List every image with an error in the quarantine beside it, behind what stands there; return the files written.

        `open_index` leaves them out from then on. Images without class folders get none: they have another place once they
        are sorted. Raises `DataError` if what stands there is no quarantine, `OSError` if it cannot be written.
        """
        roots = {split.name: split.root for split in self.splits if split.format != FLAT}
        reasons: dict[Path, dict[str, list[str]]] = {}
        for finding in self.findings:
            if finding.severity == ERROR and KINDS[finding.kind].of_image and finding.split in roots:
                of_root = reasons.setdefault(roots[finding.split], {})
                of_root.setdefault(finding.place, []).append(f"{finding.kind}: {finding.detail}")
        return [
            _write_quarantine(root, {place: "; ".join(why) for place, why in of.items()}) for root, of in reasons.items()
        ]


def _write_quarantine(root: Path, images: dict[str, str]) -> Path:
    listed = quarantine_of(Source(FOLDER, root)) | images
    with atomically(root / QUARANTINE) as file:
        json.dump({"images": listed}, file, indent=1, allow_nan=False)
    return root / QUARANTINE
