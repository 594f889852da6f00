"""Starting JAX's ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.backends.jax.connection import COORDINATOR
from lockstep.backends.jax.world import THREADS
from lockstep.backends.shared import rank_connections
from lockstep.launch.nodes import Start, Table, share_cores


@contextmanager
def prepare_ranks(table: Table, distributed: str) -> Iterator[Start]:
    """Yield how this machine's ranks are started. JAX has no launcher: all ranks join a service in
    rank 0."""
    variables = find_places(table) | share_cores(THREADS, table)
    yield Start(table, lambda local_rank: variables)


def find_places(table: Table) -> dict[str, str]:
    """Return the environment variables that name the places of rank 0, alike for all ranks."""
    leading = table.nodes[0].address
    port, port_of_hosts = table.shared_ports
    return {
        COORDINATOR: f"{leading}:{port}",
        rank_connections.ADDRESS: f"{leading}:{port_of_hosts}",
        rank_connections.KEY: table.secret,
    }
