"""Pack samples of a Python program: arrays, Pillow images, encoded bytes or paths."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.images import Quarantined
from lockstep.data.packing.stream import Row, number_label, read_label, write_rows
from lockstep.data.packing.tables import read_split
from lockstep.data.packing.target import explain_full_disk, lock_target
from lockstep.data.sources import CACHE, FINISHED, UNFINISHED
from lockstep.system.errors import DataError, UserError


def pack(
    samples: Iterable[Any], out: str | os.PathLike[str], *, classes: Sequence[str] | None = None
) -> dict[str, int]:
    """Write images from your program as a data set for `train` and `evaluate`.

    Memory does not grow with the number of samples. After an interruption, call it again; it
    begins from the start.

    Args:
        samples: An iterable, or a data set with a length and items, of `(image, label)` or
            `(image, label, split)`. The split is "train", "val" or "test". An image is a path or
            encoded bytes, stored unchanged, or a Pillow image or a uint8 array
            ([height, width, 3] or [height, width]), stored as PNG without loss (CMYK,
            YCbCr, LAB and I as TIFF).
        out: The folder to write; it must be empty or not exist.
        classes: Names of the classes; a label that is a number is an index into them. By default
            the attribute `classes` of `samples`, or names in the order of their first samples.

    Returns:
        The number of images in each split.

    Raises:
        UserError: A sample is not as described, or the folder holds something else.

    >>> import lockstep, numpy
    >>> grey = numpy.full((64, 64), 128, numpy.uint8)
    >>> lockstep.pack([(grey, "cat", "train"), (grey, "dog", "val")], "packed")
    {'train': 1, 'val': 1}
    """
    if isinstance(samples, str | os.PathLike):
        raise UserError(
            "samples is a path; expected an iterable of (image, label). Pack files and folders with"
            " the command: lockstep data pack SOURCE OUT"
        )
    if hasattr(samples, "batch_sampler"):
        raise UserError(
            "samples is a loader of batches; expected single samples. Pack its data set:"
            " lockstep.pack(loader.dataset, ...)"
        )
    if classes is None:  # torch's Subset has it in `dataset`
        classes = getattr(getattr(samples, "dataset", samples), "classes", None)
    if not isinstance(classes, Sequence | None) or isinstance(classes, str):
        raise UserError(
            f"classes is of type {type(classes).__name__}; expected names in their order, such as"
            ' ["cat", "dog"]'
        )
    names = list(map(str, classes or ()))
    positions = {name: i for i, name in enumerate(names)}
    if len(positions) < len(names):
        raise UserError("classes lists a name twice; expected a different name for each class")
    target = Path(out)
    if (target / CACHE / "pack.json").exists() and not (target / UNFINISHED).exists():
        raise DataError(f"{target} holds a data set already; choose an empty folder")
    rows = _read_rows(samples, names, positions, grows=classes is None)
    states = np.zeros((0, 2), np.int64)
    with explain_full_disk(target), lock_target(target, "samples of a program", states):
        for pattern in ("*.tar*", "test/*.tar*", f"{CACHE}/*.faults", str(FINISHED)):
            for path in target.glob(pattern):
                path.unlink()
        return write_rows(rows, target, names, lambda count: None, _refuse)


def _read_rows(
    samples: Any, names: list[str], positions: dict[str, int], *, grows: bool
) -> Iterator[Row]:
    """Yield rows. If the list of classes grows, names are added to it."""
    if not hasattr(samples, "__iter__") and hasattr(samples, "__len__"):
        samples = map(samples.__getitem__, range(len(samples)))
    lengths = set()
    for number, sample in enumerate(samples):
        place = f"sample {number}"
        if not isinstance(sample, tuple | list) or len(sample) not in (2, 3):
            raise UserError(
                f"{place} is of type {type(sample).__name__}; expected (image, label) or (image,"
                " label, split). If rows are dictionaries, pass:"
                ' ((row["image"], row["label"]) for row in data)'
            )
        lengths.add(len(sample))
        if len(lengths) > 1:
            raise UserError(f"{place}: some samples have a split; expected all or none")
        split = read_split(sample[2], place) if len(sample) == 3 else ""
        try:
            label = read_label(sample[1])
            if grows and isinstance(label, int):
                raise ValueError(f"the label is the number {label}; name the classes: classes=[..]")
            if grows and label not in positions:
                positions[str(label)] = len(names)
                names.append(str(label))
            yield Row(split, number_label(label, positions), sample[0], place)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None


def _refuse(split: str, bad: Quarantined) -> None:
    raise UserError(f"{bad.file} cannot be used: {bad.reason}. Convert it, or leave it out")
