"""The backends of this environment: in which pairs they hand over a run, and what launches their
ranks."""

from importlib.util import find_spec
from itertools import permutations

from lockstep.backends import FRAMEWORKS
from tests.backends.conftest import BACKENDS

ENGINES = BACKENDS if len(BACKENDS) > 1 else (*BACKENDS, "reference")
PAIRS = tuple(permutations(ENGINES, 2))
RING = tuple(zip(ENGINES, (*ENGINES[1:], ENGINES[0]), strict=True))
"""Every engine starts one run and ends one run. The engines pass on a state in canonical form, the
same for any engine."""

HAS_HOROVOD = find_spec("horovod") is not None
"""Whether Horovod is installed, by `make mxnet-horovod` or in the environment of `make
tensorflow-horovod`."""


def _list_launchers() -> tuple[str, ...]:
    launchers = []
    for name, row in FRAMEWORKS.items():
        if name in BACKENDS and row.addresses is not None:
            launchers.append(name)
            if HAS_HOROVOD and "horovod" in row.on_cpu.distributed:
                launchers.append(f"{name} horovod")
    return tuple(launchers)


LAUNCHED = _list_launchers()
"""Backends whose ranks are launched, followed by what adds up over ranks if that is not the
framework itself."""


def split_launcher(launcher: str) -> tuple[str, str]:
    """Return the name of a backend, and what adds up over its ranks."""
    name, _, distributed = launcher.partition(" ")
    return name, distributed or "native"
