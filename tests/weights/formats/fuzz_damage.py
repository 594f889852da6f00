"""Ways to damage files of weights: bytes, values of JSON, messages of Protocol Buffers, arrays (see
`fuzz_weights`)."""

import copy
import io
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Files = dict[str, bytes]
"""Contents by the name of the file inside its folder."""
Damage = Callable[[np.random.Generator, Files], Files]

ODD_VALUES: tuple[Any, ...] = (
    *(
        *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**40, 2**53 + 1, 2**63, 2**64, -(2**63)),
        10**400,
    ),
    *(0.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf),
    *(
        *("", "0", "1", "\0", "é", "\ud800", "x" * 300, "../../etc/passwd", "/etc/passwd"),
        *("resnet50", "resnet50-v1", "None"),
    ),
    *([], [0], [-1], [2**40] * 4, [[]], [None], {}, {"a": 1}, {"": {}}, [1, 2, 3, 4]),
)
_ODD_DTYPES = ("f2", "f8", "i1", "i4", "i8", "u1", "u2", "?", "c8", "f4")


def damage_bytes(rng: np.random.Generator, data: bytes, within: int | None = None) -> bytes:
    """Return a file with bytes changed, removed, inserted, doubled or exchanged, among the first
    `within`."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 3))):
        at, other = (int(rng.integers(min(len(changed), within or len(changed)))) for _ in range(2))
        length = int(rng.integers(1, 9))
        match rng.integers(8):
            case 0:
                changed[at] = int(rng.integers(256))
            case 1:
                changed[at] ^= 1 << int(rng.integers(8))
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = rng.bytes(length)
            case 4:
                changed[at:at] = changed[at : at + 10 * length]
            case 5:
                changed[at : at + length] = changed[other : other + length]
            case 6 if rng.integers(4) == 0:
                del changed[at:]
            case _:
                changed[at : at + length] = bytes([int(rng.choice([0, 127, 128, 255]))]) * length
        if len(changed) < 2:
            break
    return bytes(changed)


def damage_value(rng: np.random.Generator, value: Any) -> Any:
    """Return a copy of nested tables and lists with one or two values replaced, removed, renamed or
    exchanged."""
    root = [copy.deepcopy(value)]
    for _ in range(int(rng.integers(1, 3))):
        places = list(_places(root))
        holder, key = places[int(rng.integers(len(places)))]
        other, its_key = places[int(rng.integers(len(places)))]
        match rng.integers(6):
            case 0 if holder is not root:
                del holder[key]
            case 1:
                holder[key] = copy.deepcopy(other[its_key])
            case 2 if isinstance(holder, dict):
                holder[str(rng.choice(["", "a", str(its_key)]))] = holder.pop(key)
            case 3 if isinstance(holder, list) and holder is not root:
                holder += copy.deepcopy(holder)
            case 4 if isinstance(holder[key], np.ndarray):
                holder[key] = odd_array(rng, holder[key])
            case _:
                holder[key] = copy.deepcopy(ODD_VALUES[int(rng.integers(len(ODD_VALUES)))])
    return root[0]


def _places(holder: Any) -> Any:
    """Yield every place of a value as the table or list that holds it, and its key."""
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        yield holder, key
        if isinstance(value, dict | list):
            yield from _places(value)


def damage_json(rng: np.random.Generator, data: bytes) -> bytes:
    """Return a JSON text with odd values, seldom nested very deep."""
    if rng.integers(200) == 0:
        return b'{"a":' * 100_000 if rng.integers(2) else b"[" * 100_000 + b"]" * 100_000
    return json.dumps(damage_value(rng, json.loads(data))).encode()


def damage_message(rng: np.random.Generator, message: Any) -> None:
    """Give one or two fields of a message of Protocol Buffers, or of a message inside it, another
    value."""
    for _ in range(int(rng.integers(1, 3))):
        messages = list(_messages(message))
        holder = messages[int(rng.integers(len(messages)))]
        fields = [field for field, _ in holder.ListFields()] or list(holder.DESCRIPTOR.fields)
        if rng.integers(5) == 0:
            fields = list(holder.DESCRIPTOR.fields)
        _damage_field(rng, holder, fields[int(rng.integers(len(fields)))])


def _messages(message: Any) -> Any:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if hasattr(value, "add") else [value]:
                yield from _messages(inner)


def _damage_field(rng: np.random.Generator, message: Any, field: Any) -> None:
    held = getattr(message, field.name)
    values = {
        field.TYPE_STRING: ["", "a", "x" * 300, "../secret", "images"],
        field.TYPE_BYTES: [b"", b"\xff", bytes(16), b"\0" * 7],
        field.TYPE_FLOAT: [0.0, -1.0, math.nan, math.inf, 1e-30],
        field.TYPE_DOUBLE: [0.0, -1.0, math.nan],
        field.TYPE_BOOL: [True, False],
    }.get(field.type, [0, 1, 2, -1, 5, 10, 16, 2**31 - 1])
    if field.type in (field.TYPE_INT64, field.TYPE_UINT64):
        values = [*values, 2**40, 2**62, 2**63 - 1]
    is_repeated = hasattr(held, "extend")
    try:
        if field.message_type is not None:
            if is_repeated and len(held) and rng.integers(3):
                del held[int(rng.integers(len(held)))]
            elif is_repeated:
                held.add()
            else:
                message.ClearField(field.name)
        elif is_repeated and len(held) and rng.integers(2):
            held[int(rng.integers(len(held)))] = values[int(rng.integers(len(values)))]
        elif is_repeated:
            held.append(values[int(rng.integers(len(values)))])
        else:
            setattr(message, field.name, values[int(rng.integers(len(values)))])
    except (ValueError, TypeError):  # of another range or kind
        message.ClearField(field.name)


def odd_array(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """Return an array with another type, shape or values."""
    match rng.integers(7):
        case 0:
            return values.astype(rng.choice(_ODD_DTYPES))
        case 1:
            return values.reshape(-1)
        case 2:
            return values.T.copy()
        case 3:
            return values[..., np.newaxis]
        case 4:
            return np.zeros([[], [0], [2, 0], [1] * 9][int(rng.integers(4))], values.dtype)
        case 5:
            return np.full_like(values, rng.choice([-1, 0, 2**15]))
        case _:
            return np.concatenate([values.reshape(-1), values.reshape(-1)])


def odd_arrays(rng: np.random.Generator, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays with one or two missing, added, renamed, exchanged, or of another type, shape
    or values."""
    odd = dict(arrays)
    for _ in range(int(rng.integers(1, 3))):
        name, other = (str(rng.choice(list(odd))) for _ in range(2))
        match rng.integers(6):
            case 0 if len(odd) > 1:
                del odd[name]
            case 1:
                odd[
                    str(rng.choice(["a", "a/b/c", f"{name}/Momentum", f"{other}_1", "fc.bias"]))
                ] = odd[name]
            case 2:
                odd[name], odd[other] = odd[other], odd[name]
            case _:
                odd[name] = odd_array(rng, odd[name])
    return odd


def damage_hdf5(rng: np.random.Generator, data: bytes) -> bytes:
    """Return a file of HDF5 in which a dataset, group or attribute is something unexpected."""
    import h5py

    memory = io.BytesIO(data)
    with h5py.File(memory, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        for _ in range(int(rng.integers(1, 3))):
            name = str(rng.choice(names))
            if name not in file:
                continue
            match rng.integers(4):
                case 0 if len(file[name].attrs):
                    attribute = str(rng.choice(list(file[name].attrs)))
                    file[name].attrs[attribute] = _odd_attribute(rng, h5py)
                case 1 if len(file.attrs):
                    file.attrs[str(rng.choice(list(file.attrs)))] = _odd_attribute(rng, h5py)
                case _:
                    shape = file[name].shape if isinstance(file[name], h5py.Dataset) else (2, 3)
                    del file[name]
                    _odd_object(rng, h5py, file, name, shape)
    return memory.getvalue()


def _odd_attribute(rng: np.random.Generator, h5py: Any) -> Any:
    odd = [
        h5py.Empty("f4"),
        b"\xff",
        "a",
        7,
        [b"a", b"b"],
        np.zeros(0),
        '{"config": {"layers": 3}}',
        "[" * 60_000,
        "{}",
    ]
    return odd[int(rng.integers(len(odd)))]


def _odd_object(
    rng: np.random.Generator, h5py: Any, file: Any, name: str, shape: tuple[int, ...]
) -> None:
    """Make something at this place."""
    match rng.integers(11):
        case 0:
            file[name] = h5py.Empty("f4")
        case 1:
            file[name] = h5py.SoftLink("/" if rng.integers(2) else "/nowhere")
        case 2:
            file[name] = h5py.ExternalLink("other.h5", "/a")
        case 3:
            file.create_dataset(name, shape, h5py.string_dtype())
        case 4:
            file.create_dataset(name, shape, np.dtype([("a", "f4"), ("b", "i8")]))
        case 5:
            file.create_dataset(name, (2**20, 2**20), "f4", chunks=(1024, 1024), compression="gzip")
        case 6:
            file.create_dataset(name, shape, h5py.vlen_dtype(np.float32))
        case 7:
            file.create_dataset(name, shape, rng.choice(_ODD_DTYPES))
        case 8:
            file[name] = file["/"]
        case 9:
            file[name] = np.dtype("V2")  # a named type
        case _:
            file.create_dataset(name, shape, h5py.ref_dtype)
