"""Open tables: Parquet, and the Arrow files that `datasets` writes by `save_to_disk`."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.forms import Form, group_by_split, is_usual, name_split
from lockstep.data.packing.tables import Table
from lockstep.data.sources import check_complete, shorten_list
from lockstep.system.errors import BackendError, DataError
from lockstep.system.regular_files import ANY_SIZE, TEXT, check_regular, read_regular
from lockstep.system.strict_json import parsed

INSTALL = "pip install pyarrow==26.0.1"
_TEXT = r"(?:dictionary<values=)?(?:large_)?string"
_KINDS = {
    "text": _TEXT,
    "image": r"struct<.*\bbytes: |(?:large_)?binary",
    "label": rf"{_TEXT}|(?:dictionary<values=)?(?:u?int|float|double|halffloat)",
    "array": r"(?:large_|fixed_size_)?list<|extension<",
}
"""How the types of columns begin in Arrow's words."""
_ROWS = {True: 2**12, False: 32}
"""How many rows are read at a time: of columns of labels, and with images."""
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_FILE_BEGIN = b"ARROW1"


def open_tables(form: Form, images: Path | None) -> Iterator[tuple[str, Table]]:
    """Yield the tables of a data set with their splits.

    Of files next to a list of `save_to_disk`, only those in it count: older ones may lie there.
    """
    files = form.files
    own = ""
    if form.path.is_dir():
        for folder in dict.fromkeys(path.parent for path in form.files):
            state = _read_json(folder / "state.json")
            saved = [item["filename"] for item in state.get("_data_files", ())]
            beside = [path.name for path in files if path.parent == folder]
            absent = sorted({*saved} - {*beside})
            if absent:
                raise DataError(f"{folder} lacks {shorten_list(absent, 3)}. Put them back")
            check_complete(folder, tuple(saved or beside))
            old = [folder / name for name in beside if saved and name not in saved]
            files = tuple(path for path in files if path not in old)
            own = name_split(str(state.get("_split"))) or ""
    for split, paths in group_by_split(form._replace(files=files)).items():
        for path in paths:
            yield split or own, _open_table(path)


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError, ValueError):
        value = parsed(read_regular(path, TEXT))
        return value if isinstance(value, dict) else {}
    return {}


def _open_table(path: Path) -> Table:
    with _open(path) as (schema, _):
        features = _find_features(path, schema)
        images = []
        labels = []
        paths = []
        classes = {}
        for field in schema:
            if _is("text", field):
                paths.append(field.name)
            if _is("image", field) or (
                is_usual("image", field.name) and (_is("text", field) or _is("array", field))
            ):
                images.append(field.name)
            elif _is("label", field):
                labels.append(field.name)
            names = features.get(field.name, {}).get("names")
            if names and field.name in labels and not _is("text", field):
                classes[field.name] = list(map(str, names))
    real = [name for name in images if name not in paths]
    return Table(path, schema.names, real or images, labels, paths, classes, partial(_read, path))


def _find_features(path: Path, schema: Any) -> dict[str, dict[str, Any]]:
    """Return the kinds of columns as `datasets` notes them; empty if it wrote none."""
    features: Any = None
    with suppress(ValueError, KeyError, TypeError):
        features = parsed((schema.metadata or {})[b"huggingface"])["info"]["features"]
    if features is None:
        features = _read_json(path.with_name("dataset_info.json")).get("features")
    if not isinstance(features, dict):
        return {}
    return {name: kind for name, kind in features.items() if isinstance(kind, dict)}


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise BackendError(f"Parquet and Arrow need the package pyarrow: {INSTALL}") from None
    return pyarrow


def _is(kind: str, field: Any) -> bool:
    return re.match(_KINDS[kind], str(field.type)) is not None


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the schema of a table, and what reads its parts. Raises `DataError` if it is damaged:
    also a stream that ends between two parts, which would look like a shorter one."""
    arrow = _import_pyarrow()
    try:
        check_regular(path, ANY_SIZE)
        # Otherwise a whole row group would be in memory, which may be the whole file.
        with arrow.memory_map(os.fspath(path)) as file:
            begin = file.read(len(_FILE_BEGIN))
            if path.suffix.lower() == ".parquet":
                table = arrow.parquet.ParquetFile(file, page_checksum_verification=True)
                yield table.schema_arrow, table
            elif begin == _FILE_BEGIN:
                table = arrow.ipc.open_file(file)
                yield table.schema, map(table.get_batch, range(table.num_record_batches))
            else:
                file.seek(-min(len(_STREAM_END), file.seek(0, 2)), 2)
                if file.read() != _STREAM_END:
                    raise EOFError("it ends too early")
                file.seek(0)
                table = arrow.ipc.open_stream(file)
                yield table.schema, iter(table)
    except (arrow.ArrowException, OSError, EOFError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{path} is damaged or incomplete: {reason}. Download or write it again"
        ) from None


def _read(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each row, and its values of some columns."""
    number = 0
    with _open(path) as (schema, parts):
        if path.suffix.lower() == ".parquet":
            are_small = not any(_is("image", schema.field(name)) for name in names)
            parts = parts.iter_batches(_ROWS[are_small], columns=list(names), use_threads=False)
        for part in parts:
            for first in range(0, part.num_rows, _ROWS[False]):
                some = part.slice(first, _ROWS[False]).select(list(names))
                some.validate(full=True)  # an offset may lead out of the memory
                for row in some.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
