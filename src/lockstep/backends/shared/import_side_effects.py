"""Undoing side effects of importing frameworks: output that bypasses Python, and signal handlers."""

import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced() -> Iterator[None]:
    """Hide what the process writes, also from compiled code. If the block raises, write it, since
    it may give the reason."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with tempfile.TemporaryFile() as said:
        for number, _ in kept:
            os.dup2(said.fileno(), number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except BaseException:
            said.seek(0)
            os.write(kept[1][1], said.read())
            raise
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Restore this process's SIGTERM handler, which frameworks replace by their own. A run saves
    its state on SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # other threads cannot set handlers
            signal.signal(signal.SIGTERM, before)
