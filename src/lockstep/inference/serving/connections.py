"""uvicorn's protocol and server with what they lack: limits for clients that send or read too
slowly, and a drained stop."""

import asyncio
import os
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.inference.serving.limits import STALLED_SEC, Limits
from lockstep.inference.serving.logs import log

_REFUSING_TICKS = 5
"""How long requests are refused, after they were still accepted and before the server stops
listening. These are ticks and not seconds: if the machine stalls, nothing is refused, and clients
still come afterwards."""
_LAST_SEC = 0.5
"""How long requests are refused after that, on connections that were made before."""
_ACCEPT_STEPS = 3
"""Steps of the event loop in which it accepts connections that came while it stalled, and makes
their transports."""
_SWEEP_TICKS = 10
"""uvicorn has ten ticks a second."""


class Connection(H11Protocol):
    """A connection. Use `make_connection_class` to make the class that knows the limits."""

    limits = Limits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or close the connection if there are too many."""
        self._waits_since = time.monotonic()
        self._head_since: float | None = self._waits_since
        self._unsent_since: float | None = None
        if len(self.connections) >= self.limits.max_connections and not self._make_room():
            transport.abort()
        super().connection_made(transport)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client; one with an upload that
        makes progress only if there is no other. Return whether one could be closed."""
        connections = set[Any](self.connections)
        others = [other for other in connections if not other.transport.is_closing()]
        if len(others) < self.limits.max_connections:
            return True
        waiting = [other for other in others if other.waits_for_client()]
        if not waiting:
            return False
        now = time.monotonic()
        longest = min(waiting, key=lambda other: (other.is_uploading(now), other._waits_since))
        if longest.transport.get_write_buffer_size():
            _reset(longest.transport)
        else:
            longest.transport.abort()
        return True

    def waits_for_client(self) -> bool:
        """Return whether a request, or the rest of one, has yet to come, or an answer has yet to be
        read."""
        is_complete = self._has_request() and not self.cycle.more_body
        return not is_complete or bool(self.transport.get_write_buffer_size())

    def is_uploading(self, now: float) -> bool:
        """Return whether a part of a request's body came a moment ago."""
        is_incomplete = self._has_request() and self.cycle.more_body
        return is_incomplete and now - self._waits_since < STALLED_SEC

    def data_received(self, data: bytes) -> None:
        """Take bytes, and note since when the rest of the headers or of the body has to come."""
        super().data_received(data)
        if self._has_request():
            self._head_since = None
            self._waits_since = time.monotonic()
        elif self._head_since is None:
            self._head_since = time.monotonic()

    def on_response_complete(self) -> None:
        """End a request."""
        self._head_since = None
        self._waits_since = time.monotonic()
        super().on_response_complete()

    def check(self, now: float) -> None:
        """Close the connection if headers take too long to arrive, or an answer too long to be
        read."""
        if self._head_since is not None and now - self._head_since > self.limits.head_sec:
            self.transport.abort()
        if not self.transport.get_write_buffer_size():
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        elif now - self._unsent_since > self.limits.timeout_sec:
            _reset(self.transport)

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def _reset(transport: asyncio.Transport) -> None:
    """Close a connection, and drop the megabytes that the system would keep for minutes to send
    them."""
    transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    transport.abort()


def make_connection_class(limits: Limits) -> type[Connection]:
    """Return the class of connections with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


class Stopping:
    """When the server stops: requests are accepted as usual for a while, then refused, then it
    stops listening."""

    def __init__(self, drain_sec: float, work_sec: float) -> None:
        """`work_sec` is the time for the requests that were accepted before."""
        self._drain_sec = drain_sec
        self._work_sec = work_sec
        self.since: float | None = None
        """When the signal came."""

    @property
    def begun(self) -> bool:
        """Whether the server is about to stop: it is not ready, and closes connections after their
        answers."""
        return self.since is not None

    @property
    def refuses(self) -> bool:
        """Whether further requests are refused."""
        return self.since is not None and time.monotonic() - self.since >= self._drain_sec

    @property
    def is_over(self) -> bool:
        """Whether the time for the accepted work is over."""
        return (
            self.since is not None
            and time.monotonic() - self.since >= self._drain_sec + self._work_sec
        )


class Server(uvicorn.Server):
    """uvicorn's server. The first SIGTERM or Ctrl-C stops it after the accepted work; the second
    one at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        stopping: Stopping,
        busy: Callable[[], bool],
        begin: Callable[[], Coroutine[Any, Any, None]],
        mend: Callable[[], object],
    ) -> None:
        """`begin` is awaited before the server listens. `mend` is called every second."""
        super().__init__(config)
        self._begin = begin
        self._mend = mend
        self._stopping = stopping
        self._busy = busy
        self._is_logged = False
        self._refusing_ticks = 0

    async def startup(self, sockets: Any = None) -> None:
        """Listen when the decoders are ready."""
        await self._begin()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the first signal; exit at the second one."""
        if self._stopping.begun:
            os._exit(128 + sig)
        # Nothing is logged here: the signal may have interrupted the log.
        self._stopping.since = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop listening."""
        if counter % _SWEEP_TICKS == 0:
            self._sweep()
            self._mend()
        if self._stopping.begun and not self._is_logged:
            log("stopping")
            self._is_logged = True
        self._refusing_ticks += self._stopping.refuses
        is_drained = self._refusing_ticks > _REFUSING_TICKS and (
            not self._busy() or self._stopping.is_over
        )
        return await super().on_tick(counter) or is_drained

    def _sweep(self) -> None:
        now = time.monotonic()
        connections = set[Any](self.server_state.connections)
        for connection in connections:
            connection.check(now)

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening, close idle connections, and wait for the others. Their limits still
        hold."""
        watch = asyncio.ensure_future(self._keep_sweeping())
        try:
            # A connection is reset if listening ends before it is accepted, or if it is closed
            # before its request is read.
            for _ in range(_ACCEPT_STEPS):
                await asyncio.sleep(0)
            for server in self.servers:
                server.close()
            await asyncio.sleep(_LAST_SEC)
            await super().shutdown(sockets)
        finally:
            watch.cancel()

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._sweep()
