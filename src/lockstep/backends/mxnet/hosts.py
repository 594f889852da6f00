"""What ranks ask each other, from host to host: MXNet's parameter server adds up, and hangs when a rank has gone."""

import socket
import time
from multiprocessing.connection import Client, Connection, Listener

from lockstep.errors import BackendError, LockstepError

ADDRESS, KEY = "LOCKSTEP_HOSTS_ADDRESS", "LOCKSTEP_HOSTS_KEY"
"""Environment variables: where rank 0 listens, as host:port, and a word that strangers do not know."""
PATIENCE_SEC = 120.0
"""For rank 0 to listen."""


class Hosts:
    """This rank and the others; rank 0 hears all and answers all."""

    def __init__(self, rank: int, ranks: int, address: str, key: str) -> None:
        self.rank, self.ranks = rank, ranks
        host, _, port = address.rpartition(":")
        try:
            where = (host, int(port))
            self._others = _come(where, key.encode(), ranks) if rank == 0 else [_reach(where, key.encode())]
        except (OSError, EOFError, ValueError) as error:
            raise BackendError(
                f"the ranks do not find each other at {ADDRESS}={address}: {error or 'one has ended'}"
            ) from None
        self.lost = False
        """Whether a rank is known to have gone."""

    def largest(self, values: list[int]) -> list[int]:
        """Return the largest of all ranks for every place; every rank must ask."""
        try:
            if self.rank == 0:
                heard = [values, *(other.recv() for other in self._others)]
                values = [max(column) for column in zip(*heard, strict=True)]
            for other in self._others:
                other.send(values)
            return values if self.rank == 0 else self._others[0].recv()
        except (EOFError, OSError) as error:
            raise self._has_gone() from error

    def refuse_loss(self) -> None:
        """Raise `LockstepError` if a rank has gone; takes nothing of what it may have said before."""
        for other in self._others:
            with socket.socket(fileno=socket.dup(other.fileno())) as line:
                try:
                    ended = not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                except BlockingIOError:
                    ended = False
                except OSError:
                    ended = True
            if ended:
                raise self._has_gone()

    def _has_gone(self) -> LockstepError:
        self.lost = True
        return LockstepError("another rank has ended; its own message says why")

    def close(self) -> None:
        """Leave."""
        for other in self._others:
            other.close()


def _come(where: tuple[str, int], word: bytes, ranks: int) -> "list[Connection]":
    with Listener(where, backlog=ranks, authkey=word) as listener:
        return [listener.accept() for _ in range(1, ranks)]


def _reach(where: tuple[str, int], word: bytes) -> "Connection":
    deadline = time.monotonic() + PATIENCE_SEC
    while True:
        try:
            return Client(where, authkey=word)
        except ConnectionRefusedError:  # it has not come so far
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
