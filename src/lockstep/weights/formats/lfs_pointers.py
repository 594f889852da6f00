"""Files that a clone or a download leaves in place of weights: pointers of Git LFS, web pages, and
packed files.

Their names are those of the weights; only their content says what they are. A pointer is a short
text:

    version https://git-lfs.github.com/spec/v1
    oid sha256:<64 hexadecimal digits>
    size <bytes of the file that it stands for>

Source: Git LFS, docs/spec.md.
"""

import re
from pathlib import Path

from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import WEIGHTS, Limit, open_regular, read_regular

_BEGIN = 1024
"""This many bytes say what a file is. A pointer has fewer."""
_POINTER = b"version https://git-lfs"
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_XML = re.compile(rb"(\xef\xbb\xbf)?\s*<\?xml\b")
_PACKED = {
    "gzip": (0, b"\x1f\x8b\x08"),
    "bzip2": (0, b"BZh"),
    "xz": (0, b"\xfd7zXZ\0"),
    "tar": (257, b"ustar"),
}
"""Kinds of archives, each with the place and the bytes that it is known by."""


def refuse_packed(path: Path, head: bytes) -> None:
    """Raise `CheckpointError` if a file that begins so is packed by tar or compressed. `.pth.tar`
    files are PyTorch's and pass."""
    for kind, (place, magic) in _PACKED.items():
        if head.startswith(magic, place):
            raise CheckpointError(
                f"{path} is an archive ({kind}), not weights: unpack it and name the file in it"
            )


def refuse_stand_in(path: Path, begin: bytes | None = None) -> None:
    """Raise `CheckpointError` that says what a file is, if it is a pointer of Git LFS, a web page
    or XML.

    `begin` are the file's first bytes, or all of them, if they are known. Raises `OSError` if the
    file cannot be read.
    """
    if begin is None:
        with open_regular(path, WEIGHTS) as file:
            begin = file.read(_BEGIN)
    begin = begin[:_BEGIN]
    if begin.startswith(_POINTER):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not weights: a short text that stands for them. Fetch"
            " the weights with git lfs pull, or download the file itself."
        )
    kinds = {"a web page (HTML)": _PAGE, "a server's message or another text (XML)": _XML}
    for kind, pattern in kinds.items():
        if pattern.match(begin):
            raise CheckpointError(
                f"{path} is {kind}, not weights: its address is not that of the file, or the server"
                " refused it. Download the file itself."
            )


def read_whole(path: Path, limit: Limit = WEIGHTS) -> bytes:
    """Return the bytes of a file. Raises `CheckpointError` if it cannot be read, or as
    `refuse_stand_in` does."""
    try:
        data = read_regular(path, limit)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    refuse_stand_in(path, data)
    return data
