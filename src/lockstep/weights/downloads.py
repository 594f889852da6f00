"""Download a file: over HTTPS, in parts that resume, verified before it gets its name."""

import errno
import fcntl
import http
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shlex import quote
from typing import IO, Any
from urllib.parse import urlsplit

from lockstep.system.errors import CheckpointError
from lockstep.system.files import write_text
from lockstep.system.regular_files import SETTINGS, WEIGHTS, read_regular_text
from lockstep.system.version import version
from lockstep.weights.fingerprints import hash_file

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there, and all bytes of the file; None if the server does not say
how many there are."""
_TIMEOUT_SEC = 30
"""A server may send nothing for this long."""
_ATTEMPTS = 5
"""The connection may break this often, as long as each one brings some bytes."""
_PART = 2**20
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SIZE = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
"""A `Content-Range` (RFC 9110): the first byte, the last byte, and the size of the file."""


def check_address(address: str) -> None:
    """Raise `CheckpointError` unless an address is `https://`, or `http://` of this machine."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        host.encode("idna")
        is_usable = re.fullmatch("[!-~]+", address) and host and parts.port != 0
    except ValueError:
        is_usable = False
    is_safe = is_usable and (
        parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK)
    )
    if is_safe and "@" not in parts.netloc:
        return
    raise CheckpointError(
        f"{address!a:.200} cannot be downloaded; expected https://HOST/PATH without a user's name,"
        " in visible ASCII (other characters as %XX)"
    )


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to HTTPS. Only this machine may redirect to this machine."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        check_address(newurl)
        if not newurl.startswith("https:") and req.host.rpartition(":")[0] not in _LOOPBACK:
            raise CheckpointError(
                f"{req.full_url:.200} redirects to {newurl:.200}; expected an https:// address"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Broken(Exception):
    """A connection that ended before the file did."""


class _OtherPart(OSError):
    """An answer that is not the missing part of a file."""


def download(
    address: str, target: Path, *, sha256: str = "", progress: Progress | None = None
) -> None:
    """Download a file to `target`, unless it is there: then its digest is compared.

    - What an interrupted download leaves, `target` with `.part` added, is continued: if the digest
      is known, or the server still has the same file.
    - `sha256` is the start of the file's SHA-256 in hexadecimal digits. A download with a different
      digest is removed.
    - One process downloads at a time; others wait for it.

    Raises `CheckpointError` with what to do without a network.
    """
    check_address(address)
    if target.exists():
        if sha256:
            _check_digest(target, sha256)
        return
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(part) as file:
            if target.exists():
                part.unlink(missing_ok=True)
                return
            if not (sha256 and file.tell() and hash_file(part).startswith(sha256.lower())):
                _fetch(address, file, part, can_resume=bool(sha256), progress=progress)
                _check_digest(part, sha256, address=address)
            part.replace(target)
            _validator_path(part).unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            reason = f"the server answers {error.code} {error.reason}"
            error.close()
        elif error.errno == errno.ENOSPC:
            reason = f"no space is left for {part}; the same command resumes"
        else:
            reason = str(getattr(error, "reason", None) or error.strerror or error)
        raise CheckpointError(
            f"{address} cannot be downloaded: {reason}. To download it elsewhere: curl -fL -o"
            f" {quote(target.name)} {quote(address)}; put the file at {target}"
        ) from None


@contextmanager
def _lock(part: Path) -> Iterator[IO[bytes]]:
    """Open a part to append to it, when no other process does that."""
    while True:
        with part.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The process that had the lock before may have renamed or removed this file.
            if _is_same_file(part, file):
                yield file
                return


def _is_same_file(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _fetch(
    address: str, file: IO[bytes], part: Path, *, can_resume: bool, progress: Progress | None
) -> None:
    """Append to an open file what it lacks of the file at an address. Raises `OSError`."""
    for _ in range(_ATTEMPTS):
        before = file.tell()
        try:
            _receive(address, file, part, can_resume=can_resume, progress=progress)
            return
        except _OtherPart:
            if not before:
                raise
            _empty(file)
        except (_Broken, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            file.flush()
            if file.tell() <= before:
                raise OSError(f"the connection broke: {error or type(error).__name__}") from None
    raise OSError(f"the connection broke {_ATTEMPTS} times; the same command resumes")


def _receive(
    address: str, file: IO[bytes], part: Path, *, can_resume: bool, progress: Progress | None
) -> None:
    request = urllib.request.Request(address, headers={"User-Agent": f"lockstep/{version()}"})
    start = file.tell()
    validator = _read_validator(part)
    if start and (can_resume or validator):
        request.add_header("Range", f"bytes={start}-")
        if validator:
            request.add_header("If-Range", validator)
    else:
        _empty(file)
        start = 0
    opener = urllib.request.build_opener(_SafeRedirects)
    try:
        response = opener.open(request, timeout=_TIMEOUT_SEC)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise
        error.close()
        raise _OtherPart("the part belongs to another file, or is longer than the file") from None
    with closing(response):
        total = _read_total(response, start, validator)
        if total is not None and total > WEIGHTS.most_bytes:
            raise OSError(f"it has {total:,} bytes; expected at most {WEIGHTS.most_bytes:,}")
        if response.status == http.HTTPStatus.OK:
            _empty(file)
            start = 0
        write_text(_validator_path(part), response.headers.get("ETag", "").strip())
        _copy(response, file, start, total, progress)


def _read_total(response: Any, start: int, validator: str) -> int | None:
    """Return the size of a file whose bytes an answer has, all or those from `start` on; None if
    the server does not say.

    Raises `_OtherPart` if the answer has other bytes, and `OSError` if it has no file.
    """
    headers = response.headers
    length = ", ".join(dict.fromkeys(headers.get_all("Content-Length", ["0"]))).strip()
    if not _SIZE.fullmatch(length):
        raise OSError(f"its Content-Length is {length!a:.40}; expected a number of bytes")
    if response.status == http.HTTPStatus.OK:
        return int(length) if "Content-Length" in headers else None
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        raise OSError(f"the server answers {response.status}; expected 200 with the file")
    text = headers.get("Content-Range", "").strip()
    bounds = _RANGE.fullmatch(text)
    is_same = not validator or headers.get("ETag", "").strip() == validator
    if start and bounds and is_same:
        first, last, total = map(int, bounds.groups())
        if first == start <= last < total:
            return total
    raise _OtherPart(f"the server sends a part of a file ({text!a:.80}); expected all of it")


def _empty(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _copy(
    response: IO[bytes], file: IO[bytes], done: int, total: int | None, progress: Progress | None
) -> None:
    while data := response.read(_PART):
        done += len(data)
        if done > WEIGHTS.most_bytes:
            raise OSError(f"it has more than {WEIGHTS.most_bytes:,} bytes")
        file.write(data)
        if progress is not None:
            progress(done, total)
    file.flush()
    os.fsync(file.fileno())
    if total is not None and done != total:
        raise _Broken(f"{done:,} of {total:,} bytes arrived")


def _validator_path(part: Path) -> Path:
    """Return the file with the entity tag (RFC 9110) of the server's file that a part is of."""
    return part.with_name(part.name + ".etag")


def _read_validator(part: Path) -> str:
    """Return the entity tag of a part; "" if there is none, or only a weak one, which does not say
    that bytes are equal."""
    try:
        tag = read_regular_text(_validator_path(part), SETTINGS)
    except (OSError, ValueError):
        return ""
    return tag if re.fullmatch('"[ -~]*"', tag) else ""


def _check_digest(file: Path, sha256: str, *, address: str = "") -> None:
    """Raise `CheckpointError` if the SHA-256 of a file does not begin as expected. With an address,
    it was downloaded a moment before, and is removed."""
    digest = hash_file(file)
    if digest.startswith(sha256.lower()):
        return
    hint = "remove it, and the same command downloads it again"
    if address:
        file.unlink()
        hint = "it was removed"
    raise CheckpointError(
        f"{address or file} has the SHA-256 {digest}; expected one that begins with {sha256}: the"
        f" file is damaged, or not the expected one; {hint}"
    )
