"""The engines of this environment: in which pairs they hand over a run, and what launches their
ranks."""

from importlib.util import find_spec
from itertools import permutations

from tests.backends.conftest import BACKENDS

ENGINES = BACKENDS if len(BACKENDS) > 1 else (*BACKENDS, "reference")
PAIRS = tuple(permutations(ENGINES, 2))
RING = tuple(zip(ENGINES, (*ENGINES[1:], ENGINES[0]), strict=True))
"""Every engine starts one run and ends one run. The engines pass on a state in canonical form, the
same for any engine."""

LAUNCHERS = {
    "mxnet": ["-m", "tests.backends.workers", "mxnet", "native"],
    "mxnet horovod": ["-m", "tests.backends.workers", "mxnet", "horovod"],
    "paddle": ["-m", "tests.backends.workers", "paddle", "native"],
    "tensorflow": ["-m", "tests.backends.workers", "tensorflow", "native"],
    "tensorflow horovod": ["-m", "tests.backends.workers", "tensorflow", "horovod"],
    "torch": ["-m", "tests.backends.workers", "torch", "native"],
}
"""Arguments between Python and a module's name that run the module in two processes. The keys are
backends, followed by what adds up over ranks if that is not the framework itself."""

WITHOUT = {"reference"}
"""Backends that run in one process."""

HAS_HOROVOD = find_spec("horovod") is not None
"""Whether Horovod is installed, by `make mxnet-horovod` or in the environment of `make
tensorflow-horovod`."""

LAUNCHED = tuple(
    name
    for name in LAUNCHERS
    if name.split()[0] in BACKENDS and (HAS_HOROVOD or not name.endswith("horovod"))
)


def named(launcher: str) -> tuple[str, str]:
    """Return the name of a backend, and what adds up over its ranks."""
    name, _, distributed = launcher.partition(" ")
    return name, distributed or "native"
