"""The server: its socket, the thread with the runtime, uvicorn, and how it stops."""

import ipaddress
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import uvicorn

from lockstep.inference.decoding.pool import Decoders
from lockstep.inference.decoding.process import Settings
from lockstep.inference.serving.access import Access, is_loopback
from lockstep.inference.serving.app import make_application
from lockstep.inference.serving.batching import Batcher
from lockstep.inference.serving.bodies import Bodies
from lockstep.inference.serving.computing_routes import Parts
from lockstep.inference.serving.connections import Server, Stopping, make_connection_class
from lockstep.inference.serving.guard import Guard
from lockstep.inference.serving.limits import KEEP_ALIVE_SEC, Limits
from lockstep.inference.serving.logs import log, open_logs
from lockstep.inference.serving.metrics import Metrics
from lockstep.inference.serving.model import About, open_model
from lockstep.inference.session import SessionOptions
from lockstep.inference.source import ModelSource
from lockstep.launch.nodes import list_addresses
from lockstep.runs.events import Event
from lockstep.system.errors import BackendError
from lockstep.system.machine import share_of_cores

_BACKLOG = 1024
_LARGEST_HEAD = 2**15
"""Bytes of a request's line and headers: those that nginx passes on."""
_GRACE_SEC = 5
"""The seconds for answers to be read at the end, when the work is done or its time is over."""


def run(
    source: ModelSource,
    options: SessionOptions,
    sock: socket.socket,
    access: Access,
    limits: Limits,
    *,
    name: str | None,
    quiet: bool,
) -> None:
    """Serve on a bound socket until a signal, or an error of the thread with the runtime, stops
    it."""
    metrics = Metrics()
    stopping = Stopping(limits.drain_sec, limits.timeout_sec)
    batcher = Batcher(limits, metrics.count_batch)
    threads = options.execution.loader_threads or share_of_cores()
    options = replace(options, batch=limits.max_batch, listener=options.listener or _log_note)
    with (
        open_logs(),
        ThreadPoolExecutor(threads, thread_name_prefix="lockstep-parse") as pool,
        closing(Decoders(threads, _report)) as decoders,
        _compute_in_thread(batcher, source, options, name) as about,
    ):
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

        config = _configure(app, limits)
        server = Server(config, stopping, lambda: app.requests > 0, begin, decoders.mend)
        _announce(sock, about, access)
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
        proxy_headers=False,  # headers that a client may write would be believed
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


@contextmanager
def _compute_in_thread(
    batcher: Batcher, source: ModelSource, options: SessionOptions, name: str | None
) -> Iterator[About]:
    """Open the model in a separate thread, which computes until the block ends. Raises what
    opening raises."""
    ready: Future[About] = Future()

    def work() -> None:
        try:
            with open_model(source, options, name) as model:
                ready.set_result(model.about)
                batcher.run(model)
        except BaseException as error:
            if ready.done():
                log("error", logging.CRITICAL, trace=error)
                os._exit(1)  # nothing can be computed
            ready.set_exception(error)

    # If Ctrl-C comes while the model is opened, the process does not wait for it.
    thread = threading.Thread(target=work, name="lockstep-engine", daemon=True)
    thread.start()
    about = ready.result()
    try:
        yield about
    finally:
        batcher.close()
        thread.join()


def _report(failure: str) -> None:
    log("error", logging.ERROR, message=failure)


def _log_note(event: Event) -> None:
    if event["kind"] == "note":
        log("note", message=event["message"])


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
