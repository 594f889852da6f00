"""Questions between the hosts of the ranks. MXNet's parameter server only adds up, and hangs when a rank has ended."""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

from lockstep.system.errors import BackendError, LockstepError

ADDRESS, KEY = "LOCKSTEP_HOSTS_ADDRESS", "LOCKSTEP_HOSTS_KEY"
"""Environment variables: the address where rank 0 listens, as host:port, and a shared secret."""
PATIENCE_SEC = 120.0
"""Seconds to wait until rank 0 listens and the other ranks have connected."""
ANSWER_SEC = 5
"""Seconds for a new connection to prove that it knows the key. A silent stranger must not keep the ranks out."""


class Hosts:
    """This rank and its connections. Rank 0 receives the values of all ranks and answers all of them."""

    def __init__(self, rank: int, ranks: int, others: "list[Connection]") -> None:
        self.rank, self.ranks = rank, ranks
        self._others = others
        """Connections to all other ranks on rank 0; on the other ranks, only to rank 0."""
        self.lost = False
        """Whether a rank is known to have ended."""

    def largest(self, values: list[int]) -> list[int]:
        """Return the largest value over all ranks, for every position of the list. Every rank must call it."""
        try:
            if self.rank == 0:
                heard = [values, *map(_receive, self._others)]
                values = [max(column) for column in zip(*heard, strict=True)]
            for other in self._others:
                other.send_bytes(struct.pack(f"<{len(values)}q", *values))
            return values if self.rank == 0 else _receive(self._others[0])
        except (EOFError, OSError, ValueError, struct.error) as error:  # the last two: the data are not integers
            raise self.give_up() from error

    def refuse_loss(self) -> None:
        """Raise `LockstepError` if a rank has ended. Data that it sent before are not consumed."""
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
        """Note that a rank has ended; return the error to raise."""
        self.lost = True
        return LockstepError("another rank has ended; its own message says why")

    def close(self) -> None:
        """Close the connections."""
        for other in self._others:
            other.close()


def _receive(other: "Connection") -> list[int]:
    """Return the integers that another rank sent. `Connection.recv` would unpickle, and so execute, any data."""
    received = other.recv_bytes(_LARGEST_MESSAGE_BYTES)
    return [value for (value,) in struct.iter_unpack("<q", received)]


_LARGEST_MESSAGE_BYTES = 2**16


def meet(rank: int, ranks: int, address: str, key: str) -> Hosts:
    """Return the connected ranks, once all have come to `address` (host:port). Raises `BackendError` if they do not."""
    try:
        host, _, port = address.rpartition(":")
        if rank == 0:
            with listening((host, int(port)), ranks, key) as listener:
                return Hosts(rank, ranks, come(listener, ranks))
        return Hosts(rank, ranks, [reach((host, int(port)), key)])
    except (OSError, EOFError, ValueError, AuthenticationError) as error:
        raise BackendError(f"the ranks do not find each other at {ADDRESS}={address}: {error or 'one has ended'}") from None


def listening(where: tuple[str, int], ranks: int, key: str) -> Listener:
    """Return the listener of rank 0. Port 0 stands for any free port."""
    return Listener(where, family="AF_INET", backlog=ranks, authkey=key.encode())


def come(listener: Listener, ranks: int) -> "list[Connection]":
    """Return the connections of all other ranks; strangers are refused. Raises `TimeoutError`."""
    others: list[Connection] = []
    deadline = time.monotonic() + PATIENCE_SEC
    with _limited(listener, deadline):
        while len(others) < ranks - 1:
            try:
                other = listener.accept()
                _wait_for(other.fileno(), 0)
                others.append(other)
            except TimeoutError:  # of the listener itself
                raise
            except (AuthenticationError, EOFError, OSError):  # no answer in time, or nonsense
                if time.monotonic() > deadline:
                    raise TimeoutError("not all ranks have connected") from None
    return others


@contextmanager
def _limited(listener: Listener, deadline: float) -> Iterator[None]:
    """Let a listener wait until a deadline, and for data of a single connection only for `ANSWER_SEC`.

    `Listener` has no arguments for these limits, but its socket has.
    """
    waiting = listener._listener._socket  # type: ignore[attr-defined]
    waiting.settimeout(max(deadline - time.monotonic(), 0.0))
    _wait_for(waiting.fileno(), ANSWER_SEC)  # accepted connections inherit it
    try:
        yield
    finally:
        waiting.settimeout(None)


def _wait_for(connection: int, sec: int) -> None:
    """Limit how many seconds each read from a socket may wait; 0: no limit."""
    with socket.socket(fileno=socket.dup(connection)) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", sec, 0))


def reach(where: tuple[str, int], key: str) -> "Connection":
    """Return the connection to rank 0, once it listens."""
    deadline = time.monotonic() + PATIENCE_SEC
    while True:
        try:
            return Client(where, authkey=key.encode())
        except ConnectionRefusedError:  # it does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
