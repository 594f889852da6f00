"""A pool of processes that decode, for one event loop. See `process` for what runs in them.

Each decoder works on one image at a time. One that takes longer than `PATIENT_SEC` for an image is
set aside: it gets the lowest priority, and another decoder takes its place, so that images behind
it do not wait for it. If nobody waits for an image any more, because its time is over or its client
has left, its decoder is ended. Another one is forked in milliseconds.
"""

import asyncio
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

import lockstep
from lockstep.inference.decoding.process import (
    DECODED,
    END,
    LARGEST_MESSAGE,
    START,
    YIELD,
    Settings,
)

PATIENT_SEC = 1.0
"""The seconds after which others do not wait for an image. A photo of 50 million pixels takes less
on an idle core."""
MOST_SET_ASIDE = 4
"""At most this many decoders are set aside. If there are more, the first of them is ended."""
_STARTING_SEC = 60.0
"""The seconds in which a process must be ready to decode. It takes less than one unless the machine
is very busy."""
_AGAIN_SEC = 1.0
"""The seconds before another attempt to start a decoder."""
_KEPT_BYTES = 2**20
"""A decoder keeps this much memory for bodies. What larger ones took is freed."""
_LINES_OF_ERROR = 20
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Only a process with one thread can be forked safely."""


class NotDecoded(Exception):
    """A body has no image that can be decoded. `kind` is one of `process`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class GivenUp(Exception):
    """A decoder was ended before the image was decoded, since other images were waiting."""


class _Forker:
    """The process that forks decoders."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(Path(lockstep.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = (
            os.environ
            | _ONE_THREAD
            | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
        )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        with theirs:
            module = "lockstep.inference.decoding.process"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for the server
            )
        ours.setblocking(False)
        self._socket = ours
        self._unsent = deque[bytes]()

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises `OSError` if the process has ended or its buffer is full."""
        socket.send_fds(self._socket, [message], descriptors)

    def start(self, number: int, descriptors: Sequence[int]) -> None:
        """Start a decoder. Raises `OSError`, as `send` does."""
        self.send(_encode_command(START, number), descriptors)

    def command(self, command: str, number: int) -> None:
        """Send a command about a decoder, later if the buffer of the process is full. If the
        process has ended, its decoders have too, and nothing is sent."""
        if self._errors.closed:
            return
        self._unsent.append(_encode_command(command, number))
        if len(self._unsent) == 1:
            self._send_commands()

    def _send_commands(self) -> None:
        """Send commands until the buffer is full, and continue when it has space."""
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                self.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            loop.add_writer(self._socket, self._send_commands)
            return
        except OSError:
            self._unsent.clear()
        loop.remove_writer(self._socket)

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def close(self) -> str:
        """End the process, and with it its decoders. Return the last lines that it wrote to stderr;
        "" the second time."""
        if self._errors.closed:
            return ""
        with suppress(RuntimeError):  # the event loop has ended
            asyncio.get_running_loop().remove_writer(self._socket)
        self._socket.close()
        self._process.kill()
        self._process.wait()
        with self._errors as errors:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_LINES_OF_ERROR:])


def _encode_command(command: str, number: int) -> bytes:
    return json.dumps([command, number], allow_nan=False).encode()


class _Decoder:
    """A process that decodes one image at a time."""

    def __init__(
        self, number: int, requests: socket.socket, memory: mmap.mmap, settings: Settings
    ) -> None:
        self.number = number
        self.is_given_up = False
        self._requests = requests
        self._memory = memory
        self._settings = settings
        self._pixels = np.frombuffer(memory, np.uint8, settings.side**2 * 3).reshape(
            settings.side, settings.side, 3
        )

    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        try:
            return bool(self._requests.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def become_ready(self) -> None:
        """Wait for the process. Raises `OSError` if it ends, and `TimeoutError`."""
        async with asyncio.timeout(_STARTING_SEC):
            if not await asyncio.get_running_loop().sock_recv(self._requests, LARGEST_MESSAGE):
                raise OSError("the process that decodes has ended")

    async def decode(self, body: bytes, content_type: str | None, out: np.ndarray) -> None:
        """Decode the image of a body to `out`, uint8 [side, side, 3]. Raises `NotDecoded`, and
        `OSError` if it ends."""
        loop = asyncio.get_running_loop()
        place = self._settings.body_place
        self._memory[place : place + len(body)] = body
        await loop.sock_sendall(
            self._requests, json.dumps([len(body), content_type], allow_nan=False).encode()
        )
        answer = await loop.sock_recv(self._requests, LARGEST_MESSAGE)
        if not answer:
            raise OSError("the process that decodes has ended")
        if len(body) > _KEPT_BYTES and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE, place)
        kind, reason = json.loads(answer)
        if kind != DECODED:
            raise NotDecoded(kind, reason)
        out[:] = self._pixels

    def give_up(self) -> None:
        """Let `decode` raise `OSError`."""
        self.is_given_up = True
        with suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free what this process holds for it."""
        self._requests.close()
        del self._pixels
        self._memory.close()


class Decoders:
    """A pool of processes that decode. Construct it anywhere, but use it in one event loop."""

    def __init__(self, places: int, report: Callable[[str], None]) -> None:
        """Start the process that forks decoders, which takes a while to import what it needs.

        `places` is the number of images that are decoded at the same time. `report` is called with
        failures.
        """
        self._places = places
        self._report = report
        self._forker: _Forker | None = _Forker()
        self._settings: Settings | None = None
        self._numbers = count()
        self._fresh = set[_Decoder]()  # idle, or at work for less than `PATIENT_SEC`
        self._idle = deque[_Decoder]()
        self._set_aside = list[_Decoder]()
        self._arrivals = asyncio.Semaphore(0)
        """One for each idle decoder; more, if idle ones have ended."""
        self._starting = 0
        self._lacks = asyncio.Event()
        """Set when decoders may be missing."""
        self._filling: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether an image can be decoded now, or soon."""
        return any(decoder.is_alive() for decoder in self._fresh)

    def mend(self) -> None:
        """Start decoders in place of those that have ended. To be called now and then."""
        for decoder in list(self._idle):
            if not decoder.is_alive():
                self._idle.remove(decoder)
                self._end(decoder)

    async def start(self, settings: Settings) -> None:
        """Start all decoders. Raises `OSError` if none can be started, and `TimeoutError`."""
        self._settings = settings
        assert self._forker is not None
        self._forker.send(settings.encode())
        self._add(await self._fork())
        self._lacks.set()
        self._filling = asyncio.create_task(self._fill())

    def close(self) -> None:
        """End all processes."""
        if self._filling is not None:
            self._filling.cancel()
        while self._idle:
            self._idle.pop().close()
        if self._forker is not None:
            self._forker.close()
            self._forker = None

    async def decode(self, body: bytes, content_type: str | None, out: np.ndarray) -> None:
        """Decode the image of a body to `out`, uint8 [side, side, 3]. `content_type` is that of a
        form, otherwise None.

        Raises `NotDecoded` with the reason, `GivenUp`, and `OSError` if the process crashes. If it
        is cancelled, decoding ends.
        """
        decoder = await self._take()
        timer = asyncio.get_running_loop().call_later(PATIENT_SEC, self._put_aside, decoder)
        is_usable = False
        try:
            await decoder.decode(body, content_type, out)
            is_usable = True
        except NotDecoded:
            is_usable = True
            raise
        except OSError:
            if decoder.is_given_up:
                raise GivenUp from None
            raise
        finally:
            timer.cancel()
            if is_usable and decoder in self._fresh:
                self._put_back(decoder)
            else:
                self._end(decoder)

    async def _take(self) -> _Decoder:
        """Wait for an idle decoder."""
        while True:
            await self._arrivals.acquire()
            if self._idle:
                decoder = self._idle.pop()
                if decoder.is_alive():
                    return decoder
                self._end(decoder)

    def _add(self, decoder: _Decoder) -> None:
        self._fresh.add(decoder)
        self._put_back(decoder)

    def _put_back(self, decoder: _Decoder) -> None:
        self._idle.append(decoder)
        self._arrivals.release()

    def _put_aside(self, decoder: _Decoder) -> None:
        """Set a slow decoder aside, so that others do not wait for it."""
        self._fresh.discard(decoder)
        self._set_aside.append(decoder)
        self._command(YIELD, decoder)
        if len(self._set_aside) > MOST_SET_ASIDE:
            self._set_aside.pop(0).give_up()
        self._lacks.set()

    def _end(self, decoder: _Decoder) -> None:
        self._fresh.discard(decoder)
        if decoder in self._set_aside:
            self._set_aside.remove(decoder)
        self._command(END, decoder)
        decoder.close()
        self._lacks.set()

    def _command(self, command: str, decoder: _Decoder) -> None:
        if self._forker is not None:
            self._forker.command(command, decoder.number)

    async def _fill(self) -> None:
        """Start decoders whenever some are missing. All are started in this task, so that none is
        started after the event loop has cancelled its tasks."""
        async with asyncio.TaskGroup() as group:
            while await self._lacks.wait():
                self._lacks.clear()
                while len(self._fresh) + self._starting < self._places:
                    self._starting += 1
                    group.create_task(self._start_decoder())

    async def _start_decoder(self) -> None:
        """Start a decoder, with as many attempts as it takes."""
        decoder = None
        while decoder is None:
            forker = self._forker
            assert forker is not None
            try:
                decoder = await self._fork()
            except (OSError, TimeoutError) as error:
                self._report(f"a process that decodes could not be started: {error!r}")
                await asyncio.sleep(_AGAIN_SEC)
                is_stuck = isinstance(error, TimeoutError) or forker.has_ended()
                if is_stuck and self._forker is forker:
                    self._replace(forker)
        self._starting -= 1
        self._add(decoder)

    def _replace(self, forker: _Forker) -> None:
        """Replace the process that forks decoders. It takes its decoders with it."""
        assert self._settings is not None
        lines = forker.close()
        if lines:
            self._report(lines)
        try:
            self._forker = _Forker()
            self._forker.send(self._settings.encode())
        except OSError as error:  # no memory or descriptors: there is another attempt
            self._report(f"the process that starts decoders could not be started: {error!r}")

    async def _fork(self) -> _Decoder:
        """Return another decoder. Raises `OSError` and `TimeoutError` if it cannot be started."""
        assert self._settings is not None
        assert self._forker is not None
        number = next(self._numbers)
        settings = self._settings
        shared = os.memfd_create("lockstep-decoder")
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            os.close(shared)
            raise
        ours.setblocking(False)
        try:
            os.ftruncate(shared, settings.memory_bytes)
            decoder = _Decoder(number, ours, mmap.mmap(shared, settings.memory_bytes), settings)
            self._forker.start(number, [theirs.fileno(), shared])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(shared)
        try:
            await decoder.become_ready()
        except BaseException:
            self._command(END, decoder)
            decoder.close()
            raise
        return decoder
