"""Frameworks that train: the protocol between them and the core, what each supports, and how it is
loaded."""

from lockstep.backends.frameworks import FRAMEWORKS, Framework, Options
from lockstep.backends.loaded_backend import (
    LoadedBackend,
    check_installed,
    check_options,
    find_interpreter,
    load,
)
from lockstep.backends.protocol import (
    Backend,
    Engine,
    Handle,
    HostQuestions,
    Interval,
    Products,
    QuantisingEngine,
    World,
)

__all__ = [
    "FRAMEWORKS",
    "Backend",
    "Engine",
    "Framework",
    "Handle",
    "HostQuestions",
    "Interval",
    "LoadedBackend",
    "Options",
    "Products",
    "QuantisingEngine",
    "World",
    "check_installed",
    "check_options",
    "find_interpreter",
    "load",
]
