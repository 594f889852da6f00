"""Connections between launchers, or ranks, on several machines. Both sides prove a shared secret; nothing is unpickled.

The proof is that of `multiprocessing.connection`. It is made when a connection opens. What follows is not encrypted.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Generator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from typing import Any

from lockstep.system.errors import BackendError

ANSWER_SEC = 5
"""Seconds for a new connection to prove that it knows the secret, and for a sender until its data are taken."""
_AGAIN_SEC = 0.2
"""Seconds between two tries to connect, or two looks for a connection."""
_LARGEST_MESSAGE_BYTES = 2**20
_STRANGERS = 64
"""At most this many connections prove themselves at the same time. Others wait."""


def send(connection: "Connection", message: dict[str, Any]) -> None:
    """Send a message, as JSON. Raises `OSError` if the other side has closed or takes no data."""
    connection.send_bytes(json.dumps(message, allow_nan=False).encode())


def receive(connection: "Connection") -> dict[str, Any]:
    """Return the next message. Raises `EOFError`, `OSError`, or `ValueError` if it is not one."""
    message = json.loads(connection.recv_bytes(_LARGEST_MESSAGE_BYTES))
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    return message


def limit_waiting(connection: "Connection", receive_sec: int) -> None:
    """Limit how many seconds each read may wait (0: no limit), and each write to `ANSWER_SEC`."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", receive_sec, 0))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", ANSWER_SEC, 0))


def has_ended(connection: "Connection") -> bool:
    """Return whether the other side has closed a connection. Data that it sent before are not consumed."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as line:
        try:
            return not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def address_of(connection: "Connection") -> str:
    """Return this side's address of a connection."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as line:
        return str(line.getsockname()[0])


def reach(host: str, port: int, key: str, patience_sec: float, bind: str | None = None) -> "Connection":
    """Return a connection to a server that has the same secret, once it listens. Its reads wait without a limit.

    `bind` is this side's address; by default the system chooses it. Raises `BackendError` if the secrets differ, or if there
    is no server after `patience_sec`.
    """
    deadline = time.monotonic() + patience_sec
    while True:
        try:
            return _connected(host, port, key, bind)
        except AuthenticationError:
            raise BackendError(f"{host}:{port} has another secret; give every node the same one") from None
        except (OSError, EOFError) as error:  # no server yet, a name that is not known yet, a link that is down
            if time.monotonic() > deadline:
                raise BackendError(
                    f"nothing answers at {host}:{port} after {patience_sec:.0f} s: {error or 'the connection was closed'}. "
                    "Check that node 0 is started there and that no firewall is between"
                ) from None
            time.sleep(_AGAIN_SEC)


def _connected(host: str, port: int, key: str, bind: str | None) -> "Connection":
    source = None if bind is None else (bind, 0)
    line = socket.create_connection((host, port), timeout=ANSWER_SEC, source_address=source)
    line.settimeout(None)
    connection = Connection(line.detach())
    try:
        limit_waiting(connection, 2 * ANSWER_SEC)
        answer_challenge(connection, key.encode())
        deliver_challenge(connection, key.encode())
    except BaseException:
        connection.close()
        raise
    limit_waiting(connection, 0)  # an answer may come only after all nodes have
    return connection


def admitted(server: socket.socket, key: str, patience_sec: float) -> Generator["Connection | None", None, None]:
    """Yield every connection to a server that proves that it knows the secret. Reads of it wait for at most `ANSWER_SEC`.

    Yields None when there was none for a moment. Raises `TimeoutError` after `patience_sec`. Each connection is asked in a
    separate thread, so that silent strangers keep nobody out. The server stops listening when the iterator is closed.
    """
    deadline = time.monotonic() + patience_sec
    proven: SimpleQueue[Connection] = SimpleQueue()
    accepting = threading.Thread(target=_accept, args=(server, key, proven), name="lockstep-accept", daemon=True)
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


def _accept(server: socket.socket, key: str, proven: "SimpleQueue[Connection]") -> None:
    places = threading.BoundedSemaphore(_STRANGERS)

    def ask(connection: Connection) -> None:
        try:
            limit_waiting(connection, ANSWER_SEC)
            deliver_challenge(connection, key.encode())
            answer_challenge(connection, key.encode())
            proven.put(connection)
        except (AuthenticationError, EOFError, OSError, ValueError, AssertionError):  # no answer in time, or nonsense
            connection.close()
        finally:
            places.release()

    while True:
        try:
            line, _ = server.accept()
        except OSError:  # the server is closed
            return
        places.acquire()
        threading.Thread(target=ask, args=(Connection(line.detach()),), name="lockstep-ask", daemon=True).start()
