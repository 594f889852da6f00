"""What frameworks do to a process beside computing, undone: what they write past Python, and the signals they take."""

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
    """Keep back what the process writes, also from compiled code, unless the block raises: then it may tell why."""
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
    """Put this process's handler of SIGTERM back, which frameworks replace by their own; a run saves on it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python cannot, and nobody has set one
            signal.signal(signal.SIGTERM, before)
