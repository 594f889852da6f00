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


def open_lists(form: Form, images: Path | None) -> Iterator[tuple[str, Table]]:
    """Yield the lists of a data set with their splits. `images` is the folder of the images."""
    for split, paths in group_by_split(form).items():
        for path in paths:
            folder = images or path.parent
            if not folder.is_dir():
                raise DataError(f"there is no folder {folder}")
            if "ground_truth" in path.name:
                from lockstep.data.packing.devkit import read_ground_truth

                rows = partial(read_ground_truth, path, folder)
            else:
                rows = partial(_read_list, path)
            _, first = next(rows(()), ("", {}))
            if not first:
                raise DataError(f"{path} has no rows; expected a path and a label in each")
            names = list(first)
            paths_first = [name for name in names if is_usual("image", name)] or names
            yield split, Table(path, names, paths_first, names, names, {}, rows)


def _read_list(path: Path, names: Sequence[str]) -> Rows:
    """Yield the place and the cells of each line of a list, of columns `names` or all."""
    parse = _parse_json_lines if path.suffix.lower() in (".jsonl", ".ndjson") else _parse_csv
    try:
        with (
            open_regular(path, RECORDS) as file,
            io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
        ):
            for line, row in parse(path, text):
                place = f"{path}, line {line}"
                if not set(names) <= row.keys():
                    absent = sorted(set(names) - row.keys())
                    raise DataError(f"{place} lacks {shorten_list(absent, 5)}")
                if _PREDICTION in row:
                    row = row | {_PREDICTION: row[_PREDICTION].partition(" ")[0]}
                yield place, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a list of lines in UTF-8: {error}") from None


def _parse_json_lines(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            try:
                row = parsed(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is not an object of JSON")
            yield number, row


def _parse_csv(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, dict[str, str]]]:
    head = text.readline(_HEAD_CHARACTERS)
    delimiter = next((mark for mark in "\t;, " if mark in head), ",")
    if path.suffix.lower() == ".csv" and "," in head:
        delimiter = ","
    text.seek(0)
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
    names: Sequence[str] = ()
    for cells in reader:
        if not any(cells):
            continue
        if not names:
            names = cells
            if len(set(names)) < len(names):
                raise DataError(f"{path} names a column twice: {shorten_list(cells, 10)}")
            if any(is_usual(kind, name) for name in names for kind in ("image", "label")):
                continue
            names = ("path", "label", "split")[: len(cells)]
        if len(cells) != len(names):
            raise DataError(
                f"{path}, line {reader.line_num} has {len(cells)} cells; expected {len(names)}"
            )
        yield reader.line_num, dict(zip(names, cells, strict=True))
