"""What every request passes: rules of access, security headers, figures, a line in the log, and an
answer that arrives."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.inference.serving.access import Access
from lockstep.inference.serving.limits import LINGER_SEC
from lockstep.inference.serving.logs import log
from lockstep.inference.serving.metrics import Metrics

_HEADERS = {
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
}
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
_CLIENT_LEFT = 499
"""The status in logs of a request whose client closed the connection before its answer, as nginx
has it."""


class Guard:
    """An ASGI application around another one."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        metrics: Metrics,
        *,
        closes: Callable[[], bool],
        quiet: bool,
    ) -> None:
        """`closes` returns whether connections close after their answer. `quiet` leaves successes
        out of the log."""
        self._app = app
        self._access = access
        self._metrics = metrics
        self._closes = closes
        self._quiet = quiet
        self.requests = 0
        """Requests that are being received or answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        headers = dict(scope["headers"])
        exchange = _Exchange(receive, send, headers, self._closes)
        refusal = self._access.find_refusal(scope["method"], scope["path"], headers)
        self.requests += 1
        try:
            if refusal is None:
                await self._app(scope, exchange.receive, exchange.send)
            else:
                challenge = {"www-authenticate": "Bearer"} if refusal[0] == 401 else None
                response = JSONResponse({"error": refusal[1]}, refusal[0], challenge)
                await response(scope, exchange.receive, exchange.send)
        finally:
            self.requests -= 1
            seconds = time.perf_counter() - began
            path = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.count_request(method, path, exchange.status, seconds)
            self._log(scope, exchange, seconds)

    def _log(self, scope: Scope, exchange: "_Exchange", seconds: float) -> None:
        if self._quiet and exchange.status < 400:
            return
        about: dict[str, Any] = {
            "method": scope["method"][:20],
            "path": scope["path"][:200],
            "status": exchange.status,
            "ms": round(1000 * seconds, 2),
            "received_bytes": exchange.received,
            "client": scope["client"][0] if scope.get("client") else None,
        }
        log("request", logging.WARNING if exchange.status >= 500 else logging.INFO, **about)


class _Exchange:
    """A request and its answer."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        closes: Callable[[], bool],
    ) -> None:
        self._receive = receive
        self._send = send
        self._closes = closes
        self._unread = (
            headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        )
        self._waits = headers.get(b"expect", b"").lower() == b"100-continue"
        self.status = _CLIENT_LEFT
        self.received = 0

    async def receive(self) -> Message:
        """Return a part of the body."""
        self._waits = False  # uvicorn asks for the body
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._unread = False
        else:
            self.received += len(message.get("body", b""))
            self._unread = bool(message.get("more_body", False))
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer, with the headers of all answers. `Connection.check` ends it if
        its receiver stalls."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            names = {name for name, _ in headers}
            for name, value in _HEADERS.items():
                if name not in names:
                    headers.append((name, value))
            if self._unread or self._closes():
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (last and self._unread and not self._waits):
            await self._send(message)
            return
        # A connection that is closed with unread data is reset, and then its sender may not see the
        # answer.
        await self._send({**message, "more_body": True})
        await self._linger()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SEC):
                while self._unread:
                    await self.receive()
