"""The thread in which MXNet is waited for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


def run_in_thread(work: Callable[[], Result]) -> "Future[Result]":
    """Do work that waits in a separate daemon thread, which does not keep the process from ending.

    It is the same thread for all work: MXNet keeps 5 MB for every thread that has called it, also
    after the thread's end.
    """
    future: Future[Result] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    _work_queue().put(do)
    return future


@cache
def _work_queue() -> "SimpleQueue[Callable[[], None]]":
    """Return the queue of a thread that does what is put into it, in this order."""
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def go_on() -> None:
        while True:
            queue.get()()

    threading.Thread(target=go_on, name="lockstep-fetch", daemon=True).start()
    return queue
