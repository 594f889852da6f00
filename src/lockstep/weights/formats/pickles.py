"""A safe interpreter of pickles. No code of a file is run.

A pickle is a program. `pickle.load` does whatever it says, for example delete files. This module
interprets its instructions one by one instead. They make dicts, lists, strings, numbers and tuples.
A reader names the few calls that its files need (`Rules`), each with the function that replaces it.
`NUMPY` has the replacements that make arrays of numbers from bytes of the file. Anything else is
refused, so that a file can neither run code nor use much more memory than it has bytes.

Sources: Python's pickletools; NumPy's `ndarray.__reduce__`.
"""

import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickletools import genops
from typing import Any, BinaryIO

import numpy as np

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import naming_damage

_DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
_MOST_AXES = 32
_MOST_INSTRUCTIONS = 1_000_000
"""A pickle may have at most this many instructions. An array needs about 40. An instruction of one
byte in the file can take a hundred bytes of memory."""
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}


class Refused(ValueError):
    """A file asks for something that weights do not need. The text says for what."""


@contextmanager
def naming_refusal(path: Path, kind: str, remedy: str) -> Iterator[None]:
    """Do what `naming_damage` does, and raise `CheckpointError` for `Refused`. The remedy is a call
    that saves weights again."""
    with naming_damage(path, kind):
        try:
            yield
        except Refused as error:
            raise CheckpointError(
                f"{path} asks for {error}, which weights do not need: it may be malicious. None of"
                " it was executed. Expected arrays of numbers; get the file from a source you"
                f" trust, and save it again with {remedy}."
            ) from None


@dataclass(frozen=True)
class _Global:
    """A function or class that a file asks for. `str` returns its full name, such as
    "numpy.ndarray"."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Unbuilt:
    """A value that a separate instruction, BUILD, makes from its state."""

    kind: str
    """What the reader's `Rules.build` makes of it: for `build_array` always "array"."""
    places: list[int] = field(default_factory=list)
    """Places of the memo that hold it. They get the value that replaces it."""


@dataclass
class _Dtype:
    """A type of numbers. A separate instruction sets its byte order."""

    code: str
    order: str = "<"


def check_type(kind: type, value: Any) -> Any:
    """Return a value of this type. Raises `ValueError` for a value of another type."""
    if not isinstance(value, kind):
        raise ValueError(f"it has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def text_key(value: Any) -> str:
    """Return a string, the only key of a dict that most files need. Raises `ValueError`."""
    return check_type(str, value)


def build_array(target: Any, state: Any) -> Any:
    """Return an array of NumPy from its state, or a type of numbers with its byte order. Raises
    `ValueError`."""
    if isinstance(target, Unbuilt) and target.kind == "array":
        _, shape, dtype, by_columns, data = check_type(tuple, state)
        return _numbers(shape, check_type(_Dtype, dtype), data, "F" if by_columns else "C")
    if isinstance(target, _Dtype):
        target.order = ">" if check_type(tuple, state)[1] == ">" else "<"
        return target
    raise ValueError(f"it sets the state of a {type(target).__name__}")


@dataclass(frozen=True)
class Rules:
    """What the pickles of one format may ask for."""

    calls: Mapping[str, Callable[..., Any]]
    """The functions that replace what a pickle calls, by the full name that it asks for."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values that replace what a pickle names and does not call."""
    instructions: frozenset[str] = frozenset()
    """Instructions of pickletools that are allowed in addition to those that all readers need."""
    key: Callable[[Any], Any] = text_key
    """Returns the key of a dict or the item of a set, or raises `ValueError`. Hashing a deeply
    nested one would crash."""
    build: Callable[[Any, Any], Any] = build_array
    """Returns the value that a target becomes with a state (the instruction BUILD), or raises
    `ValueError`."""
    persistent: Callable[[Any], Any] | None = None
    """Returns the object that an identifier names, which is stored outside the pickle. None: there
    is none."""


def interpret(data: bytes | BinaryIO, rules: Rules) -> Any:
    """Return the object that a pickle of protocol 2 or newer makes; a stream ends up behind the
    pickle.

    Raises `Refused` if the pickle asks for anything that the rules do not have, and `ValueError`,
    `LookupError` or `TypeError` if it is damaged.
    """
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    begin = stream.tell()
    rest = stream.seek(0, io.SEEK_END) - begin
    stream.seek(begin)
    if stream.read(1) != b"\x80":
        raise ValueError("it is not a pickle of protocol 2 to 4")
    stream.seek(begin)
    machine = _Machine(rules, rest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about escapes in text
        for count, (instruction, argument, _) in enumerate(genops(stream)):
            if count > _MOST_INSTRUCTIONS:
                raise ValueError(f"it has more than {_MOST_INSTRUCTIONS} instructions")
            machine.do(instruction.name, argument)
    return machine.stack.pop()


@dataclass
class _Machine:
    """The stack machine that runs a pickle. Invalid programs raise `ValueError`, `LookupError` or
    `TypeError`."""

    rules: Rules
    spare: int
    """This many bytes or items may still be made by calls. In total they may not exceed the file's
    size."""
    stack: list[Any] = field(default_factory=list)
    """The values above the last mark."""
    below: list[list[Any]] = field(default_factory=list)
    """The stacks below each mark."""
    memo: dict[int, Any] = field(default_factory=dict)

    def do(self, name: str, argument: Any) -> None:
        """Do one instruction."""
        if name in _LITERALS:
            self.push(argument)
        elif name in _NEW:
            self.push(_NEW[name]())
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name in self.rules.instructions and name in _MORE_STEPS:
            _MORE_STEPS[name](self, argument)
        elif name not in ("PROTO", "FRAME", "STOP"):
            what = f"{argument:.200}" if isinstance(argument, str) else "an object"
            raise Refused(f"{what} by {name}")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_marked(self) -> list[Any]:
        """Remove the last mark and return all values above it."""
        items = self.stack
        self.stack = self.below.pop()
        return items

    def top(self, count: int) -> list[Any]:
        """Remove and return the top `count` values."""
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def append(self, items: list[Any]) -> None:
        check_type(list, self.stack[-1]).extend(items)

    def add(self, items: list[Any]) -> None:
        check_type(set, self.stack[-1]).update(self.rules.key(item) for item in items)

    def set_items(self, items: list[Any]) -> None:
        target = check_type(dict, self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[self.rules.key(key)] = value

    def put(self, index: Any) -> None:
        place = len(self.memo) if index is None else index
        value = self.stack[-1]
        self.memo[place] = value
        if isinstance(value, Unbuilt):
            value.places.append(place)

    def get(self, index: Any) -> None:
        self.push(self.memo[index])

    def find(self, module: Any, name: Any) -> None:
        wanted = _Global(check_type(str, module), check_type(str, name))
        if str(wanted) in self.rules.values:
            self.push(self.rules.values[str(wanted)])
        elif str(wanted) in self.rules.calls:
            self.push(wanted)
        else:
            raise Refused(f"{wanted!s:.200}")

    def reduce(self, _: Any) -> None:
        function, arguments = self.top(2)
        value = self.rules.calls[get_name(function)](*check_type(tuple, arguments))
        if isinstance(value, bytes | str | set | dict | list):
            self.spare -= len(value)
            if self.spare < 0:
                raise ValueError("it unpacks to more bytes than it has")
        self.push(value)

    def build(self, _: Any) -> None:
        target, state = self.top(2)
        value = self.rules.build(target, state)
        self.push(value)
        if isinstance(target, Unbuilt):
            self.memo |= dict.fromkeys(target.places, value)
            target.places.clear()

    def load(self, _: Any) -> None:
        if self.rules.persistent is None:
            raise Refused("an object outside the pickle")
        self.push(self.rules.persistent(self.stack.pop()))


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
    "POP_MARK": lambda machine, _: machine.pop_marked(),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_marked())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.top(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.top(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.top(3))),
    "APPEND": lambda machine, _: machine.append(machine.top(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_marked()),
    "SETITEM": lambda machine, _: machine.set_items(machine.top(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_marked()),
    "GLOBAL": lambda machine, argument: machine.find(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.find(*machine.top(2)),
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
}
_MORE_STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "NEWOBJ": _Machine.reduce,
    "BINPERSID": _Machine.load,
    "EMPTY_SET": lambda machine, _: machine.push(set()),
    "ADDITEMS": lambda machine, _: machine.add(machine.pop_marked()),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), _Machine.push),
}
"""Instructions that only some formats need: objects by class, objects outside the pickle, sets, and
Python 2's strings."""


def get_name(function: Any) -> str:
    """Return the full name of a function that a file asks for. Raises `ValueError` for any other
    object."""
    return str(check_type(_Global, function))


def check_shape(value: Any) -> tuple[int, ...]:
    """Return a tuple of sizes. Raises `ValueError` for too many axes and for impossible sizes."""
    shape = tuple(check_type(int, size) for size in check_type(tuple, value))
    if len(shape) > _MOST_AXES or not all(0 <= size < 2**40 for size in shape):
        raise ValueError(f"an array has {len(shape)} axes, or an impossible size")
    return shape


def _numbers(shape: Any, dtype: Any, data: Any, order: Any = "C") -> np.ndarray:
    """Return an array that is a view of the file's bytes."""
    sizes = check_shape(shape)
    known = np.dtype(dtype.order + dtype.code)
    stored = check_type(bytes, data)
    if math.prod(sizes) * known.itemsize != len(stored):
        raise ValueError(f"an array of {list(sizes)} {known} has {len(stored)} bytes")
    return np.ndarray(sizes, known, stored, order=order)


def _make_dtype(code: Any, align: Any = False, copy: Any = True) -> _Dtype:
    bare = check_type(str, code).lstrip("<>|=")
    if bare not in _DTYPES:
        raise Refused(f"an array of type {code[:20]!r}")
    return _Dtype(bare, ">" if code.startswith(">") else "<")


def _make_array(shape: Any, dtype: Any, data: Any = b"") -> np.ndarray:
    return _numbers(shape, dtype if isinstance(dtype, _Dtype) else _make_dtype(dtype), data)


def _make_empty_array(kind: Any, shape: Any, code: Any) -> Unbuilt:
    if kind != _Global("numpy", "ndarray"):
        what = f"the class {kind}" if isinstance(kind, _Global) else "no class"
        raise Refused(f"an array of {what}")
    return Unbuilt("array")


def _make_scalar(dtype: Any, data: Any) -> np.ndarray:
    return _numbers((), check_type(_Dtype, dtype), data)


def make_bytes(text: Any = b"", encoding: Any = "latin1") -> bytes:
    """Return bytes, which protocol 2 stores as text. Raises `ValueError` for other encodings."""
    if isinstance(text, bytes):
        return bytes(text)
    if encoding not in ("latin-1", "latin1"):
        raise ValueError("its text is not encoded as latin1")
    return check_type(str, text).encode("latin1")


NUMPY: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": _make_array,
    "numpy.dtype": _make_dtype,
    "_codecs.encode": lambda text, encoding: make_bytes(text, encoding),
    "numpy.core.multiarray._reconstruct": _make_empty_array,
    "numpy.core.multiarray.scalar": _make_scalar,
    # NumPy 2 uses other names than NumPy 1.
    "numpy._core.multiarray._reconstruct": _make_empty_array,
    "numpy._core.multiarray.scalar": _make_scalar,
}
"""Calls that make arrays of numbers, read-only views of the file's bytes. Scalars become arrays
without axes."""


BUILTINS = ("builtins", "__builtin__")
"""Both names of the module of Python's builtins. Protocol 2 uses Python 2's name."""


def name_members(modules: Iterable[str], replacements: Mapping[str, Any]) -> dict[str, Any]:
    """Return what replaces members of a module, given by their short names, under all names of the
    module."""
    names = {}
    for module in modules:
        for name, replacement in replacements.items():
            names[f"{module}.{name}"] = replacement
    return names
