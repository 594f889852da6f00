"""Starting MXNet's ranks and its parameter server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.backends.shared import rank_connections
from lockstep.backends.shared.horovod import rendezvous
from lockstep.launch.nodes import Start, Table, share_cores
from lockstep.system.ranks import OF_NETWORKS


@contextmanager
def prepare_ranks(table: Table, distributed: str) -> Iterator[Start]:
    """Yield how this machine's ranks are started. Node 0 runs the scheduler and the server of all
    of them."""
    if distributed == "horovod":
        from lockstep.backends.mxnet import horovod_world  # noqa: F401 - fails once here instead of in every rank

        threads = share_cores("OMP_NUM_THREADS", table)
        with rendezvous(table) as environment:
            yield Start(table, lambda local_rank: environment(local_rank) | threads)
    elif table.here == 0:
        with _parameter_server(variables(table)) as held:
            yield Start(table, lambda local_rank: worker(table, local_rank), (held,))
    else:
        yield Start(table, lambda local_rank: worker(table, local_rank))


def worker(table: Table, local_rank: int) -> dict[str, str]:
    """Return the environment variables that make a rank of this machine one of the workers of
    MXNet's parameter server."""
    return variables(table) | {"DMLC_ROLE": "worker"}


def variables(table: Table) -> dict[str, str]:
    """Return the environment variables by which this machine's workers, scheduler and server find
    each other."""
    leading, (port, port_of_hosts) = table.nodes[0].address, table.shared_ports
    return {
        rank_connections.ADDRESS: f"{leading}:{port_of_hosts}",
        rank_connections.KEY: table.secret,
        "DMLC_PS_ROOT_URI": leading,
        "DMLC_PS_ROOT_PORT": str(port),
        # not on all interfaces: a server executes what it receives
        "DMLC_NODE_HOST": table.own.address,
        "DMLC_USE_KUBERNETES": "0",  # with 1, the scheduler would listen on all interfaces
        "DMLC_LOCAL": "0",
        "DMLC_NUM_WORKER": str(table.ranks),
        "DMLC_NUM_SERVER": "1",
    } | share_cores("OMP_NUM_THREADS", table)


@contextmanager
def _parameter_server(shared: dict[str, str]) -> Iterator[int]:
    """Run a scheduler and a server on this machine.

    Yield a file descriptor that every worker must inherit. Scheduler and server end when no process
    has it open.
    """
    heard, held = os.pipe()
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        for role in ("scheduler", "server"):
            inherited = {
                name: value for name, value in os.environ.items() if name not in OF_NETWORKS
            }
            environment = inherited | shared | {"DMLC_ROLE": role}
            command = [sys.executable, "-P", "-c", _HELPER, str(heard)]
            helpers.append(
                subprocess.Popen(command, env=environment, pass_fds=[heard], start_new_session=True)
            )
        os.close(heard)
        yield held
    finally:
        os.close(held)
        for helper in helpers:
            helper.kill()  # also if it is stopped; it holds nothing
        for helper in helpers:
            helper.wait()


_HELPER = """
import os, pickle, sys, threading
threading.Thread(target=lambda: (os.read(int(sys.argv[1]), 1), os._exit(0)), daemon=True).start()
pickle.loads = None
import mxnet
"""
"""Code of schedulers and servers. Importing MXNet starts them, and the import does not return.

A server would unpickle an optimizer that it receives. Here it only sums, so nothing sends one, and
unpickling is disabled.
"""
