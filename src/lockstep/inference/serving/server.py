"""The server: its socket, the thread with the runtime, uvicorn, and how it stops."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any

import uvicorn

from lockstep.inference.decoding.pool import Decoders
from lockstep.inference.decoding.process import Settings
from lockstep.inference.serving.access import Access, is_loopback
from lockstep.inference.serving.app import Parts, application
from lockstep.inference.serving.batching import Batcher
from lockstep.inference.serving.bodies import Bodies
from lockstep.inference.serving.connections import Server, Stopping, connection_class
from lockstep.inference.serving.guard import Guard
from lockstep.inference.serving.limits import KEEP_ALIVE_SEC, Limits
from lockstep.inference.serving.logs import json_logs, log
from lockstep.inference.serving.metrics import Metrics
from lockstep.inference.serving.model import About, Source, opened
from lockstep.runs.events import Event, Listener
from lockstep.system.errors import BackendError
from lockstep.system.machine import share_of_cores

_BACKLOG = 1024
_GRACE_SEC = 5
"""The seconds for answers to be read at the end, when the work is done or its time is over."""


def run(
    given: Source,
    sock: socket.socket,
    access: Access,
    limits: Limits,
    *,
    name: str | None,
    listener: Listener | None,
    quiet: bool,
) -> None:
    """Serve on a bound socket until a signal, or an error of the thread with the runtime, stops it."""
    metrics = Metrics()
    stopping = Stopping(limits.drain_sec, limits.timeout_sec)
    batcher = Batcher(limits, metrics.computed)
    threads = (given.execution.loader_threads if given.execution else 0) or share_of_cores()
    with (
        json_logs(),
        ThreadPoolExecutor(threads, thread_name_prefix="lockstep-parse") as pool,
        closing(Decoders(threads, _report)) as decoders,
        _working(batcher, given, name, listener or _noted, limits) as about,
    ):
        parts = Parts(about, limits, batcher, metrics, stopping, Bodies(limits), decoders, pool)
        _describe(metrics, parts)
        app = Guard(application(parts), access, metrics, closes=lambda: stopping.begun, quiet=quiet)
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

        server = Server(
            _configured(app, limits), stopping, lambda: app.requests > 0, begin, decoders.mend
        )
        _announce(sock, about, access)
        server.run(sockets=[sock])
        log("stopped")


def _configured(app: Guard, limits: Limits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=connection_class(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # headers that a client may write would be believed
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SEC,
        timeout_graceful_shutdown=_GRACE_SEC,
    )


@contextmanager
def _working(
    batcher: Batcher, given: Source, name: str | None, listener: Listener, limits: Limits
) -> Iterator[About]:
    """Open the model in a thread of its own, which computes until the block ends. Raises what
    opening raises."""
    ready: Future[About] = Future()

    def work() -> None:
        try:
            with opened(given, name, listener, most_images=limits.max_batch) as model:
                ready.set_result(model.about)
                batcher.run(model)
        except BaseException as error:
            if ready.done():
                log("error", logging.CRITICAL, trace=error)
                os._exit(1)  # nothing could be computed any more
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


def _noted(event: Event) -> None:
    if event["kind"] == "note":
        log("note", message=event["message"])


def _describe(metrics: Metrics, parts: Parts) -> None:
    about = parts.about
    batcher = parts.batcher
    metrics.describe(model=about.name, engine=about.runtime, precision=about.precision)
    metrics.watch(
        "lockstep_queue_images", "Images that wait for the runtime.", lambda: batcher.waiting
    )
    metrics.watch(
        "lockstep_admitted_images",
        "Images that are decoded, waiting or computed; at most the size of the queue.",
        lambda: batcher.admitted,
    )
    metrics.watch(
        "lockstep_coming_requests",
        "Requests whose images are being received or decoded.",
        lambda: batcher.coming,
    )
    metrics.watch(
        "lockstep_held_bytes", "Bytes of bodies in memory.", lambda: parts.bodies.held_bytes
    )
    metrics.watch(
        "lockstep_ready",
        "1 if the server takes requests and can decode images.",
        lambda: parts.is_ready,
    )


def _announce(sock: socket.socket, about: About, access: Access) -> None:
    address, port = sock.getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    if access.token is None and not is_loopback(address):
        reason = (
            "everyone who reaches this address can use the server, and nothing encrypts what is"
            " sent"
        )
        log("note", logging.WARNING, message=f"there is no token: {reason}")
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
            " it)\n"
        )
        sys.stdout.flush()
