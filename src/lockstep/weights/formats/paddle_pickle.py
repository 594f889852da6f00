"""Paddle's files of named arrays (`.pdparams`, `.pdopt`). They are pickles; none of their code is run.

A pickle is a program. `pickle.load` does whatever it says, for example delete files. This module interprets its instructions
one by one instead. They make dicts, lists, strings, numbers and tuples. The few calls that store arrays are replaced by the
functions below, which only make arrays of numbers from bytes of the file. Anything else is refused, so that a file can
neither run code nor use much more memory than it has bytes.

A file is a dict of names and arrays:

- `paddle.static.save` stores NumPy arrays.
- `paddle.save` stores tuples (parameter's name, array), and before Paddle 2.1 arrays and a dict of the parameters' names.
- With protocols 2 and 3, an array of more than 1 GiB is stored in slices.

Sources: Python's pickletools; NumPy's `ndarray.__reduce__`; Paddle's framework/io.py and io_utils.py.
"""

import math
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickletools import genops
from typing import Any

import numpy as np

from lockstep.system.errors import CheckpointError

_NAMES = "StructuredToParameterName@@"
_SLICES = "UnpackBigParamInfor@@"
_PROTOCOL = 4
"""The newest protocol that every version of Paddle reads."""
_DTYPES = {f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)} - {"f1"} | {"b1"}
_MOST_AXES = 32
_MOST_INSTRUCTIONS = 1_000_000
"""A file may have at most this many instructions. An array needs about 40. An instruction of one byte in the file can take a
hundred bytes of memory."""
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    arrays: dict[str, np.ndarray]
    """Arrays as they are stored, read-only; bfloat16 as its bits, uint16."""
    parameters: dict[str, str]
    """For arrays that have their layer's name: the name of the parameter, which the optimizer uses."""
    others: tuple[str, ...]
    """Names of values that are not arrays."""


class _Refused(ValueError):
    """A file asks for something that arrays do not need."""


@dataclass
class _Dtype:
    """A type of numbers. A separate instruction sets its byte order."""

    code: str
    order: str = "<"


@dataclass
class _Array:
    """An array. A separate instruction sets its values."""

    values: np.ndarray | None = None


@dataclass(frozen=True)
class _Global:
    """A function or class that a file asks for."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def load(path: Path) -> Contents:
    """Read a file. Raises `CheckpointError` if it is damaged or asks for anything except arrays of numbers."""
    try:
        data = path.read_bytes()
        return _contents(_Machine().run(data), len(data))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except _Refused as error:
        raise CheckpointError(
            f"{path} asks for {error}, which weights do not need: it may be malicious. Nothing of it was run. "
            "Expected arrays of numbers; get the file from a source you trust, and save it again with paddle.save."
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a Paddle file: {error}. Copy it again, or use an earlier checkpoint."
        ) from None


def dump(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a file that every version of Paddle and NumPy reads."""
    with path.open("wb") as file:
        _Pickler(file, _PROTOCOL).dump(dict(arrays))


class _Pickler(pickle.Pickler):
    """Stores arrays by their constructor. NumPy's own format names a module that older or newer versions do not have."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, np.ndarray):
            return NotImplemented
        dtype = value.dtype.newbyteorder("<")
        return np.ndarray, (value.shape, dtype.str, np.asarray(value, dtype).tobytes())


def _contents(root: Any, size: int) -> Contents:
    """Return the contents of a file of `size` bytes from the object that it made."""
    values, arrays, parameters, others = _expected(dict, root), {}, {}, []
    for name, value in values.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
            parameters[name], value = value
        if isinstance(value, _Array):
            arrays[name] = _expected(np.ndarray, value.values)
        elif name not in (_NAMES, _SLICES):
            others.append(name)
    # Many arrays may share the same bytes of the file. Their copies might not fit into memory.
    if sum(array.nbytes for array in arrays.values()) > size:
        raise ValueError(f"its arrays have more bytes than its own {size}")
    for name, parts in _expected(dict, values.get(_SLICES, {})).items():
        arrays[name] = _joined(arrays, _expected(dict, parts))
    parameters |= {name: _expected(str, known) for name, known in _expected(dict, values.get(_NAMES, {})).items()}
    return Contents(arrays, {name: parameters[name] for name in arrays if name in parameters}, tuple(others))


def _joined(arrays: dict[str, np.ndarray], parts: dict[str, Any]) -> np.ndarray:
    """Return an array joined from its slices, and remove the slices."""
    slices = [arrays.pop(_expected(str, name)) for name in _expected(list, parts["slices"])]
    return np.concatenate(slices).reshape(_shape(parts["OriginShape"]))


def _expected(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    shape = tuple(_expected(int, size) for size in _expected(tuple, value))
    if len(shape) > _MOST_AXES or not all(0 <= size < 2**40 for size in shape):
        raise ValueError(f"an array has {len(shape)} axes, or an impossible size")
    return shape


def _numbers(shape: Any, dtype: Any, data: Any, order: Any = "C") -> np.ndarray:
    """Return an array that is a view of the file's bytes."""
    sizes, known, stored = _shape(shape), np.dtype(dtype.order + dtype.code), _expected(bytes, data)
    if math.prod(sizes) * known.itemsize != len(stored):
        raise ValueError(f"an array of {list(sizes)} {known} has {len(stored)} bytes")
    return np.ndarray(sizes, known, stored, order=order)


def _make_dtype(code: Any, align: Any = False, copy: Any = True) -> _Dtype:
    bare = _expected(str, code).lstrip("<>|=")
    if bare not in _DTYPES:
        raise _Refused(f"an array of type {code[:20]!r}")
    return _Dtype(bare, ">" if code.startswith(">") else "<")


def _make_array(shape: Any, dtype: Any, data: Any = b"") -> _Array:
    return _Array(_numbers(shape, dtype if isinstance(dtype, _Dtype) else _make_dtype(dtype), data))


def _make_empty_array(kind: Any, shape: Any, code: Any) -> _Array:
    if kind != _Global("numpy", "ndarray"):
        raise _Refused(f"an array of the class {kind}" if isinstance(kind, _Global) else "an array of no class")
    return _Array()


def _make_scalar(dtype: Any, data: Any) -> _Array:
    return _Array(_numbers((), _expected(_Dtype, dtype), data))


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise ValueError("its text is not encoded as latin1")
    return _expected(str, text).encode("latin1")


def _name_in_scope(expression: Any = None, scope: Any = None, _: Any = None) -> Any:
    """Replace `eval`: Paddle stores the tensor of a static program as the value of `data`. Nothing is evaluated."""
    if expression != "data" or not isinstance(scope, dict) or list(scope) != ["data"]:
        raise _Refused("builtins.eval of an expression")
    return scope["data"]


def _make_tuple(items: Any = ()) -> tuple[Any, ...]:
    return tuple(_expected(tuple, items))


def _make_dict() -> dict[str, Any]:
    return {}


def _make_bytes() -> bytes:
    return b""


_BUILTINS: dict[str, Callable[..., Any]] = {"tuple": _make_tuple, "eval": _name_in_scope, "bytes": _make_bytes}
_ARRAYS: dict[str, Callable[..., Any]] = {"_reconstruct": _make_empty_array, "scalar": _make_scalar}
_CALLS: dict[_Global, Callable[..., Any]] = {
    _Global("numpy", "ndarray"): _make_array,
    _Global("numpy", "dtype"): _make_dtype,
    _Global("_codecs", "encode"): _encode,
    _Global("collections", "OrderedDict"): _make_dict,
    # Protocol 2 uses Python 2's module name; NumPy 2 uses another name than NumPy 1.
    **{_Global(module, name): call for module in ("builtins", "__builtin__") for name, call in _BUILTINS.items()},
    **{_Global(f"numpy.{core}.multiarray", name): call for core in ("core", "_core") for name, call in _ARRAYS.items()},
}
"""What a file may ask for, and the functions that replace it."""


@dataclass
class _Machine:
    """The stack machine that runs a pickle. Invalid programs raise `ValueError`, `LookupError` or `TypeError`."""

    stack: list[Any] = field(default_factory=list)
    """The values above the last mark."""
    below: list[list[Any]] = field(default_factory=list)
    """The stacks below each mark."""
    memo: dict[int, Any] = field(default_factory=dict)
    spare: int = 0
    """This many bytes may still be made from text. In total they may not exceed the file's size."""

    def run(self, data: bytes) -> Any:
        """Return the object that a pickle makes."""
        if not data.startswith(b"\x80"):
            raise ValueError("it does not begin as a pickle of protocol 2 to 4 does")
        self.spare = len(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about escapes in text
            for count, (instruction, argument, _) in enumerate(genops(data)):
                if count > _MOST_INSTRUCTIONS:
                    raise ValueError(f"it has more than {_MOST_INSTRUCTIONS} instructions")
                self._do(instruction.name, argument)
        return self.stack.pop()

    def _do(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.push(argument)
        elif name in _NEW:
            self.push(_NEW[name]())
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise _Refused(f"{argument:.200} by {name}" if isinstance(argument, str) else f"an object by {name}")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def taken(self) -> list[Any]:
        """Remove the last mark and return all values above it."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def top(self, count: int) -> list[Any]:
        """Remove and return the top `count` values."""
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def append(self, items: list[Any]) -> None:
        _expected(list, self.stack[-1]).extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = _expected(dict, self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_expected(str, key)] = value

    def put(self, index: Any) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def get(self, index: Any) -> None:
        self.push(self.memo[index])

    def find(self, module: Any, name: Any) -> None:
        wanted = _Global(_expected(str, module), _expected(str, name))
        if wanted not in _CALLS:
            raise _Refused(f"{wanted!s:.200}")
        self.push(wanted)

    def reduce(self, _: Any) -> None:
        function, arguments = self.top(2)
        value = _CALLS[_expected(_Global, function)](*_expected(tuple, arguments))
        if isinstance(value, bytes):
            self.spare -= len(value)
            if self.spare < 0:
                raise ValueError("it makes more bytes than it has")
        self.push(value)

    def build(self, _: Any) -> None:
        state, target = _expected(tuple, self.stack.pop()), self.stack[-1]
        if isinstance(target, _Array):
            _, shape, dtype, by_columns, data = state
            target.values = _numbers(shape, _expected(_Dtype, dtype), data, "F" if by_columns else "C")
        elif isinstance(target, _Dtype):
            target.order = ">" if state[1] == ">" else "<"
        else:
            raise ValueError(f"it sets the state of a {type(target).__name__}")


_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}
_STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "MARK": _Machine.mark,
    "POP": lambda machine, _: machine.top(1),
    "POP_MARK": lambda machine, _: machine.taken(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.taken())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.top(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.top(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.top(3))),
    "APPEND": lambda machine, _: machine.append(machine.top(1)),
    "APPENDS": lambda machine, _: machine.append(machine.taken()),
    "SETITEM": lambda machine, _: machine.set_items(machine.top(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.taken()),
    "GLOBAL": lambda machine, argument: machine.find(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.find(*machine.top(2)),
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
}
