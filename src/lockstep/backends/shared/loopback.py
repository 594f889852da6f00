"""Keeping a framework's sockets on one address: loopback on one machine, the chosen address on
several.

TensorFlow's server and Paddle's store bind to all interfaces and have no option for another
address. TensorFlow's server executes any graph that it receives. So a rank of `lockstep launch`
replaces the C function `bind` in the loaded libraries: a request for all interfaces becomes a
request for the rank's address (`listen_address`). This works on 64-bit Linux. If a rank still
listens elsewhere after it has met the others, it refuses to train.
"""

import ctypes
import errno
import ipaddress
import mmap
import socket
import struct
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import BackendError
from lockstep.system.ranks import LOOPBACK, listen_address


def confine_sockets() -> None:
    """Make libraries of this rank that bind a socket to all interfaces bind it to the rank's
    address instead.

    This applies to the libraries that are already loaded, and only to ranks of `lockstep launch`.
    Python's own sockets are not changed. Raises `BackendError` if it is not possible on this
    system.
    """
    address = listen_address()
    if address is None:
        return
    try:
        if struct.calcsize("P") != 8:
            raise OSError("this is not a 64-bit system")
        replaced = sum(_replace(library) for library in _libraries())
    except (OSError, AttributeError, ValueError) as error:
        raise BackendError(
            f"cannot keep this framework's sockets on the address {address} here: {error}."
            f" {_ADVICE}"
        ) from error
    if not replaced:
        raise BackendError(
            f"cannot keep this framework's sockets on the address {address} on {sys.platform}."
            f" {_ADVICE}"
        )


def refuse_open_sockets() -> None:
    """Raise `BackendError` if this rank of `lockstep launch` listens elsewhere than at its address
    or on loopback."""
    own = listen_address()
    if own is None:
        return
    found = sorted(
        {
            f"{address} port {port}"
            for address, port in listening("self")
            if not _is_allowed(address, own)
        }
    )
    if found:
        expected = (
            "the loopback interface only"
            if is_loopback(own)
            else f"{own} and the loopback interface only"
        )
        raise BackendError(
            f"this rank listens on {', '.join(found)}, expected {expected}. {_ADVICE}"
        )


def _is_allowed(address: str, own: str) -> bool:
    return is_loopback(address) or address.removeprefix("::ffff:") == own


_ADVICE = "Train in one process, or use --backend torch, which needs no server"


# Sockets that a process listens on

_LISTENING = "0A"
"""The state TCP_LISTEN in /proc/net/tcp."""


def listening(process: int | str) -> list[tuple[str, int]]:
    """Return address and port of every TCP socket that a process of this machine listens on; an
    empty list without /proc."""
    folder = Path("/proc") / str(process)
    if not (folder / "net").is_dir():
        return []
    own = set()
    for file in (folder / "fd").iterdir():
        try:
            own.add(str(file.readlink()))
        except OSError:  # closed in the meantime
            continue
    found = []
    for family in ("tcp", "tcp6"):
        try:
            lines = (folder / "net" / family).read_text().splitlines()[1:]
        except OSError:  # a system without IPv6
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and f"socket:[{words[9]}]" in own:
                found.append(_place(words[1]))
    return found


def _place(text: str) -> tuple[str, int]:
    """Return address and port in a text such as 0100007F:B267: words of 32 bits in the processor's
    byte order."""
    address, port = text.split(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(
        port, 16
    )


def is_loopback(address: str) -> bool:
    """Return whether an address belongs to the loopback interface, as IPv4, IPv6 or IPv4 within
    IPv6."""
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


# The function that replaces `bind`

_Bind = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)


def _bind(number: int, address: int, length: int) -> int:
    try:
        given = ctypes.string_at(address, length) if address else b""
        wanted = _confined(given, listen_address() or LOOPBACK)
        return ctypes.CDLL(None, use_errno=True).bind(
            number, wanted, len(wanted)
        )  # the caller reads its errno
    except (
        BaseException
    ):  # a signal handler can raise here. Without this, C would assume that the socket is bound
        ctypes.set_errno(errno.EACCES)
        return -1


def _confined(given: bytes, own: str) -> bytes:
    """Return a socket address in which the address of all interfaces is replaced by an IPv4
    address.

    Other addresses are returned unchanged.
    """
    family = int.from_bytes(given[:2], sys.byteorder)
    v4 = socket.inet_pton(socket.AF_INET, own)
    if family == socket.AF_INET and given[4:8] == bytes(4):  # family, port, address
        return given[:4] + v4 + given[8:]
    if family == socket.AF_INET6 and given[8:24] in (
        bytes(16),
        _MAPPED + bytes(4),
    ):  # family, port, flow, address
        return given[:8] + _MAPPED + v4 + given[24:]
    return given


_MAPPED = bytes(10) + b"\xff\xff"
"""Prefix of an IPv4 address within IPv6. TensorFlow's sockets accept both, and its ranks connect by
IPv4."""


@cache
def _own() -> Any:
    """Return `_bind` as a C function. It is always the same one, since libraries keep its address."""
    return _Bind(_bind)


# The libraries of this process, as the loader has them in memory: System V ABI, "Dynamic Linking"

_PT_DYNAMIC = 2
_PT_GNU_RELRO = 0x6474E552
_DT_PLTRELSZ = 2
_DT_STRTAB = 5
_DT_SYMTAB = 6
_DT_RELA = 7
_DT_RELASZ = 8
_DT_JMPREL = 23
_SYMBOL_BYTES = 24


class _Segment(ctypes.Structure):
    """Elf64_Phdr."""

    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("physical", ctypes.c_uint64),
        ("file_bytes", ctypes.c_uint64),
        ("memory_bytes", ctypes.c_uint64),
        ("alignment", ctypes.c_uint64),
    )


class _Loaded(ctypes.Structure):
    """The first fields of dl_phdr_info."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    )


_Library = tuple[int, list[tuple[int, int, int]]]
"""Address of a library in memory, and type, address relative to it and length in bytes of each of
its segments."""


def _libraries() -> list[_Library]:
    """Return the shared libraries of this process, except Python's own modules and the C library."""
    found: list[_Library] = []

    def note(loaded: "ctypes._Pointer[_Loaded]", _size: int, _data: int) -> int:
        library = loaded.contents
        name = Path((library.name or b"").decode(errors="replace")).name
        if name and not name.startswith(("_socket", "linux-vdso", "libc.", "libc-")):
            segments = (library.segments[number] for number in range(library.count))
            found.append(
                (library.base, [(each.type, each.address, each.memory_bytes) for each in segments])
            )
        return 0

    # PYFUNCTYPE and PyDLL keep Python's lock. Otherwise another thread that imports a library could
    # hold Python's lock while it waits for the loader's lock.
    visitor = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p
    )
    ctypes.PyDLL(None).dl_iterate_phdr(visitor(note), None)
    return found


def _replace(library: _Library) -> bool:
    """Write our function over the places in a library that hold the address of `bind`; return
    whether there are any."""
    base, segments = library
    places = list(_places(base, segments))
    for place in places:
        _write(
            place,
            ctypes.cast(_own(), ctypes.c_void_p).value or 0,
            _is_read_only(place, base, segments),
        )
    return bool(places)


def _is_read_only(place: int, base: int, segments: list[tuple[int, int, int]]) -> bool:
    """Return whether the loader has made a place read-only.

    The loader protects whole pages. A last page that reaches beyond the segment stays writable.
    """
    size = mmap.PAGESIZE
    pages = (
        range((base + start) // size, (base + start + length) // size)
        for kind, start, length in segments
        if kind == _PT_GNU_RELRO
    )
    return any(place // size in each for each in pages)


def _places(base: int, segments: list[tuple[int, int, int]]) -> Iterator[int]:
    """Yield the addresses at which a library looks up where `bind` is."""
    for kind, start, length in segments:
        if kind != _PT_DYNAMIC:
            continue
        tags = dict(_array(base + start, length).reshape(-1, 2).tolist())
        if _DT_SYMTAB not in tags:
            continue

        def absolute(tag: int, tags: dict[int, int] = tags) -> int:
            # With glibc the address already includes the base. With musl it does not.
            return tags[tag] if tags[tag] >= base else base + tags[tag]

        for table, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
            if not tags.get(size):
                continue
            # Elf64_Rela: place, symbol << 32 | type, addend
            entries = _array(absolute(table), tags[size]).reshape(-1, 3)
            symbols = entries[:, 1] >> 32
            for symbol in np.unique(symbols[symbols > 0]).tolist():
                name = ctypes.c_uint32.from_address(
                    absolute(_DT_SYMTAB) + symbol * _SYMBOL_BYTES
                ).value
                if ctypes.string_at(absolute(_DT_STRTAB) + name, 5) == b"bind\0":
                    yield from (base + int(place) for place in entries[symbols == symbol, 0])


def _array(address: int, length: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint64 * (length // 8)).from_address(address))


def _write(place: int, value: int, is_read_only: bool) -> None:
    system = ctypes.CDLL(None, use_errno=True)
    page_bytes = mmap.PAGESIZE
    page = ctypes.c_void_p(place - place % page_bytes)
    readable = mmap.PROT_READ
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if system.mprotect(page, ctypes.c_size_t(page_bytes), writable):
        raise OSError(ctypes.get_errno(), "the memory of a library cannot be made writable")
    ctypes.c_uint64.from_address(place).value = value
    if is_read_only:
        system.mprotect(page, ctypes.c_size_t(page_bytes), readable)
