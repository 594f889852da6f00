"""The server: its socket, uvicorn, and how it stops."""

import ipaddress
import logging
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import uvicorn

from lockstep.inference.decoding.pool import Decoders
from lockstep.inference.decoding.process import Settings
from lockstep.inference.serving import name_address
from lockstep.inference.serving.access import Access, is_loopback
from lockstep.inference.serving.app import make_application
from lockstep.inference.serving.batching import Batcher
from lockstep.inference.serving.bodies import Bodies
from lockstep.inference.serving.computing_routes import Parts
from lockstep.inference.serving.connections import Server, Stopping, make_connection_class
from lockstep.inference.serving.guard import Guard
from lockstep.inference.serving.limits import KEEP_ALIVE_SEC, Limits
from lockstep.inference.serving.logs import log
from lockstep.inference.serving.metrics import Metrics
from lockstep.inference.serving.model import About
from lockstep.launch.nodes import list_addresses
from lockstep.system.errors import BackendError

_BACKLOG = 1024
_LARGEST_HEAD = 2**15
"""Bytes of a request's line and headers: those that nginx passes on."""
_GRACE_SEC = 5
"""The seconds for answers to be read at the end, when the work is done or its time is over."""


def run(
    about: About,
    sock: socket.socket,
    access: Access,
    limits: Limits,
    batcher: Batcher,
    decoders: Decoders,
    *,
    threads: int,
    quiet: bool,
) -> None:
    """Serve on a bound socket until a signal, or an error of the thread with the runtime, stops
    it."""
    metrics = Metrics()
    batcher.watcher = metrics.count_batch
    stopping = Stopping(limits.drain_sec, limits.timeout_sec)
    with ThreadPoolExecutor(threads, thread_name_prefix="lockstep-parse") as pool:
        parts = Parts(about, limits, batcher, metrics, stopping, Bodies(limits), decoders, pool)
        _describe(metrics, parts)
        app = Guard(
            make_application(parts), access, metrics, closes=lambda: stopping.begun, quiet=quiet
        )
        settings = Settings(
            about.recipe.fields(), limits.pixels, about.recipe.eval_crop, limits.body_bytes
        )

        async def begin() -> None:
            try:
                await decoders.start(settings)
            except (OSError, TimeoutError) as error:
                raise BackendError(
                    f"the processes that decode images could not be started: {error!r}"
                ) from None
            address, port = sock.getsockname()[:2]
            with name_address(address, port):  # two servers can have one address until one listens
                sock.listen(_BACKLOG)
            _announce(sock, about, access)

        config = _configure(app, limits)
        server = Server(config, stopping, lambda: app.requests > 0, begin, decoders.mend)
        server.run(sockets=[sock])
        log("stopped")


def _configure(app: Guard, limits: Limits) -> uvicorn.Config:
    """Return uvicorn's settings. What it would choose itself, or take from the environment, is
    named."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=make_connection_class(limits),
        http2=False,
        ws="none",
        lifespan="off",
        interface="asgi3",
        workers=1,
        reload=False,
        env_file=None,
        log_config=None,
        log_level=None,  # `open_logs` sets it
        access_log=False,
        use_colors=False,
        proxy_headers=False,  # headers that a client may write would be trusted
        forwarded_allow_ips=[],
        root_path="",
        server_header=False,
        date_header=True,
        headers=[],  # `Guard` adds them
        limit_concurrency=None,  # `Connection` limits them
        limit_max_requests=None,
        reset_contextvars=False,
        h11_max_incomplete_event_size=_LARGEST_HEAD,
        backlog=_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SEC,
        timeout_graceful_shutdown=_GRACE_SEC,
    )


def _describe(metrics: Metrics, parts: Parts) -> None:
    about = parts.about
    batcher = parts.batcher
    metrics.describe(model=about.name, engine=about.runtime, precision=about.precision)
    queue = "Images that wait for the runtime."
    metrics.watch("lockstep_queue_images", queue, lambda: batcher.waiting)
    admitted = "Images that are decoded, waiting or computed; at most the size of the queue."
    metrics.watch("lockstep_admitted_images", admitted, lambda: batcher.admitted)
    coming = "Requests whose images are being received or decoded."
    metrics.watch("lockstep_coming_requests", coming, lambda: batcher.coming)
    held = "Bytes of bodies in memory."
    metrics.watch("lockstep_held_bytes", held, lambda: parts.bodies.size)
    ready = "1 if the server accepts requests and can decode images."
    metrics.watch("lockstep_ready", ready, lambda: parts.is_ready)


def _announce(sock: socket.socket, about: About, access: Access) -> None:
    address, port = sock.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    if access.token is None and not is_loopback(address):
        reason = (
            "there is no token: everyone who reaches this address can use the server, and nothing"
            " encrypts what is sent"
        )
        log("note", logging.WARNING, message=reason)
    fields: dict[str, Any] = {
        "url": url,
        "model": about.name,
        "runtime": about.runtime,
        "precision": about.precision,
    }
    log("listening", **fields, source=about.source)
    with suppress(OSError, ValueError):  # nobody reads it
        sys.stdout.write(
            f"serving {about.name} with {about.runtime} in {about.precision} on {url} (Ctrl-C stops"
            f" it)\n{describe_ways(address, port, access.token)}"
        )
        sys.stdout.flush()


def describe_ways(address: str, port: int, token: str | None) -> str:
    """Return lines with the addresses at which other machines reach a server that listens on
    `address`. With a token they are links, but only on a terminal: files keep what they get."""
    if is_loopback(address):
        return ""
    path = ""
    if token and sys.stdout.isatty():
        path = f"#token={quote(token, safe='')} (with the token: show it to nobody else)"
    own = list_addresses() if ipaddress.ip_address(address).is_unspecified else [address]
    lines = []
    for other in own:
        if not is_loopback(other):
            host = f"[{other}]" if ":" in other else other
            lines.append(f"  from a phone or another machine: http://{host}:{port}/{path}\n")
    return "".join(lines)
