"""Horovod's ranks: how each joins the others, and a rendezvous on one machine without Horovod's own
launcher."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from lockstep.backends.shared.bound_sockets import refuse_open_sockets
from lockstep.launch.nodes import Table
from lockstep.system.errors import BackendError


def join_horovod(hvd: Any) -> None:
    """Join the ranks through Horovod's module for a framework, and name this one in the
    environment: under MPI only Horovod knows these numbers."""
    hvd.init()
    refuse_open_sockets()
    os.environ["RANK"] = str(hvd.rank())
    os.environ["WORLD_SIZE"] = str(hvd.size())
    os.environ["LOCAL_RANK"] = str(hvd.local_rank())


@contextmanager
def rendezvous(table: Table) -> Iterator[Callable[[int], dict[str, str]]]:
    """Serve a rendezvous for ranks on this machine; yield a function from a rank to its environment
    variables.

    It listens only on the loopback interface. Horovod's launcher would listen on the network, and
    its server accepts what anyone writes to it. Raises `BackendError` if there are several
    machines.
    """
    if len(table.nodes) > 1:
        raise BackendError(
            "lockstep launch starts Horovod's ranks on one machine only; on several use horovodrun"
            " or mpirun (docs/how-to/schedulers.md), or leave out distributed"
        )
    processes = table.own.processes
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    slots = get_host_assignments(parse_hosts(f"localhost:{processes}"), processes)
    with RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0) as server:
        server.init(slots)
        shared = create_run_env_vars("127.0.0.1", ["lo"], server.server_port)
        Thread(target=server.serve_forever, name="lockstep-rendezvous", daemon=True).start()
        try:
            yield lambda rank: {
                name: str(value)
                for name, value in (shared | create_slot_env_vars(slots[rank])).items()
            }
        finally:
            server.shutdown()
