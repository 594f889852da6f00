"""Open tables: Parquet, and the Arrow files that `datasets` writes by `save_to_disk`."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.data.forms import Form, group_by_split, name_split
from lockstep.data.packing.tables import Table
from lockstep.data.sources import check_complete
from lockstep.system.errors import BackendError, DataError
from lockstep.system.regular_files import ANY_SIZE, TEXT, check_regular, read_regular
from lockstep.system.strict_json import parsed

_KINDS = {
    "image": r"struct<.*\bbytes: |(?:large_)?binary",
    "array": r"(?:large_|fixed_size_)?list<|extension<",
    "text": r"(?:dictionary<values=)?(?:large_)?string",
    "number": r"(?:dictionary<values=)?(?:u?int|float|double|halffloat)",
}
"""How the types of columns begin in Arrow's words."""
_MOST_ROWS = {True: 2**12, False: 32}
"""How many rows are read at a time: of texts and numbers, and with images."""
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_FILE_BEGIN = b"ARROW1"


def open_tables(form: Form, images: Path | None) -> Iterator[Table]:
    """Yield the tables of a data set.

    Of files next to a list of `save_to_disk`, only those in it count: older ones may lie there.
    """
    files = list(form.files)
    own = ""
    for folder in dict.fromkeys(path.parent for path in form.files if form.path.is_dir()):
        saved: set[str] = set()
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            state = parsed(read_regular(folder / "state.json", TEXT))
            own = name_split(str(state["_split"])) or ""
            saved = {str(item["filename"]) for item in state["_data_files"]}
        beside = {path.name for path in files if path.parent == folder}
        current = beside & saved or beside
        check_complete(folder, tuple(current))
        files = [path for path in files if path.parent != folder or path.name in current]
    for split, paths in group_by_split(form._replace(files=tuple(files))).items():
        for path in paths:
            yield _open_table(path, split or own)


def _open_table(path: Path, split: str) -> Table:
    with _open(path) as (schema, _):
        kinds = {field.name: _find_kind(field) for field in schema}
        notes = (schema.metadata or {}).get(b"huggingface", b"{}")
    classes = {}
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        for name, feature in parsed(notes)["info"]["features"].items():
            if kinds[name] == "number" and "names" in feature:
                classes[name] = list(map(str, feature["names"]))
    return Table(path, split, kinds, classes, partial(_read, path))


def _find_kind(field: Any) -> str:
    for kind, begin in _KINDS.items():
        if re.match(begin, str(field.type)):
            return kind
    return ""


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise BackendError(
            "Parquet and Arrow need the package pyarrow: pip install pyarrow==26.0.1"
        ) from None
    return pyarrow


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
            f"{path} is damaged or incomplete: {reason.rstrip('.')}. Download or write it again"
        ) from None


def _read(path: Path, names: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each row, and its values of some columns."""
    number = 0
    with _open(path) as (schema, parts):
        kinds = {_find_kind(schema.field(name)) for name in names}
        most = _MOST_ROWS[kinds <= {"text", "number"}]
        if path.suffix.lower() == ".parquet":
            parts = parts.iter_batches(most, columns=list(names), use_threads=False)
        for part in parts:
            for first in range(0, part.num_rows, most):
                some = part.slice(first, most).select(list(names))
                some.validate(full=True)  # an offset may lead out of the memory
                for row in some.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
