"""Finding and importing a backend, and checking what it supports before it is used."""

import atexit
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lockstep.backends.frameworks import FRAMEWORKS, Options, name_rank
from lockstep.backends.protocol import Backend, Engine, World
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError, nearest
from lockstep.system.ranks import count_ranks, listen_address

if TYPE_CHECKING:
    from lockstep.launch.nodes import Start, Table


class LoadedBackend:
    """An imported backend. It raises `BackendError` for options that the backend's row does not
    have."""

    def __init__(self, name: str, module: Backend) -> None:
        self.name = name
        self.load_module = module.load_module
        self.profile = module.profile
        self.devices = module.devices
        self.libraries = module.libraries
        self.products = module.products
        self._module = module

    def world(self, execution: Execution) -> World:
        """Name this rank, join the process group and choose the device."""
        row = FRAMEWORKS[self.name]
        _check_option(self.name, "distributed", execution.distributed, on_gpu=False)
        if execution.device == "cuda" and row.on_gpu is None:
            able = [name for name, other in FRAMEWORKS.items() if other.on_gpu is not None]
            raise _refuse_value(self.name, "device", "cuda", ("auto", "cpu"), able)
        if row.addresses is not None:
            _join(self.name, self._module.prepare_ranks, execution.distributed, row.addresses)
        elif os.environ.get("WORLD_SIZE", "1") != "1":
            raise _refuse_ranks(self.name)
        world = self._module.world(execution)
        try:
            check_options(self.name, execution, on_gpu=world.on_gpu)
        except BackendError:
            world.close()
            raise
        return world

    def engine(
        self, recipe: Recipe, learning_rates: np.ndarray, world: World, execution: Execution
    ) -> Engine:
        """Build the recipe's model and its compiled step. Weights are arbitrary until `write`."""
        check_options(self.name, recipe, on_gpu=world.on_gpu)
        check_options(self.name, execution, on_gpu=world.on_gpu)
        return self._module.engine(recipe, learning_rates, world, execution)

    def prepare_ranks(self, table: "Table", distributed: str) -> "AbstractContextManager[Start]":
        """Return a context within which the ranks of a table can run."""
        if FRAMEWORKS[self.name].addresses is None:
            raise _refuse_ranks(self.name)
        _check_option(self.name, "distributed", distributed, on_gpu=False)
        return self._module.prepare_ranks(table, distributed)


_while_running = ExitStack()
atexit.register(_while_running.close)


def _join(
    backend: str,
    prepare_ranks: "Callable[[Table, str], AbstractContextManager[Start]]",
    distributed: str,
    addresses: str,
) -> None:
    """Name this rank. If it is one of several that do not know each other's addresses, connect them
    and set the variables. They meet as launchers on several machines do, each as a node of one
    rank.

    `addresses` is the environment variable in which another launcher gives the addresses. Ranks
    meet at LOCKSTEP_RENDEZVOUS, or at the first host of a Slurm step. Without either, nothing
    happens, and the framework reports what is missing. Raises `UserError` or `LockstepError` if the
    ranks cannot meet.
    """
    name_rank(backend)
    if (
        {addresses, "HOROVOD_RANK"} & os.environ.keys()
        or listen_address() is not None
        or distributed != "native"
        or count_ranks() == 1
    ):
        return
    from lockstep.launch.rendezvous import MEET_SEC, agree, meet
    from lockstep.launch.rendezvous_address import find_rank_meeting

    meeting = find_rank_meeting(os.environ)
    if meeting is None:
        return
    with meet(meeting, MEET_SEC) as (link, address):
        table = agree(link, meeting, address, 1, [])
    start = _while_running.enter_context(prepare_ranks(table, distributed))
    os.environ.update(
        {name: value for name, value in table.variables(0).items() if name not in os.environ}
    )
    os.environ.update(start.environment(0))


def check_options(name: str, settings: Execution | Recipe, *, on_gpu: bool) -> None:
    """Raise `BackendError` if an execution or a recipe has a value that a backend does not support
    on a kind of device."""
    for option in fields(Options):
        if hasattr(settings, option.name):
            _check_option(name, option.name, getattr(settings, option.name), on_gpu=on_gpu)


def _check_option(name: str, option: str, value: str, *, on_gpu: bool) -> None:
    values = {backend: getattr(row.options(on_gpu), option) for backend, row in FRAMEWORKS.items()}
    if value not in values[name]:
        able = [backend for backend in FRAMEWORKS if value in values[backend]]
        raise _refuse_value(name, option, value, values[name], able)


def _refuse_value(
    name: str, option: str, value: str, supported: tuple[str, ...], able: list[str]
) -> BackendError:
    message = (
        f"{option} is {value}, but the {name} backend supports only {' or '.join(supported)} here;"
        f" use --set {option}={supported[0]}"
    )
    return BackendError(f"{message}, or --backend {' or '.join(able)}" if able else message)


def _refuse_ranks(name: str) -> BackendError:
    able = [backend for backend, row in FRAMEWORKS.items() if row.addresses is not None]
    return BackendError(
        f"the {name} backend trains in one process; with `lockstep launch` use --backend"
        f" {' or '.join(able)}"
    )


def check_installed(name: str) -> None:
    """Raise `BackendError` if there is no backend of that name or its framework is missing. Nothing
    is imported."""
    if name not in FRAMEWORKS:
        raise BackendError(f"there is no backend {name!r}. {nearest(name, FRAMEWORKS)}")
    framework = FRAMEWORKS[name]
    if framework.version() is None:
        raise BackendError(
            f"backend {name!r} needs {framework.distributions[0]}: {framework.install}"
        )


def load(name: str) -> LoadedBackend:
    """Import a backend. Raises `BackendError` if there is none of that name or its framework is
    missing."""
    check_installed(name)
    # GNU's OpenMP reads this when the framework loads it. By default its threads spin while they
    # wait for each other, and a step next to another busy program takes many times its share: two
    # trainings of ResNet-50 on two cores are three times as fast with a short spin. Alone, it costs
    # 1 to 2 % on an AMD EPYC, and 10 to 25 % in a virtual machine on a Xeon, whose threads wake up
    # late.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    module: Any = importlib.import_module(f"lockstep.backends.{name}")
    return LoadedBackend(name, cast(Backend, module))


def find_interpreter(name: str) -> Path | None:
    """Return the Python that can run a backend in a separate process; None if there is none.

    The first of these is returned:

    1. the Python that LOCKSTEP_<NAME>_PYTHON names,
    2. this Python, if the framework is installed here,
    3. the Python of an environment `.venv-<name>` next to this one.

    Raises `BackendError` if the variable does not name an executable file.
    """
    variable = f"LOCKSTEP_{name.upper()}_PYTHON"
    if path := os.environ.get(variable):
        if not os.access(path, os.X_OK) or Path(path).is_dir():
            raise BackendError(
                f"{variable} is {path!r}, expected a Python that has lockstep and {name}"
            )
        return Path(path)
    if FRAMEWORKS[name].version() is not None:
        return Path(sys.executable)
    python = Path(sys.prefix).parent / f".venv-{name}" / "bin" / "python"
    return python if python.is_file() else None
