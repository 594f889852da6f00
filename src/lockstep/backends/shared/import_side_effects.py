"""Undoing side effects of importing frameworks: output past Python, and signal handlers."""

import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence_output() -> Iterator[None]:
    """Hide what the process writes, also from compiled code. If the block raises, write it, since
    it may give the reason."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with tempfile.TemporaryFile() as output:
        for number, _ in kept:
            os.dup2(output.fileno(), number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except BaseException:
            output.seek(0)
            os.write(kept[1][1], output.read())
            raise
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)


@contextmanager
def keep_sigterm() -> Iterator[None]:
    """Restore this process's SIGTERM handler, which frameworks replace by their own. A run saves
    its state on SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Other threads cannot set handlers.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
