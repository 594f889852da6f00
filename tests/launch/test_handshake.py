"""The proof of a shared secret, against strangers who know what was said but not the secret, over
real sockets."""

import errno
import hmac
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from ipaddress import IPv4Address
from multiprocessing import AuthenticationError
from typing import Any

import pytest

from lockstep.launch import connections
from lockstep.launch.connections import Line, admit, reach
from lockstep.launch.handshake import GREETING, examine, introduce
from lockstep.system.errors import BackendError
from tests.processes import wait_until

SECRET = "a secret of the tests"
SOON_SEC = 30.0
REFUSED = b"s" + bytes(32)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a client's and a server's end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=SOON_SEC)
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


@contextmanager
def examine_client() -> Iterator[tuple[socket.socket, "Future[object]"]]:
    """Yield a client's end whose server examines it, and what will come of that."""
    with pair() as (client, server), ThreadPoolExecutor(1) as pool:
        yield client, pool.submit(examine, server, SECRET.encode(), SOON_SEC)


def read(line: socket.socket, length: int) -> bytes:
    return line.recv(length, socket.MSG_WAITALL)


def pack(place: tuple[str, int]) -> bytes:
    return bytes(10) + b"\xff\xff" + IPv4Address(place[0]).packed + place[1].to_bytes(2, "big")


def test_the_proofs_are_sha_256_over_roles_addresses_and_nonces() -> None:
    # By the protocol of the module's docstring, with Python's own HMAC.
    with examine_client() as (line, result):
        greeting = read(line, len(GREETING) + 32)
        places = pack(line.getsockname()) + pack(line.getpeername())
        own = os.urandom(32)
        about = places + greeting[len(GREETING) :] + own
        line.sendall(
            own + places + hmac.digest(SECRET.encode(), GREETING + b"client\0" + about, "sha256")
        )
        expected = b"w" + hmac.digest(SECRET.encode(), GREETING + b"server\0" + about, "sha256")
        assert read(line, 33) == expected
        result.result(SOON_SEC)


def test_a_proof_that_was_overheard_is_refused() -> None:
    heard = bytearray()
    with pair() as (client, server), ThreadPoolExecutor(2) as pool:
        examining = pool.submit(examine, server, SECRET.encode(), SOON_SEC)
        line: Any = Overheard(client, heard)
        introduction = pool.submit(introduce, line, SECRET.encode(), SOON_SEC)
        assert examining.result(SOON_SEC).sending == introduction.result(SOON_SEC).receiving
    with examine_client() as (line, result):
        read(line, len(GREETING) + 32)
        line.sendall(heard)
        assert read(line, 33) == REFUSED
        with pytest.raises(AuthenticationError):
            result.result(SOON_SEC)


class Overheard:
    """A socket that notes what is sent."""

    def __init__(self, line: socket.socket, heard: bytearray) -> None:
        self._line = line
        self._heard = heard

    def sendall(self, data: bytes) -> None:
        self._heard += data
        self._line.sendall(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._line, name)


def test_a_server_that_sends_a_clients_proof_back_is_refused() -> None:
    with pair() as (client, server), ThreadPoolExecutor(1) as pool:
        result = pool.submit(introduce, client, SECRET.encode(), SOON_SEC)
        server.sendall(GREETING + bytes(32))
        proof = read(server, 32 + 36 + 32)[-32:]
        server.sendall(b"w" + proof)
        with pytest.raises(AuthenticationError):
            result.result(SOON_SEC)


def test_what_is_another_program_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        result = pool.submit(reach, *server.getsockname(), SECRET, SOON_SEC)
        other, _ = server.accept()
        other.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" + bytes(64))
        with (
            other,
            pytest.raises(BackendError, match="another version of Lockstep, or another"),
        ):
            result.result(SOON_SEC)


def test_more_strangers_than_places_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_STRANGERS", 2)
    monkeypatch.setattr(connections, "ANSWER_SEC", int(SOON_SEC))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(admit(server, SECRET, SOON_SEC)) as arrivals,
        ThreadPoolExecutor(1) as pool,
    ):
        assert next(arrivals) is None  # it begins to accept
        strangers = [socket.create_connection(server.getsockname(), SOON_SEC) for _ in range(5)]
        result = pool.submit(reach, *server.getsockname(), SECRET, SOON_SEC)
        result.result(SOON_SEC).close()
        for line in [next(line for line in arrivals if line is not None), *strangers]:
            line.close()


class Failing(socket.socket):
    """A listening socket that cannot accept the first connection."""

    failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures == 0:
            self.failures = 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_server_that_could_not_accept_a_connection_accepts_the_next_one() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as opened,
        Failing(fileno=opened.detach()) as server,
        closing(admit(server, SECRET, SOON_SEC)) as arrivals,
        ThreadPoolExecutor(1) as pool,
    ):
        result = pool.submit(reach, *server.getsockname(), SECRET, SOON_SEC)
        with next(line for line in arrivals if line is not None), result.result(SOON_SEC):
            assert server.failures == 1


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    """Both ends of a connection that has been proven."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(admit(server, SECRET, SOON_SEC)) as arrivals,
        ThreadPoolExecutor(1) as pool,
    ):
        result = pool.submit(reach, *server.getsockname(), SECRET, SOON_SEC)
        there = next(line for line in arrivals if line is not None)
        with result.result(SOON_SEC) as here, there:
            yield here, there


@pytest.mark.parametrize("how", ["repeated", "changed", "left out", "sent back"])
def test_a_changed_message_is_refused(ends: tuple[Line, Line], how: str) -> None:
    here, there = ends
    raw_here, raw_there = (socket.socket(fileno=socket.dup(end.fileno())) for end in ends)
    with raw_here, raw_there:
        for message in (b"one", b"two"):
            here.send_bytes(message)
        framed = 4 + 32 + 3
        wait_until(lambda: len(raw_there.recv(1000, socket.MSG_PEEK)) == 2 * framed)
        first = read(raw_there, framed)
        second = read(raw_there, framed)
        assert first.endswith(b"one")
        sent = {
            "repeated": first * 2,
            "changed": first[:-1] + b"E",
            "left out": second,
            "sent back": first,
        }[how]
        receiver = here if how == "sent back" else there
        (raw_there if how == "sent back" else raw_here).sendall(sent)
        if how == "repeated":
            assert receiver.recv_bytes(100) == b"one"
        with pytest.raises(ValueError, match="changed on the way, repeated or dropped"):
            receiver.recv_bytes(100)
