"""Contents that a stranger can give to any file that Lockstep reads back."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np


def link(target: str) -> Callable[[Path], None]:
    """Return a function that writes a link."""
    return lambda file: file.symlink_to(target)


def write(data: bytes) -> Callable[[Path], object]:
    """Return a function that writes bytes."""
    return lambda file: file.write_bytes(data)


def write_bomb(file: Path) -> None:
    """Write an archive whose array says that it has 1 TiB."""
    with zipfile.ZipFile(file, "w") as archive, archive.open("step.npy", "w") as member:
        header = {"descr": "|u1", "fortran_order": False, "shape": (2**40,)}
        np.lib.format.write_array_header_1_0(member, header)
        member.write(bytes(2**10))


HOSTILE: dict[str, Callable[[Path], object]] = {
    "deep": write(b"[" * 200_000),
    "other types": write(b'{"id": 1, "data": [], "execution": 3, "history": 7, "final": 2}'),
    "a list": write(b"[1, 2]\n"),
    "not text": write(b"\xff\xfe\x00"),
    "empty": write(b""),
    "huge numbers": write(b'{"id": 1e999, "step": ' + b"9" * 5000 + b"}\n"),
    "an array": write_bomb,
    "a device": link("/dev/zero"),
    "a folder": lambda file: file.mkdir(),
    "a fifo": os.mkfifo,
}
