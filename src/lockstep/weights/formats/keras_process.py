"""Read a Keras file in a separate process first: `python -m
lockstep.weights.formats.keras_process FILE`.

HDF5's library never returns from some damaged files (one of 30,000 in the fuzzer), and Ctrl-C does
not reach it. It crashes on others. Then this process ends, and the user gets a message. Other
damage is reported by the reader.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.system.errors import CheckpointError
from lockstep.system.workers import end_with_parent
from lockstep.weights.formats import keras_variables

LEAST_SECONDS = 60.0
"""Time for the smallest file. Starting the process takes a few seconds on a busy machine."""
_BYTES_PER_SECOND = 10 * 2**20
"""The slowest disk that is waited for."""


def check(path: Path) -> None:
    """Raise `CheckpointError` if HDF5's library crashes on a file or does not return from it."""
    seconds = LEAST_SECONDS + path.stat().st_size / _BYTES_PER_SECOND
    module = "lockstep.weights.formats.keras_process"
    problem = describe_ending([sys.executable, "-P", "-m", module, path], seconds)
    if problem:
        raise CheckpointError(
            f"{path} is damaged: HDF5's library {problem}. Save it again, or copy it again."
        )


def describe_ending(command: Sequence[str | Path], seconds: float) -> str:
    """Return why a process did not end by itself: it crashed, or took longer than `seconds`; "" if
    it ended."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"did not read it within {seconds:.0f} seconds"
        finally:
            process.kill()
    if code < 0:
        return f"crashed on it ({signal.Signals(-code).name})"
    return ""


def read_all(path: Path) -> None:
    """Read every variable of a file, and forget it. Raises `CheckpointError` as the reader does."""
    with keras_variables.open_variables(path) as variables:
        for dataset in variables.datasets.values():
            dataset[...]


if __name__ == "__main__":
    end_with_parent()
    read_all(Path(sys.argv[1]))
