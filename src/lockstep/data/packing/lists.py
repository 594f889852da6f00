"""Open lists of images: CSV, JSON lines, and those that come with ImageNet's validation images."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.forms import Form, group_by_split, is_usual
from lockstep.data.packing.tables import Table
from lockstep.data.sources import shorten_list
from lockstep.system.errors import DataError
from lockstep.system.regular_files import RECORDS, open_regular
from lockstep.system.strict_json import parsed

Rows = Iterator[tuple[str, Mapping[str, Any]]]
_PREDICTION = "PredictionString"
"""A column of ImageNet's `LOC_val_solution.csv`: a class and the boxes of its objects."""
_HEAD_CHARACTERS = 2**16


def open_lists(form: Form, images: Path | None) -> Iterator[Table]:
    """Yield the lists of a data set. `images` is the folder of the images."""
    for split, paths in group_by_split(form).items():
        for path in paths:
            folder = images or path.parent
            if not folder.is_dir():
                raise DataError(f"there is no folder {folder}")
            rows = partial(_read_list, path)
            if "ground_truth" in path.name:
                from lockstep.data.packing.devkit import read_ground_truth, read_kit_classes

                classes = read_kit_classes(path.with_name("meta.mat"))
                rows = partial(read_ground_truth, path, folder, classes)
            _, first = next(rows(()), ("", {}))
            if not first:
                raise DataError(f"{path} has no rows; expected a path and a label in each")
            yield Table(path, split, dict.fromkeys(first, "cell"), {}, rows)


def _read_list(path: Path, names: Sequence[str]) -> Rows:
    """Yield the place and the cells of each line of a list. All columns are read, for any names."""
    parse = _parse_json_lines if path.suffix.lower() in (".jsonl", ".ndjson") else _parse_csv
    line = 0
    try:
        with (
            open_regular(path, RECORDS) as file,
            io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
        ):
            for line, row in parse(text, path.suffix.lower()):
                if _PREDICTION in row:
                    row[_PREDICTION] = str(row[_PREDICTION]).partition(" ")[0]
                yield f"{path}, line {line}", row
    except (ValueError, csv.Error) as error:
        raise DataError(
            f"{path} is not a list of paths and labels in UTF-8, after line {line}: {error}"
        ) from None


def _parse_json_lines(text: io.TextIOWrapper, ending: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            row = parsed(line)
            if not isinstance(row, dict):
                raise ValueError("expected an object of JSON in each line")
            yield number, row


def _parse_csv(text: io.TextIOWrapper, ending: str) -> Iterator[tuple[int, dict[str, Any]]]:
    head = text.readline(_HEAD_CHARACTERS)
    marks = {".csv": ",\t; "}.get(ending, "\t;, ")
    text.seek(0)
    delimiter = next((mark for mark in marks if mark in head), ",")
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    names: Sequence[str] = ()
    for cells in filter(any, reader):
        if not names:
            names = cells
            if len(set(names)) < len(names):
                raise ValueError(f"a column is named twice: {shorten_list(cells, 10)}")
            if any(is_usual(kind, name) for name in names for kind in ("image", "label")):
                continue
            names = ("path", "label", "split")[: len(cells)]
        if len(cells) != len(names):
            raise ValueError(
                f"line {reader.line_num} has {len(cells)} cells; expected {len(names)}"
            )
        yield reader.line_num, dict(zip(names, cells, strict=True))
