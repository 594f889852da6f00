"""The processes that decode: one that has imported what decoding needs, and its forks, which
decode.

    python -m lockstep.inference.decoding.process DESCRIPTOR

The descriptor is that of a socket (SOCK_SEQPACKET). Its first message is `Settings` as JSON. Each
further one is a command: start a decoder, which gets a socket and shared memory as descriptors; end
one; lower its priority. A decoder is sent the length of a body in the shared memory; it writes the
pixels there, and answers with `[kind, reason]`. Decoders end with the process that forked them, and
that one ends when the other side of its socket is closed, so nothing outlives the server.
"""

import ctypes
import json
import mmap
import os
import re
import signal
import socket
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from lockstep.data.decoding.decode import header_size
from lockstep.data.decoding.image_formats import readable_formats
from lockstep.data.decoding.size_limits import OverBudget, TooManyPixels
from lockstep.inference.images import read_square
from lockstep.recipes import Recipe

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

DECODED = "decoded"
BAD_FORM = "bad form"
OVER_BUDGET = "over budget"
BAD_IMAGE = "bad image"
"""The kinds of answers."""
START = "start"
END = "end"
YIELD = "yield"
"""The commands."""
LARGEST_MESSAGE = 2**16
_LONGEST_REASON = 500
MOST_PARTS = 100
"""Parts of a form. Every part takes time, however few bytes it has."""
_LARGEST_FORM_HEADERS = 16
_PR_SET_PDEATHSIG = 1
_LOWEST_PRIORITY = 19
_FIRST_FOR_OOM = "500"
"""If memory runs out, the system ends a decoder before other processes of this size."""


@dataclass(frozen=True)
class Settings:
    """What all decoders have in common."""

    recipe: dict[str, Any]
    """The fields of the recipe whose evaluation the images are for."""
    most_pixels: int
    """The limit of pixels of an image."""
    side: int
    """Height and width of a decoded image."""
    body_bytes: int
    """The size of the largest body."""

    @property
    def body_place(self) -> int:
        """Where a body begins in the shared memory: after the pixels, at the start of a page."""
        return -(-self.side * self.side * 3 // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def memory_bytes(self) -> int:
        """The size of the shared memory."""
        return self.body_place + self.body_bytes

    def encode(self) -> bytes:
        """Return the message."""
        return json.dumps(asdict(self), allow_nan=False).encode()


def main(descriptor: int) -> None:
    """Carry out commands until the other side is closed."""
    # They may be sent to all processes; the server decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    Image.init()
    readable_formats()
    control = socket.socket(fileno=descriptor)
    settings = Settings(**json.loads(control.recv(LARGEST_MESSAGE)))
    recipe = Recipe.of(settings.recipe)
    decoders = dict[int, int]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, LARGEST_MESSAGE, 2)
        if not message:
            return
        command, number = json.loads(message)
        if command == START:
            # If there are too many processes, the closed socket reports it.
            with suppress(BlockingIOError):
                process = os.fork()
                if not process:
                    control.close()
                    _decode_on(descriptors[0], descriptors[1], settings, recipe)
                decoders[number] = process
            for opened in descriptors:
                os.close(opened)
        elif command == END and number in decoders:
            process = decoders.pop(number)
            os.kill(process, signal.SIGKILL)  # nobody has waited for it: the number is still valid
            os.waitpid(process, 0)
        elif command == YIELD and number in decoders:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, decoders[number], _LOWEST_PRIORITY)


def _decode_on(descriptor: int, shared: int, settings: Settings, recipe: Recipe) -> None:
    """Be a decoder. It does not return."""
    try:
        _end_with(os.getppid())
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stderr.fileno())  # libraries print warnings of damaged files
        with (
            socket.socket(fileno=descriptor) as requests,
            mmap.mmap(shared, settings.memory_bytes) as memory,
        ):
            _decode(requests, memory, settings, recipe)
    finally:
        os._exit(0)


def _end_with(parent: int) -> None:
    """Let this process end when its parent does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_FIRST_FOR_OOM, encoding="ascii")
    if os.getppid() != parent:
        os._exit(0)


def _decode(requests: socket.socket, memory: mmap.mmap, settings: Settings, recipe: Recipe) -> None:
    side = settings.side
    place = settings.body_place
    pixels = np.frombuffer(memory, np.uint8, side * side * 3).reshape(side, side, 3)
    requests.send(b"ready")
    while message := requests.recv(LARGEST_MESSAGE):
        length, content_type = json.loads(message)
        body = memory[place : place + length]
        kind, reason = _answer(body, content_type, recipe, settings.most_pixels, pixels)
        requests.send(json.dumps([kind, reason[:_LONGEST_REASON]], allow_nan=False).encode())


def _answer(
    body: bytes, content_type: str | None, recipe: Recipe, most_pixels: int, pixels: np.ndarray
) -> tuple[str, str]:
    """Decode the image of a body to `pixels`. Return the kind of the answer and, if it is not
    `DECODED`, the reason."""
    try:
        data = body if content_type is None else image_in(body, content_type)
        height, width = header_size(data)
        if height * width > most_pixels:
            raise TooManyPixels(
                f"{width} x {height} pixels are too many: at most {most_pixels:,}; reduce the image"
            )
        read_square(data, recipe, pixels)
    except BadForm as error:
        return BAD_FORM, str(error)
    except OverBudget as error:
        return OVER_BUDGET, str(error)
    except MemoryError:
        return OVER_BUDGET, "there is not enough memory to decode it; reduce the image"
    except ValueError as error:
        return BAD_IMAGE, str(error)
    return DECODED, ""


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
