"""Keep a framework's sockets on one address: loopback on one machine, the chosen address on
several.

TensorFlow's server and Paddle's store bind to all interfaces, and TensorFlow's server executes any
graph that it receives. A rank of `lockstep launch` therefore replaces the C function `bind` in the
loaded libraries: a request for all interfaces becomes a request for the rank's address
(`listen_address`). If a rank still listens elsewhere after it has met the others, it refuses to
train.
"""

import ipaddress
import socket
import struct
import sys
from pathlib import Path

from lockstep.system.errors import BackendError
from lockstep.system.ranks import listen_address

_ADVICE = "Train in one process, or use --backend torch, which needs no server"


def confine_sockets() -> None:
    """Make libraries of this rank that bind a socket to all interfaces bind it to the rank's
    address instead.

    This applies to the libraries that are already loaded, and only to ranks of `lockstep launch`.
    Python's own sockets are not changed. Raises `BackendError` if it is not possible on this
    system.
    """
    address = listen_address()
    if address is None:
        return
    from lockstep.backends.shared.bind_replacement import replace_bind

    message = f"cannot keep this framework's sockets on the address {address}"
    try:
        libraries = replace_bind()
    except (OSError, AttributeError, ValueError) as error:
        raise BackendError(f"{message} here: {error}. {_ADVICE}") from error
    if not libraries:
        raise BackendError(f"{message} on {sys.platform}. {_ADVICE}")


def refuse_open_sockets() -> None:
    """Raise `BackendError` if this rank of `lockstep launch` listens elsewhere than at its address
    or on loopback."""
    own = listen_address()
    if own is None:
        return
    places = set()
    for address, port in find_listening_sockets("self"):
        if not is_loopback(address) and address.removeprefix("::ffff:") != own:
            places.add(f"{address} port {port}")
    if places:
        expected = "the loopback interface"
        if not is_loopback(own):
            expected = f"{own} and the loopback interface"
        raise BackendError(
            f"this rank listens on {', '.join(sorted(places))}, expected {expected} only. {_ADVICE}"
        )


_LISTENING = "0A"
"""The state TCP_LISTEN in /proc/net/tcp."""


def find_listening_sockets(process: int | str) -> list[tuple[str, int]]:
    """Return address and port of every TCP socket that a process of this machine listens on; an
    empty list without /proc."""
    folder = Path("/proc") / str(process)
    if not (folder / "net").is_dir():
        return []
    own = set()
    for file in (folder / "fd").iterdir():
        try:
            own.add(str(file.readlink()))
        except OSError:  # closed in the meantime
            continue
    places = []
    for family in ("tcp", "tcp6"):
        try:
            lines = (folder / "net" / family).read_text().splitlines()[1:]
        except OSError:  # a system without IPv6
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENING and f"socket:[{words[9]}]" in own:
                places.append(_parse_place(words[1]))
    return places


def _parse_place(text: str) -> tuple[str, int]:
    """Return address and port in a text such as 0100007F:B267: words of 32 bits in the processor's
    byte order."""
    address, port = text.split(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)


def is_loopback(address: str) -> bool:
    """Return whether an address belongs to the loopback interface, as IPv4, IPv6 or IPv4 within
    IPv6."""
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
