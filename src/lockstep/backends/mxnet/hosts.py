"""What ranks ask each other, from host to host: MXNet's parameter server adds up, and hangs when a rank has gone."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener

from lockstep.errors import LockstepError

ADDRESS, KEY = "LOCKSTEP_HOSTS_ADDRESS", "LOCKSTEP_HOSTS_KEY"
"""Environment variables: where rank 0 listens, as host:port, and a word that strangers do not know."""
PATIENCE_SEC = 120.0
"""For rank 0 to listen, and for the others to come."""


class Hosts:
    """This rank and the others; rank 0 hears all and answers all."""

    def __init__(self, rank: int, ranks: int, address: str, key: str) -> None:
        host, _, port = address.rpartition(":")
        where, word = (host, int(port)), key.encode()
        with _watched():
            self._others = _come(where, word, ranks) if rank == 0 else [_reach(where, word)]
        self._leads = rank == 0

    def largest(self, values: list[int]) -> list[int]:
        """Return the largest of all ranks for every place; every rank must ask."""
        with _watched():
            if self._leads:
                heard = [values, *(other.recv() for other in self._others)]
                values = [max(column) for column in zip(*heard, strict=True)]
            for other in self._others:
                other.send(values)
            return values if self._leads else self._others[0].recv()

    def close(self) -> None:
        """Leave."""
        for other in self._others:
            other.close()


def _come(where: tuple[str, int], word: bytes, ranks: int) -> "list[Connection]":
    with Listener(where, authkey=word) as listener:
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


@contextmanager
def _watched() -> Iterator[None]:
    """Say of a connection that ends that a peer has ended."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise LockstepError("another rank has ended; its own message says why") from error
