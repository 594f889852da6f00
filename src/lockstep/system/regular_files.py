"""Open what a user, or another file, names: regular files of a bounded size, without waiting.

A path can lead to a device that never ends, to a pipe into which nobody writes, or to a file larger
than the memory. Every reader of such a path uses this module. `tests/test_opening.py` lists the
calls that open files in another way, with the reasons.
"""

import errno
import io
import os
import stat
from typing import BinaryIO, NamedTuple


class Limit(NamedTuple):
    """The largest file that is read for a purpose."""

    most_bytes: int
    purpose: str
    """What the file is, in a message."""


IMAGE = Limit(2**30, "an image")
"""The largest image that is decoded has 100 million pixels; with 10 bytes for each, it fits
uncompressed."""
NAMES = Limit(2**28, "a list of images")
"""Lists of paths on the command line and on standard input. ImageNet's 1.3 million paths take about
64 MB."""
RECORDS = Limit(2**30, "records")
"""Texts and arrays with an entry for each image or step: `.lst` and `.idx` files, logs, results, an
index."""
WEIGHTS = Limit(2**33, "weights")
"""A ResNet-152 with velocities and averages takes 0.7 GB."""
TEXT = Limit(2**26, "a description")
"""Names of classes, reports, and the JSON of configurations, checkpoints and graphs."""
SETTINGS = Limit(2**18, "settings")
"""A recipe, a token or a secret."""
ANY_SIZE = Limit(2**63, "a file of images")
"""Files of which only ranges are read, or which are read in parts."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without O_NONBLOCK, opening a pipe waits for a writer."""
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_PART = 2**20
LARGE_BYTES = 2**26
"""Longer ranges of files are read only if they are on the disk: a file of a few kilobytes can claim
to have gigabytes."""
_LEAST_SHARE = 256
"""A range is sparse if less than one part in this many is on the disk."""
_NO_TARGET = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR)
AnyPath = str | os.PathLike[str]


def explain_failure(error: OSError) -> str:
    """Return the reason of an error, without its number and the file's name."""
    return error.strerror or str(error)


def is_failure(error: OSError) -> bool:
    """Return whether an error of a disk, a network or a process may pass. All others mean that the
    path leads to no file, or to one that this module refuses."""
    code = error.errno or 0
    return code not in _NO_TARGET and error.strerror in (None, os.strerror(code))


def open_descriptor(path: AnyPath, limit: Limit) -> tuple[int, os.stat_result]:
    """Open a regular file to read; return the descriptor and the state of the open file.

    Raises `OSError` with the reason if it cannot be opened, is not a regular file, or has more
    bytes than the limit.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except ValueError:  # a NUL, or characters that the system cannot encode
        raise OSError(errno.EINVAL, "no file can have this name", os.fspath(path)) from None
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(
                errno.ENXIO,
                "it is a socket or a missing device, not a regular file",
                os.fspath(path),
            ) from None
        raise
    try:
        # The open file is examined: the path can lead to another one at any time.
        status = os.fstat(descriptor)
        _check(status, limit, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def _check(status: os.stat_result, limit: Limit, path: AnyPath) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
    if status.st_size > limit.most_bytes:
        reason = (
            f"it has {status.st_size:,} bytes; expected at most {limit.most_bytes:,} for"
            f" {limit.purpose}"
        )
        raise OSError(errno.EFBIG, reason, os.fspath(path))


def open_regular(path: AnyPath, limit: Limit) -> io.BufferedReader:
    """Open a regular file to read its bytes. Raises `OSError` as `open_descriptor` does."""
    return os.fdopen(open_descriptor(path, limit)[0], "rb")


def check_regular(path: AnyPath, limit: Limit) -> None:
    """Raise `OSError` as `open_descriptor` does. It is called before libraries that open files by
    their paths."""
    os.close(open_descriptor(path, limit)[0])


def read_regular(path: AnyPath, limit: Limit) -> bytes:
    """Return the bytes of a regular file. Raises `OSError` as `open_descriptor` does."""
    descriptor, status = open_descriptor(path, limit)
    try:
        if is_sparse(descriptor, 0, status.st_size):
            reason = f"nearly all of its {status.st_size:,} bytes were never written"
            raise OSError(errno.EFBIG, reason, os.fspath(path))
        os.lseek(descriptor, 0, os.SEEK_SET)  # finding holes moves the position
        return read_descriptor(descriptor, status.st_size)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise
    finally:
        os.close(descriptor)


def find_data(descriptor: int, begin: int, end: int) -> int:
    """Return where bytes of an open file are on the disk, from `begin` on; `end` if there are none.
    Those before are a hole: zeros that nobody wrote."""
    try:
        return min(os.lseek(descriptor, begin, os.SEEK_DATA), end)
    except OSError as error:
        return end if error.errno == errno.ENXIO else begin


def is_sparse(descriptor: int, begin: int, end: int) -> bool:
    """Return whether a long range of an open file is nearly all holes."""
    least = (end - begin) // _LEAST_SHARE if end - begin > LARGE_BYTES else 0
    written = 0
    while written < least:
        begin = find_data(descriptor, begin, end)
        if begin >= end:
            return True
        hole = min(os.lseek(descriptor, begin, os.SEEK_HOLE), end)
        written += hole - begin
        begin = hole
    return False


def read_descriptor(descriptor: int, size: int) -> bytes:
    """Return the first `size` bytes of an open file, fewer if it ends before.

    Files that claim to have no bytes are not read: some of the system's (/proc) never end.
    """
    data = os.read(descriptor, size)
    while len(data) < size and (more := os.read(descriptor, size - len(data))):
        data += more
    return data


def read_regular_text(
    path: AnyPath, limit: Limit, *, encoding: str = "utf-8", errors: str = "strict"
) -> str:
    """Return the text of a regular file, with every end of a line as a newline.

    Raises `OSError` as `open_descriptor` does, and `UnicodeDecodeError`.
    """
    return io.TextIOWrapper(io.BytesIO(read_regular(path, limit)), encoding, errors).read()


def read_stream(stream: BinaryIO, limit: Limit, begin: bytes = b"") -> bytes:
    """Return `begin`, which was read before, and the rest of a stream. Raises `OSError` if they
    exceed the limit."""
    read = io.BytesIO()
    size = read.write(begin)
    while part := stream.read(min(_PART, limit.most_bytes + 1 - size)):
        size += read.write(part)
        if size > limit.most_bytes:
            reason = f"it is longer than {limit.most_bytes:,} bytes, the limit for {limit.purpose}"
            raise OSError(errno.EFBIG, reason)
    return read.getvalue()
