"""Starting MXNet's ranks and its parameter server on this machine."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.backends.mxnet import hosts, loading
from lockstep.backends.shared.horovod_rendezvous import rendezvous
from lockstep.system.machine import cores
from lockstep.system.ranks import LOOPBACK, free_ports, launch_ranks


def launch(processes: int, arguments: list[str], distributed: str) -> int:
    """Run this Python with these arguments in this many processes that find each other; return the exit code."""
    if distributed == "horovod":
        from lockstep.backends.mxnet import horovod_world  # noqa: F401 - fails once here instead of in every rank

        threads = {"OMP_NUM_THREADS": _threads_of_a_rank(processes)}
        with rendezvous(processes) as environment:
            return launch_ranks(processes, arguments, lambda rank: environment(rank) | threads)
    with parameter_server(processes) as (environment, held):
        return launch_ranks(processes, arguments, lambda rank: environment, inherited=[held])


def _threads_of_a_rank(ranks: int) -> str:
    return loading.chosen or str(max(cores() // ranks, 1))


@contextmanager
def parameter_server(workers: int) -> Iterator[tuple[dict[str, str], int]]:
    """Run a scheduler and a server for this many workers on this machine.

    Yield the environment of a worker, and a file descriptor that every worker must inherit. Scheduler and server end when
    no process has it open.
    """
    port, port_of_hosts = free_ports(2)
    shared = {
        hosts.ADDRESS: f"{LOOPBACK}:{port_of_hosts}",
        hosts.KEY: secrets.token_hex(),
        "DMLC_PS_ROOT_URI": LOOPBACK,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": LOOPBACK,  # not on the network: a server executes what it receives
        "DMLC_USE_KUBERNETES": "0",  # with 1, the scheduler would listen on all interfaces
        "DMLC_LOCAL": "0",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": "1",
        "OMP_NUM_THREADS": _threads_of_a_rank(workers),
    }
    heard, held = os.pipe()
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        for role in ("scheduler", "server"):
            environment = os.environ | shared | {"DMLC_ROLE": role}
            command = [sys.executable, "-P", "-c", _HELPER, str(heard)]
            helpers.append(subprocess.Popen(command, env=environment, pass_fds=[heard], start_new_session=True))
        os.close(heard)
        yield shared | {"DMLC_ROLE": "worker"}, held
    finally:
        os.close(held)
        for helper in helpers:
            helper.terminate()
        for helper in helpers:
            helper.wait()


_HELPER = """
import os, pickle, sys, threading
threading.Thread(target=lambda: (os.read(int(sys.argv[1]), 1), os._exit(0)), daemon=True).start()
pickle.loads = None
import mxnet
"""
"""Code of schedulers and servers. Importing MXNet starts them, and the import does not return.

A server would unpickle an optimizer that it receives. Here it only sums, so nothing sends one, and unpickling is disabled.
"""
