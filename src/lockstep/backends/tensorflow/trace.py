"""A trace of some steps by TensorFlow's profiler."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf


@contextmanager
def profile(folder: Path) -> Iterator[None]:
    """Write `plugins/profile/TIME/HOST.xplane.pb` into a folder, for TensorBoard's profile plugin
    or XProf."""
    tf.profiler.experimental.start(str(folder))
    try:
        yield
    finally:
        tf.profiler.experimental.stop()
