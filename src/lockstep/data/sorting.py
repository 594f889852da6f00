"""Sort a flat folder of images into one folder for each class, by the labels in a file."""

import re
from pathlib import Path, PurePosixPath

from lockstep.system.errors import DataError
from lockstep.system.regular_files import RECORDS, read_regular_text

_IMAGES = (".jpg", ".jpeg", ".png")


def sort_into_classes(folder: Path, labels: Path) -> int:
    """Move every image of a folder into a folder of its class, and return how many were moved.

    A line of `labels` is a file's name and its class, separated by spaces, a tab or a comma (more
    columns are ignored). Or it is the class alone, in the order of the sorted names. Nothing is
    moved unless every image has a class. After an interruption, a second call moves the rest.
    Raises `DataError` naming what is missing.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    flat = sorted(
        path.name for path in folder.iterdir() if path.is_file() and path.suffix.lower() in _IMAGES
    )
    sorted_before = {
        path.name: path.parent.name for path in folder.glob("*/*") if path.suffix.lower() in _IMAGES
    }
    class_of = _classes(labels, sorted([*flat, *sorted_before]))
    unknown = [name for name in flat if name not in class_of]
    if unknown:
        raise DataError(
            f"{labels} has no class for {len(unknown)} of {len(flat)} images; the first one is"
            f" {unknown[0]}"
        )
    taken = next((name for name in flat if (folder / class_of[name] / name).exists()), None)
    if taken is not None:
        raise DataError(
            f"{folder / class_of[taken] / taken} exists already; remove it or {folder / taken}"
        )
    for name in flat:
        target = folder / class_of[name]
        target.mkdir(exist_ok=True)
        (folder / name).rename(target / name)
    return len(flat)


def _classes(labels: Path, names: list[str]) -> dict[str, str]:
    try:
        lines = [
            line.strip()
            for line in read_regular_text(labels, RECORDS, encoding="utf-8-sig").splitlines()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{labels} cannot be read: {error}") from None
    rows = [re.split(r"[,\s]+", line) for line in lines if line]
    if rows and rows[0][0] == "ImageId":  # the header of Kaggle's LOC_val_solution.csv
        del rows[0]
    if not rows:
        raise DataError(
            f"{labels} is empty; expected a line for each image: its name and its class"
        )
    if all(len(row) == 1 for row in rows):
        if len(rows) != len(names):
            raise DataError(
                f"{labels} has {len(rows)} classes for {len(names)} images; expected one for each"
            )
        found = dict(zip(names, (row[0] for row in rows), strict=True))
    else:
        short = next((i for i, row in enumerate(rows) if len(row) < 2), None)
        if short is not None:
            raise DataError(
                f"{labels}: {rows[short][0]!r} has no class; expected a file's name and its class"
            )
        by_stem = {PurePosixPath(name).stem: name for name in names}
        listed = ((PurePosixPath(row[0]), row[1]) for row in rows)
        known = set(names)
        found = {
            path.name if path.name in known else by_stem.get(path.stem, path.name): label
            for path, label in listed
        }
    # Numbers get leading zeros, so that the folders sort like the numbers.
    width = max(map(len, found.values()))
    found = {
        name: label.zfill(width) if label.isdigit() else label for name, label in found.items()
    }
    bad = next((label for label in found.values() if "/" in label or label.startswith(".")), None)
    if bad is not None:
        raise DataError(
            f"{labels}: {bad!r} is not a class name; expected one without '/' that does not start"
            " with '.'"
        )
    return found
