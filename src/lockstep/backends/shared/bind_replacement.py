"""Replacing the C function `bind` in the libraries that this process has loaded, on 64-bit Linux.

Every library has a table with the addresses of the functions that it calls from other libraries.
`replace_bind` writes the address of a function of ours over that of `bind` in these tables. System
V ABI, "Dynamic Linking", describes them.

A shim loaded by LD_PRELOAD would be simpler, but it must exist before the process starts. Ranks
of srun and mpirun know their address only after they have met, in the middle of a user's program,
which would have to start again. The shim would also need a compiler or a built wheel, without which
TensorFlow and Paddle could not be launched, and every child process would inherit it. A setting
would be simpler still, but TensorFlow's server and Paddle's store have the address as a constant in
their code.
"""

import ctypes
import errno
import mmap
import socket
import struct
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.system.ranks import LOOPBACK, listen_address


def replace_bind() -> int:
    """Let the loaded libraries call `_bind` instead of `bind`; return the number of libraries.

    Raises `OSError`, `AttributeError` or `ValueError` where that is not possible.
    """
    if struct.calcsize("P") != 8:
        raise OSError("this is not a 64-bit system")
    count = 0
    for library in _list_libraries():
        places = _find_places(library)
        for place in places:
            _write(place, library)
        count += bool(places)
    return count


# The function that replaces `bind`

_BindType = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)


def _bind(number: int, address: int, length: int) -> int:
    try:
        requested = ctypes.string_at(address, length) if address else b""
        confined = _confine_address(requested, listen_address() or LOOPBACK)
        # The caller reads the errno of this call.
        return ctypes.CDLL(None, use_errno=True).bind(number, confined, len(confined))
    except BaseException:
        # A signal handler can raise here. Without this, C would assume that the socket is bound.
        ctypes.set_errno(errno.EACCES)
        return -1


def _confine_address(requested: bytes, own: str) -> bytes:
    """Return a socket address in which the address of all interfaces is replaced by an IPv4
    address.

    Other addresses are returned unchanged.
    """
    family = int.from_bytes(requested[:2], sys.byteorder)
    v4 = socket.inet_pton(socket.AF_INET, own)
    # family, port, address
    if family == socket.AF_INET and requested[4:8] == bytes(4):
        return requested[:4] + v4 + requested[8:]
    # family, port, flow, address
    if family == socket.AF_INET6 and requested[8:24] in (bytes(16), _MAPPED + bytes(4)):
        return requested[:8] + _MAPPED + v4 + requested[24:]
    return requested


_MAPPED = bytes(10) + b"\xff\xff"
"""Prefix of an IPv4 address within IPv6. TensorFlow's sockets accept both, and its ranks connect by
IPv4."""


@cache
def _own_bind() -> Any:
    """Return `_bind` as a C function: always the same one, since libraries keep its address."""
    return _BindType(_bind)


# The libraries of this process, as the loader has them in memory

_PT_DYNAMIC = 2
_PT_GNU_RELRO = 0x6474E552
_DT_PLTRELSZ = 2
_DT_STRTAB = 5
_DT_SYMTAB = 6
_DT_RELA = 7
_DT_RELASZ = 8
_DT_JMPREL = 23
_SYMBOL_BYTES = 24


class _ProgramHeader(ctypes.Structure):
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


class _LoadedLibrary(ctypes.Structure):
    """The first fields of dl_phdr_info."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.POINTER(_ProgramHeader)),
        ("count", ctypes.c_uint16),
    )


class _Segment(NamedTuple):
    """A part of a library in memory, between two addresses."""

    kind: int
    start: int
    end: int


class _Library(NamedTuple):
    base: int
    """Address of the library in memory."""
    segments: list[_Segment]


def _list_libraries() -> list[_Library]:
    """Return the shared libraries of this process, except Python's own and the C library."""
    libraries: list[_Library] = []

    def note(info: "ctypes._Pointer[_LoadedLibrary]", _size: int, _data: int) -> int:
        loaded = info.contents
        name = Path((loaded.name or b"").decode(errors="replace")).name
        if name and not name.startswith(("_socket", "linux-vdso", "libc.", "libc-")):
            segments = []
            for header in loaded.headers[: loaded.count]:
                start = loaded.base + header.address
                segments.append(_Segment(header.type, start, start + header.memory_bytes))
            libraries.append(_Library(loaded.base, segments))
        return 0

    # PYFUNCTYPE and PyDLL keep Python's lock. Otherwise another thread that imports a library could
    # hold Python's lock while it waits for the loader's lock.
    visitor = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_LoadedLibrary), ctypes.c_size_t, ctypes.c_void_p
    )
    ctypes.PyDLL(None).dl_iterate_phdr(visitor(note), None)
    return libraries


def _find_places(library: _Library) -> list[int]:
    """Return the addresses at which a library looks up where `bind` is."""
    places: list[int] = []
    for segment in library.segments:
        if segment.kind == _PT_DYNAMIC:
            tags = dict(_read_words(segment.start, segment.end).reshape(-1, 2).tolist())
            if _DT_SYMTAB in tags:
                places += _find_places_in_tables(library.base, tags)
    return places


def _find_places_in_tables(base: int, tags: dict[int, int]) -> Iterator[int]:
    def locate(tag: int) -> int:
        # With glibc the address already includes the base. With musl it does not.
        return tags[tag] if tags[tag] >= base else base + tags[tag]

    for table, size in ((_DT_JMPREL, _DT_PLTRELSZ), (_DT_RELA, _DT_RELASZ)):
        if not tags.get(size):
            continue
        # Elf64_Rela: place, symbol << 32 | type, addend
        entries = _read_words(locate(table), locate(table) + tags[size]).reshape(-1, 3)
        symbols = entries[:, 1] >> 32
        for symbol in np.unique(symbols[symbols > 0]).tolist():
            entry = locate(_DT_SYMTAB) + symbol * _SYMBOL_BYTES
            name = locate(_DT_STRTAB) + ctypes.c_uint32.from_address(entry).value
            if ctypes.string_at(name, 5) == b"bind\0":
                yield from (base + int(place) for place in entries[symbols == symbol, 0])


def _read_words(start: int, end: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint64 * ((end - start) // 8)).from_address(start))


def _write(place: int, library: _Library) -> None:
    """Write the address of `_bind` to a place in a library's memory."""
    system = ctypes.CDLL(None, use_errno=True)
    page_bytes = mmap.PAGESIZE
    page = ctypes.c_void_p(place - place % page_bytes)
    readable = mmap.PROT_READ
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if system.mprotect(page, ctypes.c_size_t(page_bytes), writable):
        raise OSError(ctypes.get_errno(), "the memory of a library cannot be made writable")
    own = ctypes.cast(_own_bind(), ctypes.c_void_p).value or 0
    ctypes.c_uint64.from_address(place).value = own
    if _is_read_only(place, library):
        system.mprotect(page, ctypes.c_size_t(page_bytes), readable)


def _is_read_only(place: int, library: _Library) -> bool:
    """Return whether the loader has made a place read-only.

    The loader protects whole pages. A last page that reaches beyond the segment stays writable.
    """
    page = place // mmap.PAGESIZE
    return any(
        segment.start // mmap.PAGESIZE <= page < segment.end // mmap.PAGESIZE
        for segment in library.segments
        if segment.kind == _PT_GNU_RELRO
    )
