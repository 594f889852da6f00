"""The function that replaces `bind` in a framework's libraries. `tests/cli/test_loopback.py` tests
their sockets."""

import ctypes
import errno
import os
import socket
import struct

import pytest

from lockstep.backends.shared import bind_replacement
from lockstep.backends.shared.bound_sockets import (
    find_listening_sockets,
    is_loopback,
    refuse_open_sockets,
)
from lockstep.system.errors import BackendError
from lockstep.system.ranks import LISTEN_ADDRESS

PORT = 4660


def sockaddr_in(address: str, port: int = PORT) -> bytes:
    return (
        struct.pack("=H", socket.AF_INET)
        + struct.pack("!H", port)
        + socket.inet_aton(address)
        + bytes(8)
    )


def sockaddr_in6(address: str) -> bytes:
    packed = socket.inet_pton(socket.AF_INET6, address)
    return struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", PORT, 0) + packed + bytes(4)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (sockaddr_in("0.0.0.0"), sockaddr_in("127.0.0.1")),
        (sockaddr_in6("::"), sockaddr_in6("::ffff:127.0.0.1")),
        (sockaddr_in6("::ffff:0.0.0.0"), sockaddr_in6("::ffff:127.0.0.1")),
        (sockaddr_in("192.0.2.1"), sockaddr_in("192.0.2.1")),
        (sockaddr_in6("2001:db8::1"), sockaddr_in6("2001:db8::1")),
        (
            struct.pack("=H", socket.AF_UNIX) + b"/a/path\0",
            struct.pack("=H", socket.AF_UNIX) + b"/a/path\0",
        ),
        (b"", b""),
    ],
)
def test_all_interfaces_and_nothing_else_become_loopback(requested: bytes, expected: bytes) -> None:
    assert bind_replacement._confine_address(requested, "127.0.0.1") == expected


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("127.0.0.1 127.9.9.9 ::1 ::ffff:127.0.0.1", True),
        ("0.0.0.0 :: ::ffff:0.0.0.0 192.0.2.1 2001:db8::1 ::ffff:192.0.2.1", False),
    ],
)
def test_loopback_addresses_are_told_from_others(addresses: str, expected: bool) -> None:
    assert {is_loopback(address) for address in addresses.split()} == {expected}


def test_a_process_knows_what_it_listens_on() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as other,
    ):
        places = [("127.0.0.1", one.getsockname()[1]), ("::1", other.getsockname()[1])]
        assert set(places) <= set(find_listening_sockets(os.getpid()))
    assert not set(places) & set(find_listening_sockets(os.getpid()))


def test_a_rank_that_listens_everywhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LISTEN_ADDRESS, "127.0.0.1")
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        message = f"this rank listens on .*0.0.0.0 port {port}.*, expected the loopback interface"
        with pytest.raises(BackendError, match=message):
            refuse_open_sockets()


def bind(address: bytes) -> tuple[int, int, object]:
    """Bind a socket as a framework's library does; return the result, the error and the socket's
    address."""
    function_type = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32, use_errno=True
    )
    function = ctypes.cast(bind_replacement._own_bind(), function_type)
    with socket.socket() as opened:
        result = function(opened.fileno(), address, len(address))
        return result, ctypes.get_errno(), opened.getsockname()[0]


def test_a_socket_bound_to_all_interfaces_by_a_library_is_on_loopback() -> None:
    result, _, address = bind(sockaddr_in("0.0.0.0", 0))
    assert (result, address) == (0, "127.0.0.1")


def test_a_port_that_is_taken_is_the_error_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        result, error, _ = bind(sockaddr_in("0.0.0.0", server.getsockname()[1]))
    assert (result, error) == (-1, errno.EADDRINUSE)


def test_a_socket_is_not_bound_when_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(requested: bytes, own: str) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(bind_replacement, "_confine_address", fail)
    assert bind(sockaddr_in("0.0.0.0", 0))[:2] == (-1, errno.EACCES)
