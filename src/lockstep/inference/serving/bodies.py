"""Bodies of requests: read within bounds of size and time, and images taken out of forms."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from lockstep.inference.serving.limits import Limits

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_LARGEST_FORM_HEADERS = 16


class Refused(Exception):
    """A request that is not carried out."""

    def __init__(self, status: int, reason: str, *, retry_after_sec: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.retry_after_sec = status, retry_after_sec


class Bodies:
    """Reads bodies. Together they hold at most `Limits.held_bytes`."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._held = limits, 0

    @contextmanager
    def held(self) -> Iterator["Reading"]:
        """Yield what reads one body. What it holds counts until the block ends."""
        reading = Reading(self, self._limits)
        try:
            yield reading
        finally:
            self._held -= reading.size

    def take(self, size: int) -> None:
        """Count bytes. Raises `Refused` if there are too many together."""
        self._held += size
        if self._held > self._limits.held_bytes:
            raise Refused(429, "too many large requests at the same time; send it again", retry_after_sec=1)


class Reading:
    """Reads one body."""

    def __init__(self, bodies: Bodies, limits: Limits) -> None:
        self._bodies, self._limits, self.size = bodies, limits, 0

    async def read(self, request: Request) -> bytes:
        """Return the body. Raises `Refused` if it is too large, too slow or compressed, and `ClientDisconnect`."""
        limits = self._limits
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise Refused(415, f"the body is compressed ({encoding:.20}); send it without Content-Encoding")
        length = request.headers.get("content-length", "0")
        if int(length) > limits.body_bytes:  # h11 has checked that it is a number
            raise self._too_large(f"{int(length)} bytes")
        parts = []
        try:
            async with asyncio.timeout(limits.timeout_sec):
                async for part in request.stream():
                    self.size += len(part)
                    self._bodies.take(len(part))
                    if self.size > limits.body_bytes:
                        raise self._too_large("more")
                    parts.append(part)
        except TimeoutError:
            reason = f"the body was not sent in {limits.timeout_sec:g} s: {self.size} bytes came; send it again"
            raise Refused(408, reason) from None
        return b"".join(parts)

    def _too_large(self, found: str) -> Refused:
        return Refused(413, f"the body has {found}; expected at most {self._limits.body_mb} MiB")


def image_in(body: bytes, content_type: str) -> bytes:
    """Return the image of a request: its body, or the first file of a form (multipart/form-data). Raises `Refused`."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        return body
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise Refused(400, "the form has no boundary in its Content-Type")
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks(), max_header_count=_LARGEST_FORM_HEADERS)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Refused(400, f"the form cannot be read: {error!s:.200}") from None
    if form.file is None:
        raise Refused(400, "the form has no file; expected one, such as: curl -F image=@photo.jpg")
    return b"".join(form.file)


class _Form:
    """Keeps the first file of a form."""

    def __init__(self) -> None:
        self.file: list[bytes] | None = None
        self._name = self._value = b""
        self._is_file = self._is_first = False

    def callbacks(self) -> "MultipartCallbacks":
        """Return the functions for the parser."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_data,
            "on_part_data": self._add_data,
        }

    def _begin(self) -> None:
        self._name = self._value = b""
        self._is_file = False

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition" and re.search(rb";\s*filename\*?=", self._value, re.IGNORECASE):
            self._is_file = True
        self._name = self._value = b""

    def _begin_data(self) -> None:
        self._is_first = self._is_file and self.file is None
        if self._is_first:
            self.file = []

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_first and self.file is not None:
            self.file.append(data[start:end])
