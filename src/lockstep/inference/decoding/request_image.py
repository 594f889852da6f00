"""The image of a request: its body, or the file of a form."""

import re
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MOST_PARTS = 100
"""Parts of a form. Every part takes time, however few bytes it has."""
_LARGEST_FORM_HEADERS = 16


class BadForm(ValueError):
    """A form that cannot be read, or does not have one file."""


def image_in(body: bytes, content_type: str) -> bytes:
    """Return the image of a request: its body, or the file of a form (multipart/form-data). Fields
    for files that were left empty do not count. Raises `BadForm`."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        return body
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise BadForm("the form has no boundary in its Content-Type")
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks(), max_header_count=_LARGEST_FORM_HEADERS)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise BadForm(f"the form cannot be read: {error!s:.200}") from None
    if not form.files:
        raise BadForm("the form has no file; expected one, such as: curl -F image=@photo.jpg")
    images = list(filter(None, map(b"".join, form.files)))
    if len(images) > 1:
        raise BadForm(f"the form has {len(images)} files; expected one: send a form for each image")
    return images[0] if images else b""


class _Form:
    """Keeps the files of a form."""

    def __init__(self) -> None:
        self.files: list[list[bytes]] = []
        self._name = self._value = b""
        self._is_file = False
        self._parts = 0

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
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise BadForm(f"the form has more than {MOST_PARTS} parts; send the image alone")
        self._name = self._value = b""
        self._is_file = False

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition" and re.search(
            rb";\s*filename\*?=", self._value, re.IGNORECASE
        ):
            self._is_file = True
        self._name = self._value = b""

    def _begin_data(self) -> None:
        if self._is_file:
            self.files.append([])

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.files[-1].append(data[start:end])
