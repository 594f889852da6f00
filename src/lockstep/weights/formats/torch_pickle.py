"""What the pickles of PyTorch's files may ask for: tensors, and what else programs store. None of
their code is run.

A tensor is a call of `torch._utils._rebuild_tensor_v2` with a storage (a row of numbers outside the
pickle), an offset, sizes and strides in numbers. Several tensors may share a storage. A storage is
named by a persistent identifier:

    ("storage", torch.FloatStorage, key, device, count)

In the older container it also has a view: (its key, offset, count).

Everything that `torch.load(weights_only=True)` reads is read: as plain values where these exist, as
`Opaque` where they do not (sparse and quantized tensors, 8-bit floats). So are options of a command
line (`argparse.Namespace`) and paths.

Sources: PyTorch's serialization.py, _utils.py, _weights_only_unpickler.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Literal

import numpy as np

from lockstep.weights.formats import BFLOAT16, pickles

Kind = np.dtype[Any]
"""A type of numbers, `BFLOAT16` among them."""


@dataclass(frozen=True)
class Opaque:
    """An object that has no meaning for weights; it is not made, only named."""

    name: str


class OrderedValues(dict[Any, Any]):
    """A dict that also had attributes, such as the state_dict of a module."""

    modules: tuple[str, ...] = ()
    """Names of the modules whose state_dict it was, "" for the outermost; empty if they were not
    stored."""


Storage = tuple[Kind, np.ndarray]
"""A row of numbers: its type, and its bytes, uint8 of 1 axis."""
Find = Callable[[str, Kind, int], np.ndarray]
"""Returns the bytes of a storage from its key, type and number of numbers."""

_NAMES = """
float32 float64 float16 complex64 complex128 bool int8 int16 int32 int64 uint8 uint16 uint32 uint64
"""
_KINDS: dict[str, Kind] = {name: np.dtype(name) for name in _NAMES.split()}
_KINDS["bfloat16"] = BFLOAT16
"""Types of numbers by PyTorch's names."""
STORAGES = {"Float": "float32", "Double": "float64", "Half": "float16", "Byte": "uint8"}
STORAGES |= {"Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool"}
"""Types of numbers by the names of storages, those of `torch.save` in `torch_file`."""
_STORAGES = {f"{name}Storage": kind for name, kind in STORAGES.items()} | {
    **{"BFloat16Storage": "bfloat16", "UntypedStorage": "uint8"},
    **{"ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128"},
}
_OTHER_NAMES = """
float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 complex32
quint8 qint8 qint32 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 bits4x2
int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7
per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric
per_channel_affine_float_qparams Tensor
QUInt8Storage QInt8Storage QInt32Storage QUInt4x2Storage QUInt2x4Storage
"""
"""Other names in `torch` that may occur as values; they have no equivalent in NumPy."""
_OPAQUE = """
sparse_tensor sparse_csr_tensor qtensor nested_tensor meta_tensor_no_storage wrapper_subclass
"""
"""What tensors that are only named are rebuilt as."""
_UNCHANGED = """
parameter parameter_with_state device_tensor_from_numpy device_tensor_from_cpu_tensor xla_tensor
"""
"""What tensors are rebuilt as that are those that they are made of."""
_FACTORIES = ("dict", "list", "int", "float", "str", "bool", "tuple")
"""What a defaultdict may make. A plain dict replaces it."""
_MOST_PATH = 4096
_SPARE = 2**20
_MOST_COPIES = 8
"""All tensors together may have this many times the bytes of the file, and `_SPARE` more: they may
share storages."""


class _Tensors:
    """Makes tensors from storages, all of one file of `size` bytes."""

    def __init__(self, size: int, find: Find, is_big_endian: bool) -> None:
        self.spare = _MOST_COPIES * size + _SPARE
        self.find = find
        self.order: Literal["<", ">"] = ">" if is_big_endian else "<"

    def storage(self, identifier: Any) -> Storage:
        """Return the storage that a persistent identifier names."""
        if not isinstance(identifier, tuple) or not identifier or identifier[0] != "storage":
            raise pickles.Refused(
                "an object that is not a storage of numbers, such as a model's class"
            )
        kind, key, _, count, *view = identifier[1:]
        stored = _KINDS.get(_STORAGES.get(pickles.check_type(str, kind).rpartition(".")[2], ""))
        if stored is None:
            raise pickles.Refused(f"a storage of type {kind:.40}")
        numbers = self.find(str(pickles.check_type(str, key)), stored, _check_natural(count))
        if view and view[0] is not None:
            _, offset, length = pickles.check_type(tuple, view[0])
            begin = stored.itemsize * _check_natural(offset)
            end = begin + stored.itemsize * _check_natural(length)
            if end > len(numbers):
                raise ValueError("a view reaches outside of its storage")
            numbers = numbers[begin:end]
        return stored, numbers

    def tensor(self, storage: Any, offset: Any, sizes: Any, strides: Any, *_: Any) -> np.ndarray:
        """Return a tensor with the storage's type of numbers."""
        kind, stored = pickles.check_type(tuple, storage)
        return self._view(kind, stored, _check_natural(offset), sizes, strides)

    def tensor_of_type(
        self, storage: Any, offset: Any, sizes: Any, strides: Any, *others: Any
    ) -> np.ndarray | Opaque:
        """Return a tensor with another type of numbers than its storage."""
        name = pickles.check_type(str, others[2])
        kind = _KINDS.get(name.removeprefix("torch."))
        if kind is None:
            return Opaque(name)
        if self.order == ">":
            raise ValueError("the byte order of a tensor is unknown, since its storage has no type")
        return self._view(
            kind, pickles.check_type(tuple, storage)[1], _check_natural(offset), sizes, strides
        )

    def _view(
        self, kind: Kind, stored: np.ndarray, offset: int, sizes: Any, strides: Any
    ) -> np.ndarray:
        """Return a view of a storage; a new array of bool, and of numbers in big endian."""
        shape = pickles.check_shape(sizes)
        steps = pickles.check_shape(strides)
        if len(shape) != len(steps):
            raise ValueError(f"a tensor has {len(shape)} sizes and {len(steps)} strides")
        last = offset + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if 0 not in shape and (last + 1) * kind.itemsize > len(stored):
            raise ValueError(
                f"a tensor of {list(shape)} reaches outside of its storage of {len(stored)} bytes"
            )
        bytes_needed = math.prod(shape) * kind.itemsize
        self.spare -= bytes_needed * (1 + (kind == BFLOAT16))
        if self.spare < 0:
            raise ValueError(
                f"its tensors have more than {_MOST_COPIES} times the bytes of the file"
            )
        if 0 in shape:
            return np.zeros(shape, kind)
        is_bool = kind == np.bool_
        code = np.dtype(np.uint8) if is_bool else kind.newbyteorder(self.order)
        byte_steps = [kind.itemsize * step for step in steps]
        values: np.ndarray = np.ndarray(shape, code, stored, kind.itemsize * offset, byte_steps)
        return np.not_equal(values, 0) if is_bool else values.astype(kind, copy=False)


def _check_natural(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**48:
        raise ValueError("an offset or a size is impossible")
    return value


def _first(value: Any, *_: Any) -> Any:
    """Replace calls that add what weights do not need, such as whether gradients are wanted."""
    return value


def _rebuild_class(
    calls: dict[str, Callable[..., Any]], function: Any, _: Any, arguments: Any, *__: Any
) -> Any:
    """Replace the call that makes a tensor of a subclass, with attributes: return the tensor."""
    name = pickles.get_name(function)
    if not name.startswith("torch._utils._rebuild_"):
        raise pickles.Refused(f"a tensor by {name:.200}")
    return calls[name](*pickles.check_type(tuple, arguments))


def _make_ordered(items: Any = ()) -> OrderedValues:
    values = OrderedValues()
    for item in items:
        key, value = tuple(item)
        values[_check_key(key)] = value
    return values


def _make_set(items: Any = ()) -> set[Any]:
    return set(map(_check_key, pickles.check_type(list, items)))


def _make_device(kind: Any, index: Any = None) -> str:
    name = pickles.check_type(str, kind)
    return name if index is None else f"{name:.20}:{_check_natural(index)}"


def _make_complex(real: Any, imaginary: Any) -> complex:
    return complex(pickles.check_type(float, real), pickles.check_type(float, imaginary))


def _make_path(kind: type[PurePath], *parts: Any) -> str:
    if sum(len(pickles.check_type(str, part)) for part in parts) > _MOST_PATH:
        raise ValueError(f"a path has more than {_MOST_PATH} characters")
    return str(kind(*parts))


def _make_opaque(name: str, *_: Any) -> Opaque:
    return Opaque(name)


def _check_key(value: Any) -> Any:
    """Return the key of a dict: a text, a number or None, or a tuple of these."""
    scalars = str | bytes | int | float | None
    parts = value if type(value) is tuple else (value,)
    if all(isinstance(part, scalars) for part in parts):
        return value
    raise ValueError(f"it has a {type(value).__name__} as the key of a dict")


def _build(target: Any, state: Any) -> Any:
    """Return a namespace as the dict of its attributes, and a dict with the names of its modules,
    if it has them."""
    if isinstance(target, pickles.Unbuilt) and target.kind == "namespace":
        return pickles.check_type(dict, state)
    if isinstance(target, OrderedValues):
        modules = pickles.check_type(dict, state).get("_metadata")
        if isinstance(modules, dict):
            target.modules = tuple(name for name in modules if isinstance(name, str))
        return target
    return pickles.build_array(target, state)


_PATHS: dict[str, Callable[..., str]] = {
    **dict.fromkeys(("PosixPath", "PurePosixPath"), partial(_make_path, PurePosixPath)),
    **dict.fromkeys(("WindowsPath", "PureWindowsPath"), partial(_make_path, PureWindowsPath)),
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    **{"set": _make_set, "frozenset": _make_set, "complex": _make_complex},
    **{"bytearray": pickles.make_bytes, "bytes": pickles.make_bytes},
}
_PLAIN: dict[str, Callable[..., Any]] = {
    **pickles.NUMPY,
    "collections.OrderedDict": _make_ordered,
    "collections.defaultdict": lambda *_: {},
    "collections.Counter": lambda counts=None: dict(pickles.check_type(dict, counts or {})),
    "torch.Size": lambda sizes=(): pickles.check_type(tuple, sizes),
    "torch.device": _make_device,
    "torch.serialization._get_layout": lambda name: pickles.check_type(str, name),
    "argparse.Namespace": lambda: pickles.Unbuilt("namespace"),
    **pickles.name_members(pickles.BUILTINS, _BUILTINS),
    **pickles.name_members(("pathlib", "pathlib._local"), _PATHS),
    **{
        f"torch._utils._rebuild_{name}": partial(_make_opaque, f"_rebuild_{name}")
        for name in _OPAQUE.split()
    },
    **dict.fromkeys(map("torch._utils._rebuild_{}".format, _UNCHANGED.split()), _first),
    "torch.nn.parameter.Parameter": _first,
}
_VALUES: dict[str, Any] = {
    **{f"torch.{name}": f"torch.{name}" for name in (*_KINDS, *_STORAGES, *_OTHER_NAMES.split())},
    **pickles.name_members(
        ("torch.cuda", "torch.storage"), {name: f"torch.{name}" for name in _STORAGES}
    ),
    "torch.storage._UntypedStorage": "torch.UntypedStorage",
    **pickles.name_members(pickles.BUILTINS, {name: Opaque(name) for name in _FACTORIES}),
}
_INSTRUCTIONS = frozenset(
    ["NEWOBJ", "BINPERSID", "EMPTY_SET", "ADDITEMS", "SHORT_BINSTRING", "BINSTRING"]
)


def rules(size: int, find: Find, *, is_big_endian: bool = False) -> pickles.Rules:
    """Return the rules for the pickle of a file of `size` bytes, whose storages `find` returns.

    Tensors become arrays in little endian: views of their storages, except for bool. bfloat16 stays
    as it is (`BFLOAT16`). `Rules.persistent` and the calls raise `ValueError` for a tensor that
    reaches outside of its storage, and if all tensors together have several times the bytes of the
    file.
    """
    tensors = _Tensors(size, find, is_big_endian)
    calls = _PLAIN | {
        "torch._utils._rebuild_tensor": tensors.tensor,
        "torch._utils._rebuild_tensor_v2": tensors.tensor,
        "torch._utils._rebuild_tensor_v3": tensors.tensor_of_type,
    }
    calls["torch._tensor._rebuild_from_type_v2"] = partial(_rebuild_class, calls)
    return pickles.Rules(calls, _VALUES, _INSTRUCTIONS, _check_key, _build, tensors.storage)
