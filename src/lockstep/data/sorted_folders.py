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
    flat = sorted(path.name for path in folder.iterdir() if path.is_file() and _is_image(path))
    sorted_before = {path.name for path in folder.glob("*/*") if _is_image(path)}
    classes = _read_classes(labels, sorted([*flat, *sorted_before]))
    unknown = [name for name in flat if name not in classes]
    if unknown:
        raise DataError(
            f"{labels} has no class for {len(unknown)} of {len(flat)} images; the first one is"
            f" {unknown[0]}"
        )
    for name in flat:
        target = folder / classes[name] / name
        if target.exists():
            raise DataError(f"{target} exists already; remove it or {folder / name}")
    for name in flat:
        target = folder / classes[name]
        target.mkdir(exist_ok=True)
        (folder / name).rename(target / name)
    return len(flat)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _IMAGES


def _read_classes(labels: Path, names: list[str]) -> dict[str, str]:
    try:
        text = read_regular_text(labels, RECORDS, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{labels} cannot be read: {error}") from None
    lines = filter(None, map(str.strip, text.splitlines()))
    rows = [re.split(r"[,\s]+", line) for line in lines]
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
        classes = dict(zip(names, (row[0] for row in rows), strict=True))
    else:
        classes = _match_names(labels, rows, names)
    # Numbers get leading zeros, so that the folders sort like the numbers.
    width = max(map(len, classes.values()))
    for name, label in classes.items():
        if "/" in label or label.startswith("."):
            raise DataError(
                f"{labels}: {label!r} is not a class name; expected one without '/' that does not"
                " start with '.'"
            )
        if label.isdigit():
            classes[name] = label.zfill(width)
    return classes


def _match_names(labels: Path, rows: list[list[str]], names: list[str]) -> dict[str, str]:
    """Return the classes by the names of files; a name in the list may lack its ending."""
    known = set(names)
    by_stem = {PurePosixPath(name).stem: name for name in names}
    classes = {}
    for row in rows:
        if len(row) < 2:
            raise DataError(
                f"{labels}: {row[0]!r} has no class; expected a file's name and its class"
            )
        path = PurePosixPath(row[0])
        name = path.name if path.name in known else by_stem.get(path.stem, path.name)
        classes[name] = row[1]
    return classes
