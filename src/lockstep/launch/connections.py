"""Connections between launchers, or ranks, on several machines. Both sides prove a shared secret;
nothing is unpickled.

The proof is made when a connection opens, and includes the addresses of both ends
(`lockstep.launch.handshake`). Each message after it carries a proof, too. Nothing is encrypted.
"""

import errno
import hmac
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Self

from lockstep.launch.handshake import PROOF_BYTES, Keys, Relayed, examine, introduce
from lockstep.system.errors import BackendError
from lockstep.system.strict_json import parsed

ANSWER_SEC = 5
"""Seconds that a new connection may take to prove the secret, and a sender to deliver its data."""
_AGAIN_SEC = 0.2
"""Seconds between two tries to connect, or two looks for a connection."""
_LARGEST_MESSAGE_BYTES = 2**20
_STRANGERS = 64
"""At most this many connections prove themselves at the same time. A newer one replaces the
oldest."""


class Line:
    """A connection whose ends share a secret. A context manager.

    Each message carries HMAC-SHA256 of its number and its bytes, under a key of this connection and
    direction: nobody on the way can change, repeat, drop or send back a message. Threads that send
    need a lock.
    """

    def __init__(self, connection: "Connection", keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._sent = self._received = 0

    def send_bytes(self, data: bytes) -> None:
        """Send a message. Raises `OSError` if the other side has closed or takes no data."""
        proof = _compute_proof(self._keys.sending, self._sent, data)
        self._sent += 1
        self._connection.send_bytes(proof + data)

    def recv_bytes(self, most_bytes: int) -> bytes:
        """Return the next message. Raises `EOFError`, `OSError`, or `ValueError` if the message is
        not the one that the other side sent next."""
        received = self._connection.recv_bytes(PROOF_BYTES + most_bytes)
        proof = received[:PROOF_BYTES]
        data = received[PROOF_BYTES:]
        expected = _compute_proof(self._keys.receiving, self._received, data)
        if not hmac.compare_digest(proof, expected):
            raise ValueError("a message was changed on the way, repeated or dropped")
        self._received += 1
        return data

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _compute_proof(key: bytes, number: int, data: bytes) -> bytes:
    return hmac.new(key, struct.pack("!Q", number) + data, "sha256").digest()


def send(connection: Line, message: dict[str, Any]) -> None:
    """Send a message, as JSON. Raises `OSError` if the other side has closed or takes no data."""
    connection.send_bytes(json.dumps(message, allow_nan=False).encode())


def receive(connection: Line) -> dict[str, Any]:
    """Return the next message. Raises `EOFError`, `OSError`, or `ValueError` if it is not valid."""
    message = parsed(connection.recv_bytes(_LARGEST_MESSAGE_BYTES))
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message


def limit_waiting(connection: Line, receive_sec: int) -> None:
    """Limit how many seconds each read may wait (0: no limit), and each write to `ANSWER_SEC`."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", receive_sec, 0))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", ANSWER_SEC, 0))


def has_ended(connection: Line) -> bool:
    """Return whether the other side has closed a connection. Data that it sent before are not
    consumed."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as line:
        try:
            return not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def own_address(connection: Line) -> str:
    """Return this side's address of a connection."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as line:
        return str(line.getsockname()[0])


def reach(host: str, port: int, key: str, patience_sec: float, bind: str | None = None) -> Line:
    """Connect to a server that knows the same secret, as soon as it listens. Reads of the
    connection wait without a limit.

    `bind` is this side's address; by default the system chooses it. Raises `BackendError` if the
    secrets differ, if a relay changes addresses, or if nothing listens after `patience_sec`.
    """
    deadline = time.monotonic() + patience_sec
    while True:
        try:
            return _connect(host, port, key, bind)
        except Relayed as error:
            raise BackendError(
                f"a relay, a proxy or NAT changes the addresses of the connection to {host}:{port}:"
                f" it goes from {error}. Give every node an address that reaches node 0 directly"
            ) from None
        except AuthenticationError:
            raise BackendError(
                f"{host}:{port} uses a different secret; give every node the same one"
            ) from None
        except ValueError as error:
            raise BackendError(f"{host}:{port} does not answer like node 0: {error}") from None
        # Nothing listens yet, the name does not resolve yet, or a link is down.
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise BackendError(
                    f"nothing answers at {host}:{port} after {patience_sec:.0f} s:"
                    f" {error or 'the connection was closed'}. Check that node 0 runs there and"
                    " that no firewall blocks it"
                ) from None
            time.sleep(_AGAIN_SEC)


def _connect(host: str, port: int, key: str, bind: str | None) -> Line:
    source = None if bind is None else (bind, 0)
    line = socket.create_connection((host, port), timeout=ANSWER_SEC, source_address=source)
    with line:
        keys = introduce(line, key.encode(), 2 * ANSWER_SEC)
        return _make_line(line, keys, 0)  # node 0 may answer only when all nodes have joined


def _make_line(opened: socket.socket, keys: Keys, receive_sec: int) -> Line:
    """Turn a socket into a connection, which then owns it."""
    opened.settimeout(None)
    line = Line(Connection(opened.detach()), keys)
    limit_waiting(line, receive_sec)
    return line


def admit(
    server: socket.socket, key: str, patience_sec: float
) -> Generator[Line | None, None, None]:
    """Yield every connection to a server that proves the secret. Reads of it wait for at most
    `ANSWER_SEC`.

    Yields None when none came for a moment. Raises `TimeoutError` after `patience_sec`. Each
    connection proves the secret in a separate thread within `ANSWER_SEC`, so that silent strangers
    keep nobody out. The server stops listening when the iterator is closed.
    """
    deadline = time.monotonic() + patience_sec
    proven: SimpleQueue[Line] = SimpleQueue()
    accepting = threading.Thread(
        target=_accept, args=(server, key, proven), name="lockstep-accept", daemon=True
    )
    accepting.start()
    try:
        while True:
            try:
                yield proven.get(timeout=_AGAIN_SEC)
            except Empty:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                yield None
    finally:
        server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        accepting.join()


def _accept(server: socket.socket, key: str, proven: "SimpleQueue[Line]") -> None:
    strangers: list[socket.socket] = []
    lock = threading.Lock()

    def ask(stranger: socket.socket, host: str, port: int) -> None:
        line = None
        try:
            keys = examine(stranger, key.encode(), ANSWER_SEC)
            line = _make_line(stranger.dup(), keys, ANSWER_SEC)
        except Relayed as error:
            sys.stderr.write(
                f"lockstep: refused a connection from {host}:{port}: it knows the secret, but a"
                f" relay, a proxy or NAT changes the addresses: it goes from {error}\n"
            )
        except (AuthenticationError, EOFError, OSError):
            pass  # no answer in time, or nonsense
        with lock:
            strangers.remove(stranger)
        stranger.close()
        if line is not None:
            proven.put(line)

    while True:
        try:
            line, address = server.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):  # the server is closed
                return
            time.sleep(_AGAIN_SEC)  # no free descriptors, or a stranger who has left
            continue
        with lock:
            strangers.append(line)
            if len(strangers) > _STRANGERS:
                with suppress(OSError):  # it has left; its thread removes it
                    strangers[-1 - _STRANGERS].shutdown(socket.SHUT_RDWR)
        threading.Thread(
            target=ask, args=(line, *address[:2]), name="lockstep-ask", daemon=True
        ).start()
