"""PyTorch's files (`torch.save`: `.pth`, `.pt`, `.bin`), read and written without PyTorch. None of
their code is run.

There are two containers:

- A zip archive, since PyTorch 1.6. Its members are `<root>/data.pkl`, a pickle, and
  `<root>/data/<key>`, the bytes of a storage. `<root>/byteorder` is "little" or "big". Members are
  stored, never compressed.
- Before: five pickles one after the other (a magic number, the protocol's version, facts about the
  system, the object, the keys of the storages), then for each storage the number of its numbers,
  int64, and the numbers, little-endian.

`torch_pickle` says what the pickles may ask for. Nothing is extracted to the disk, and a file takes
at most a multiple of its size in memory.

Sources: PyTorch's serialization.py and caffe2/serialize/inline_container.h; APPNOTE.TXT of zip,
4.3.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import WEIGHTS, open_regular, read_regular
from lockstep.weights.formats import DAMAGE
from lockstep.weights.formats.lfs_pointers import refuse_stand_in
from lockstep.weights.formats.pickles import NUMPY, Rules, interpret, naming_refusal
from lockstep.weights.formats.torch_pickle import STORAGES, Kind, rules

Without = Callable[[Any], Collection[Any]]
"""Returns keys of a dict whose arrays are not needed."""

_ZIP = b"PK\x03\x04"
_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The older container begins with the pickle of its magic number, which ends in these bytes at
every protocol."""
_BEGIN = 24
"""This pickle has at most this many bytes: 15, and 24 since protocol 4."""
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_MOST_MEMBERS = 100_000
"""A ResNet-152 with velocities and averages has about 3,000."""
_ALIGNMENT = 64
"""PyTorch begins every storage at a multiple of this many bytes, so that it can be mapped into
memory."""
_ROOT = "archive"
_OF_PROGRAMS = {
    "constants.pkl": "TorchScript, torch.jit.save",
    "archive_format": "torch.export.save",
    "serialized_exported_program.json": "torch.export.save",
}
"""What wrote a program, by a member that only its archives have. The last one is of older versions
of PyTorch."""
_STORAGES = {kind: name for name, kind in STORAGES.items()}


def is_torch_file(head: bytes, path: Path) -> bool:
    """Return whether a file is in one of the two containers, or a program of PyTorch, which `load`
    refuses."""
    if not head.startswith(_ZIP):
        return head.startswith(b"\x80") and _MAGIC in head[:_BEGIN]
    try:
        with open_regular(path, WEIGHTS) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (OSError, *DAMAGE):
        return False
    is_weights = any(_is_at_root(name, "data.pkl") for name in names)
    return is_weights or _find_writer(names) is not None


def _is_at_root(name: str, member: str) -> bool:
    """Return whether the name of a member is `<root>/<member>`."""
    return name.count("/") == 1 and name.endswith(f"/{member}")


def _find_writer(names: Iterable[str]) -> str | None:
    """Return what wrote the program that an archive with these members holds; None if it holds
    none."""
    for name in names:
        for member, writer in _OF_PROGRAMS.items():
            if name == member or _is_at_root(name, member):
                return writer
    return None


def load(path: Path, *, without: Without | None = None) -> Any:
    """Return what a file holds: dicts, lists, numbers, texts, and arrays.

    `without` returns keys of the value, which is a dict, whose arrays are not needed. It gets the
    value before any numbers are read. Numbers that only those arrays have stay 0, and are not read
    from a zip archive.

    Arrays have the types of the tensors, with `BFLOAT16` for bfloat16. Some are read-only, and some
    share memory. Raises `CheckpointError` if the file is damaged, a program, or asks for anything
    except weights and plain values.
    """
    with naming_refusal(path, "a PyTorch file", "torch.save(model.state_dict(), path)"):
        size = path.stat().st_size
        refuse_stand_in(path)
        with open_regular(path, WEIGHTS) as file:
            if file.read(len(_ZIP)) == _ZIP:
                archive = zipfile.ZipFile(file)
                writer = _find_writer(archive.namelist())
                if writer is not None:
                    raise CheckpointError(
                        f"{path} is a program ({writer}), not weights. None of it was executed."
                        " Expected a dict of tensors; use the weights that it was made from, or"
                        " save them with torch.save(model.state_dict(), path)."
                    )
                return _read_archive(archive, size, without)
        return _read_stream(io.BytesIO(read_regular(path, WEIGHTS)), size)


def _read_archive(archive: zipfile.ZipFile, size: int, without: Without | None) -> Any:
    """Return the object of a zip archive of `size` bytes.

    With `without`, numbers are read after the object is known: until then storages are zeros, which
    take no memory. bool and big endian are read at once, since their tensors are copies, and so are
    bytes, which may be of any type.
    """
    members = _list_members(archive, size)
    roots = [name.removesuffix("data.pkl") for name in members if _is_at_root(name, "data.pkl")]
    if len(roots) != 1:
        raise ValueError("it is a zip archive without a single data.pkl")
    root = roots[0]
    order = b"little"
    if f"{root}byteorder" in members:
        order = archive.read(members[f"{root}byteorder"])
    if order not in (b"little", b"big"):
        raise ValueError(f"its byte order is {order[:20]!r}")
    stored: dict[str, np.ndarray] = {}
    unread: dict[str, zipfile.ZipInfo] = {}

    def find(key: str, kind: Kind, count: int) -> np.ndarray:
        if key not in stored:
            member = members.get(f"{root}data/{key}")
            if member is None:
                raise ValueError(f"the storage {key:.20} is missing")
            if member.file_size != count * kind.itemsize:
                raise ValueError(
                    f"storage {key:.20} has {member.file_size} bytes in place of"
                    f" {count * kind.itemsize}"
                )
            if without is None or order == b"big" or kind in (np.bool_, np.uint8):
                stored[key] = np.frombuffer(archive.read(member), np.uint8)
            else:
                stored[key] = np.zeros(member.file_size, np.uint8)
                unread[key] = member
        return stored[key]

    program = archive.read(members[f"{root}data.pkl"])
    value = interpret(program, rules(size, find, is_big_endian=order == b"big"))
    if without is not None and unread:
        needed = _find_owners(value, without(value))
        for key, member in unread.items():
            if id(stored[key]) in needed:
                stored[key][:] = np.frombuffer(archive.read(member), np.uint8)
    return value


def _find_owners(value: Any, without: Collection[Any]) -> set[int]:
    """Return the identities of the arrays that own the numbers of the arrays in a value, except
    below some of its keys."""
    owners = set[int]()
    visited = set[int]()
    left = [value]
    if isinstance(value, dict):
        left = [part for key, part in value.items() if key not in without]
    while left:
        part = left.pop()
        if isinstance(part, np.ndarray):
            while isinstance(part.base, np.ndarray):
                part = part.base
            owners.add(id(part))
        elif isinstance(part, dict | list | tuple | set) and id(part) not in visited:
            visited.add(id(part))
            left += part.values() if isinstance(part, dict) else part
    return owners


def _list_members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive of `size` bytes by name. Raises `ValueError` if they are not
    PyTorch's."""
    entries = archive.infolist()
    if len(entries) > _MOST_MEMBERS:
        raise ValueError(f"it has {len(entries)} members; expected at most {_MOST_MEMBERS}")
    for entry in entries:
        name = entry.filename
        if name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise ValueError(f"the name of its member {name[:80]!r} leaves the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"its member {name[:80]!r} is compressed, which torch.save never does")
        if entry.flag_bits & 1:
            raise ValueError(f"its member {name[:80]!r} is encrypted")
    # Entries that overlap would read the same bytes again and again.
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError(f"its members have more bytes than its own {size}")
    members = {entry.filename: entry for entry in entries}
    if len(members) != len(entries):
        raise ValueError("two of its members have the same name")
    return members


def _read_stream(stream: io.BytesIO, size: int) -> Any:
    """Return the object of the older container.

    Storages follow the object that uses them. Therefore its pickle is interpreted twice: first only
    for the types of the storages, then with their numbers.
    """
    plain = Rules({})
    # With rules for arrays, so that a pickle of arrays alone is not called malicious.
    first = interpret(stream, Rules(NUMPY))
    if not isinstance(first, int) or first != _MAGIC_NUMBER:
        raise ValueError(
            "it does not begin with PyTorch's magic number, so another program may have written it"
        )
    version = interpret(stream, plain)
    if version != _VERSION:
        raise ValueError(f"its protocol's version is not {_VERSION}")
    interpret(stream, plain)
    begin = stream.tell()
    kinds = dict[str, tuple[Kind, int]]()

    def note(key: str, kind: Kind, count: int) -> np.ndarray:
        if kinds.setdefault(key, (kind, count)) != (kind, count):
            raise ValueError(f"the storage {key:.20} has two types or sizes")
        return np.empty(0, np.uint8)

    interpret(stream, _skip_tensors(rules(size, note)))
    keys = interpret(stream, plain)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("the keys of its storages are not a list of strings")
    if len(set(keys)) != len(keys):
        raise ValueError("one of the keys of its storages occurs twice")
    stored: dict[str, np.ndarray] = {}
    for key in keys:
        if key not in kinds:
            raise ValueError(f"nothing uses its storage {key:.20}")
        kind, count = kinds[key]
        if struct.unpack("<q", stream.read(8)) != (count,):
            raise ValueError(f"the storage {key:.20} does not have {count} numbers")
        numbers = stream.read(count * kind.itemsize)
        if len(numbers) != count * kind.itemsize:
            raise ValueError(f"it ends within the storage {key:.20}")
        stored[key] = np.frombuffer(numbers, np.uint8)
    stream.seek(begin)
    return interpret(stream, rules(size, lambda key, kind, count: stored[key]))


def _skip_tensors(full: Rules) -> Rules:
    """Return rules that only note storages, with the same values for everything else."""

    def note(identifier: Any) -> None:
        if isinstance(identifier, tuple) and len(identifier) == 6:
            identifier = (*identifier[:5], None)  # a view of a storage that is not there yet
        assert full.persistent is not None
        full.persistent(identifier)

    calls = dict(full.calls)
    for name in full.calls:
        if name.startswith("torch._utils.") or name == "torch._tensor._rebuild_from_type_v2":
            calls[name] = lambda *_: None
    return replace(full, calls=calls, persistent=note)


def save(path: Path, value: Any) -> None:
    """Write a file that `torch.load(path, weights_only=True)` reads.

    `value` consists of dicts, lists, tuples, texts, numbers, None and arrays of float16, float32,
    float64, bool and integers up to int64. Arrays become contiguous tensors with a storage each.
    Raises `TypeError` for anything else.
    """
    storages: list[np.ndarray] = []
    program = b"\x80\x02" + _write_program(value, storages) + b"."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _add_member(archive, "data.pkl", program)
        _add_member(archive, "byteorder", b"little")
        for key, numbers in enumerate(storages):
            numbers = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
            _add_member(archive, f"data/{key}", numbers.tobytes())
        _add_member(archive, "version", b"3\n")


def _add_member(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Add a member whose bytes begin at a multiple of `_ALIGNMENT`."""
    member = zipfile.ZipInfo(f"{_ROOT}/{name}")
    assert archive.fp is not None
    header = archive.fp.tell() + 30 + len(member.filename) + 4  # sizes of the fixed headers
    padding = -header % _ALIGNMENT
    member.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    archive.writestr(member, data)


def _write_program(value: Any, storages: list[np.ndarray]) -> bytes:
    """Return the instructions of a pickle that make a value; its arrays are added to `storages`."""
    if value is None or isinstance(value, bool | int | float | str):
        return pickle.dumps(value, 2)[2:-1]  # without the instructions PROTO and STOP
    if isinstance(value, np.ndarray):
        storages.append(value)
        return _write_tensor(value, len(storages) - 1)
    if isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
        kind = _ORDERED if isinstance(value, OrderedDict) else b"}"
        return kind + b"(" + _write_programs(parts, storages) + b"u"
    if isinstance(value, list):
        return b"](" + _write_programs(value, storages) + b"e"
    if isinstance(value, tuple):
        return b"(" + _write_programs(value, storages) + b"t"
    raise TypeError(f"a {type(value).__name__} cannot be written to a PyTorch file")


def _write_programs(values: Iterable[Any], storages: list[np.ndarray]) -> bytes:
    return b"".join(_write_program(value, storages) for value in values)


_ORDERED = b"ccollections\nOrderedDict\n)R"


def _write_tensor(array: np.ndarray, key: int) -> bytes:
    """Return the instructions that make a tensor of the storage with this key."""
    if array.dtype.name not in _STORAGES:
        raise TypeError(f"an array of {array.dtype} cannot be written to a PyTorch file")
    strides = []
    step = 1
    for size in reversed(array.shape):
        strides.append(step)
        step *= max(size, 1)
    kind = f"ctorch\n{_STORAGES[array.dtype.name]}Storage\n".encode()
    storage = b"(" + _write_program("storage", []) + kind
    storage += _write_programs((str(key), "cpu", array.size), []) + b"tQ"
    view = _write_programs((0, array.shape, tuple(reversed(strides)), False), [])
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + view + _ORDERED + b"tR"
