"""Connections between the ranks, by which their hosts exchange values.

For frameworks without such an exchange: MXNet's parameter server only adds up, and hangs when a
rank has ended; JAX's collective operations wait for the device.
"""

import socket
import struct
from contextlib import closing

from lockstep.launch.connections import Line, admit, has_ended, limit_waiting, reach
from lockstep.system.errors import BackendError, LockstepError
from lockstep.system.ranks import make_rank_error

ADDRESS = "LOCKSTEP_HOSTS_ADDRESS"
KEY = "LOCKSTEP_HOSTS_KEY"
"""Environment variables: the address where rank 0 listens, as host:port, and a shared secret."""
PATIENCE_SEC = 120.0
"""Seconds to wait until rank 0 listens and the other ranks have connected."""


class RankConnections:
    """This rank and its connections. Rank 0 receives the values of all ranks and answers all of
    them."""

    def __init__(self, rank: int, ranks: int, others: list[Line]) -> None:
        self.rank = rank
        self.ranks = ranks
        self._others = others
        """Connections to all other ranks on rank 0; on the other ranks, only to rank 0."""
        self.lost = False
        """Whether a rank is known to have ended."""

    def largest(self, values: list[int]) -> list[int]:
        """Return the largest value over all ranks, for every position of the list. Every rank must
        call it."""
        try:
            if self.rank == 0:
                rows = [values, *map(_receive, self._others)]
                values = [max(column) for column in zip(*rows, strict=True)]
            for other in self._others:
                other.send_bytes(struct.pack(f"<{len(values)}q", *values))
            return values if self.rank == 0 else _receive(self._others[0])
        # The last two: the data are not integers.
        except (EOFError, OSError, ValueError, struct.error) as error:
            raise self.give_up() from error

    def refuse_loss(self) -> None:
        """Raise `LockstepError` if a rank has ended. Data that it sent before are not consumed."""
        if any(map(has_ended, self._others)):
            raise self.give_up()

    def give_up(self) -> LockstepError:
        """Note that a rank has ended; return the error to raise."""
        self.lost = True
        return make_rank_error()

    def close(self) -> None:
        """Close the connections."""
        for other in self._others:
            other.close()


def _receive(other: Line) -> list[int]:
    """Return the integers that another rank sent. Nothing is unpickled, which would execute any
    data."""
    received = other.recv_bytes(_LARGEST_MESSAGE_BYTES)
    return [value for (value,) in struct.iter_unpack("<q", received)]


_LARGEST_MESSAGE_BYTES = 2**16


def meet_ranks(rank: int, ranks: int, address: str, key: str) -> RankConnections:
    """Return the connected ranks, once all have joined at `address` (host:port). Raises
    `BackendError` if they do not."""
    host, _, port = address.rpartition(":")
    try:
        if rank == 0:
            return RankConnections(
                rank, ranks, accept_ranks(open_server(host, int(port), ranks), ranks, key)
            )
        return RankConnections(rank, ranks, [reach(host, int(port), key, PATIENCE_SEC)])
    except (BackendError, OSError, ValueError) as error:
        raise BackendError(
            f"the ranks cannot find each other at {ADDRESS}={address}: {error}"
        ) from None


def open_server(host: str, port: int, ranks: int) -> socket.socket:
    """Return the socket at which rank 0 listens. Port 0 stands for any free port."""
    return socket.create_server((host, port), backlog=ranks)


def accept_ranks(server: socket.socket, ranks: int, key: str) -> list[Line]:
    """Return the connections of all other ranks; strangers are refused. Closes the server.

    Raises `BackendError` if ranks are missing after `PATIENCE_SEC`.
    """
    others: list[Line] = []
    with server, closing(admit(server, key, PATIENCE_SEC)) as arrivals:
        while len(others) < ranks - 1:
            try:
                other = next(arrivals)
            except TimeoutError:
                raise BackendError(
                    f"{len(others)} of {ranks - 1} other ranks joined within {PATIENCE_SEC:.0f} s;"
                    " the output of the missing ones says why"
                ) from None
            if other is not None:
                limit_waiting(other, 0)  # a question may take as long as its slowest rank computes
                others.append(other)
    return others
