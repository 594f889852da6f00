"""Starting Paddle's ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.launch.nodes import Start, Table, share_cores


@contextmanager
def prepare_ranks(table: Table, distributed: str) -> Iterator[Start]:
    """Yield how this machine's ranks are started. Each gets the addresses of all, as from Paddle's
    own launcher.

    Paddle's own launcher is not used: it writes the ranks' output to files and passes on only
    SIGTERM.
    """
    yield Start(table, lambda local_rank: trainer(table, local_rank))


def trainer(table: Table, local_rank: int) -> dict[str, str]:
    """Return the environment variables that make a local rank one of Paddle's trainers."""
    rank = table.first + local_rank
    return {
        "PADDLE_MASTER": f"{table.nodes[0].address}:{table.shared_ports[0]}",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(table.places),
        "PADDLE_CURRENT_ENDPOINT": table.places[rank],
        "PADDLE_TRAINERS_NUM": str(table.ranks),
        "PADDLE_TRAINER_ID": str(rank),
    } | share_cores("OMP_NUM_THREADS", table)
