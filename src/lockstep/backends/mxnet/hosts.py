"""What ranks ask each other, from host to host: MXNet's parameter server adds up, and hangs when a rank has gone."""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

from lockstep.system.errors import BackendError, LockstepError

ADDRESS, KEY = "LOCKSTEP_HOSTS_ADDRESS", "LOCKSTEP_HOSTS_KEY"
"""Environment variables: where rank 0 listens, as host:port, and a word that strangers do not know."""
PATIENCE_SEC = 120.0
"""For rank 0 to listen, and for the others to come."""
ANSWER_SEC = 5
"""For one that has come to prove that it knows the key; a stranger that says nothing must not keep the ranks out."""


class Hosts:
    """This rank and the others; rank 0 hears all and answers all."""

    def __init__(self, rank: int, ranks: int, others: "list[Connection]") -> None:
        self.rank, self.ranks = rank, ranks
        self._others = others
        """All others, or rank 0 alone."""
        self.lost = False
        """Whether a rank is known to have gone."""

    def largest(self, values: list[int]) -> list[int]:
        """Return the largest of all ranks for every place; every rank must ask."""
        try:
            if self.rank == 0:
                heard = [values, *map(_receive, self._others)]
                values = [max(column) for column in zip(*heard, strict=True)]
            for other in self._others:
                other.send_bytes(struct.pack(f"<{len(values)}q", *values))
            return values if self.rank == 0 else _receive(self._others[0])
        except (EOFError, OSError, ValueError, struct.error) as error:  # the last two: what came are no such integers
            raise self.give_up() from error

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
                raise self.give_up()

    def give_up(self) -> LockstepError:
        """Note that a rank has gone; return what to raise."""
        self.lost = True
        return LockstepError("another rank has ended; its own message says why")

    def close(self) -> None:
        """Leave."""
        for other in self._others:
            other.close()


def _receive(other: "Connection") -> list[int]:
    """Return the integers that another rank sent. `Connection.recv` would unpickle, and so run, whatever comes."""
    received = other.recv_bytes(_LARGEST_MESSAGE_BYTES)
    return [value for (value,) in struct.iter_unpack("<q", received)]


_LARGEST_MESSAGE_BYTES = 2**16


def meet(rank: int, ranks: int, address: str, key: str) -> Hosts:
    """Return the ranks, once all have come to `address`, host:port. Raises `BackendError` if they do not."""
    try:
        host, _, port = address.rpartition(":")
        if rank == 0:
            with listening((host, int(port)), ranks, key) as listener:
                return Hosts(rank, ranks, come(listener, ranks))
        return Hosts(rank, ranks, [reach((host, int(port)), key)])
    except (OSError, EOFError, ValueError, AuthenticationError) as error:
        raise BackendError(f"the ranks do not find each other at {ADDRESS}={address}: {error or 'one has ended'}") from None


def listening(where: tuple[str, int], ranks: int, key: str) -> Listener:
    """Return what rank 0 listens with; port 0 stands for any."""
    return Listener(where, family="AF_INET", backlog=ranks, authkey=key.encode())


def come(listener: Listener, ranks: int) -> "list[Connection]":
    """Return the connections of all other ranks; strangers are turned away. Raises `TimeoutError`."""
    others: list[Connection] = []
    deadline = time.monotonic() + PATIENCE_SEC
    with _limited(listener, deadline):
        while len(others) < ranks - 1:
            try:
                other = listener.accept()
                _wait_for(other.fileno(), 0)
                others.append(other)
            except (AuthenticationError, EOFError, ConnectionError, BlockingIOError):  # the last: it did not answer in time
                if time.monotonic() > deadline:
                    raise TimeoutError("not all ranks have come") from None
    return others


@contextmanager
def _limited(listener: Listener, deadline: float) -> Iterator[None]:
    """Let a listener wait until a deadline, and for a word of a single connection only for `ANSWER_SEC`.

    `Listener` has no arguments for these; its socket has.
    """
    waiting = listener._listener._socket  # type: ignore[attr-defined]
    waiting.settimeout(max(deadline - time.monotonic(), 0.0))
    _wait_for(waiting.fileno(), ANSWER_SEC)  # accepted connections inherit it
    try:
        yield
    finally:
        waiting.settimeout(None)


def _wait_for(connection: int, sec: int) -> None:
    """Limit how long each read from a socket may wait; 0: without an end."""
    with socket.socket(fileno=socket.dup(connection)) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", sec, 0))


def reach(where: tuple[str, int], key: str) -> "Connection":
    """Return the connection to rank 0, once it listens."""
    deadline = time.monotonic() + PATIENCE_SEC
    while True:
        try:
            return Client(where, authkey=key.encode())
        except ConnectionRefusedError:  # it has not come so far
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
