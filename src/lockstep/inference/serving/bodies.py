"""Bodies of requests, read within bounds of size and time."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.requests import Request

from lockstep.inference.serving.limits import STALLED_SEC, Limits


class Refused(Exception):
    """A request that is not carried out."""

    def __init__(self, status: int, reason: str, *, retry_after_sec: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after_sec = retry_after_sec


class Bodies:
    """Reads bodies. Together they hold at most `Limits.all_bodies_bytes`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.size = 0
        """Bytes of bodies in memory."""
        self.coming = set[Reading]()
        """The readers of incomplete bodies."""

    @contextmanager
    def hold(self) -> Iterator["Reading"]:
        """Yield a reader of one body. Its bytes count until the block ends."""
        reading = Reading(self, self._limits)
        try:
            yield reading
        finally:
            self.coming.discard(reading)
            self.size -= reading.size

    def take(self, reading: "Reading", size: int) -> None:
        """Count bytes of a body. Raises `Refused` if there are too many together and none of the
        bodies is stalled."""
        reading.size += size
        self.size += size
        while self.size > self._limits.all_bodies_bytes:
            stalled = min(self.coming - {reading}, key=lambda other: other.since, default=reading)
            if stalled is reading or time.monotonic() - stalled.since < STALLED_SEC:
                reason = "too many large requests at the same time; send the request again"
                raise Refused(429, reason, retry_after_sec=1)
            self.size -= stalled.drop()
            self.coming.discard(stalled)


class Reading:
    """Reads one body."""

    def __init__(self, bodies: Bodies, limits: Limits) -> None:
        self._bodies = bodies
        self._limits = limits
        self.size = 0
        self.since = time.monotonic()
        """When the last byte came."""
        self._parts: list[bytes] = []
        self._is_dropped = False
        self._time = asyncio.timeout(limits.timeout_sec)

    def drop(self) -> int:
        """Let `read` raise `Refused`. Return the bytes that are not held any more."""
        size = self.size
        self.size = 0
        self._is_dropped = True
        self._parts.clear()
        with suppress(RuntimeError):  # its time is over at this moment
            self._time.reschedule(asyncio.get_running_loop().time())
        return size

    async def read(self, request: Request) -> bytes:
        """Return the body. Raises `Refused` if it is too large, too slow or compressed, and
        `ClientDisconnect`."""
        limits = self._limits
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            reason = f"the body is compressed ({encoding:.20}); send it without Content-Encoding"
            raise Refused(415, reason)
        length = request.headers.get("content-length", "0")
        if int(length) > limits.body_bytes:  # h11 has checked that it is a number
            raise self._refuse_size(f"{int(length)} bytes")
        self._bodies.coming.add(self)
        try:
            async with self._time:
                async for part in request.stream():
                    self.since = time.monotonic()
                    self._bodies.take(self, len(part))
                    if self.size > limits.body_bytes:
                        raise self._refuse_size("more")
                    self._parts.append(part)
                if self._is_dropped:  # its last bytes came at that moment
                    raise TimeoutError
        except TimeoutError:
            reason = (
                f"the body did not arrive within {limits.timeout_sec:g} s, or stalled while others"
                " arrived; send the request again"
            )
            raise Refused(408, reason) from None
        self._bodies.coming.discard(self)
        parts = self._parts
        self._parts = []
        return b"".join(parts)

    def _refuse_size(self, size: str) -> Refused:
        return Refused(413, f"the body has {size}; expected at most {self._limits.max_body_mb} MiB")
