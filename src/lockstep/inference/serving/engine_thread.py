"""The thread that opens the model of a server and computes with it."""

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from lockstep.inference.serving.batching import Batcher
from lockstep.inference.serving.logs import log
from lockstep.inference.serving.model import About, open_model
from lockstep.inference.session import SessionOptions
from lockstep.inference.source import ModelSource
from lockstep.runs.events import Event


@contextmanager
def compute_in_thread(
    batcher: Batcher, source: ModelSource, options: SessionOptions, name: str | None
) -> "Iterator[Future[About]]":
    """Open the model in a separate thread, which computes until the block ends. The result, or the
    error of opening, comes when the model is open."""
    ready: Future[About] = Future()
    options = replace(options, listener=options.listener or _log_note)

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
    try:
        yield ready
    finally:
        batcher.close()
        if ready.done():
            thread.join()


def _log_note(event: Event) -> None:
    if event["kind"] == "note":
        log("note", message=event["message"])
