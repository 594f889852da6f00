"""The proof of a shared secret when a connection opens, and the keys of the messages that follow.

Both ends prove that they know the secret, with HMAC-SHA256. What is proven includes both addresses,
as each end sees them: a relay has a different address and cannot pass the proofs on. All
parts have a fixed length:

    server to client    `GREETING`, the server's nonce
    client to server    the client's nonce, its address, the server's address, the client's proof
    server to client    `WELCOME` and the server's proof; or a refusal: see `Verdict`

A proof is HMAC(secret, label, addresses, nonces). Labels differ by role, so that sending a proof
back is useless. Nonces are new for every connection, so that reusing a proof is useless. The client
proves first: strangers who connect to a server learn nothing that depends on the secret.
"""

import hmac
import ipaddress
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from enum import Enum
from multiprocessing import AuthenticationError

GREETING = b"lockstep link 1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
_PLACE_BYTES = 18
"""An address as IPv6, 16 bytes, and a port."""


class Verdict(Enum):
    """The first byte of the server's answer."""

    WELCOME = b"w"
    """The server's proof follows."""
    OTHER_SECRET = b"s"
    """The client does not know the secret. Zeros follow: the server proves nothing to strangers."""
    OTHER_ADDRESSES = b"a"
    """The client knows the secret, but the ends see different addresses. The server's view follows,
    after a proof of it."""


class Relayed(AuthenticationError):
    """Both ends know the secret, but something between them changes their addresses."""


@dataclass(frozen=True)
class Keys:
    """The keys of the messages of one connection."""

    sending: bytes
    receiving: bytes


@dataclass(frozen=True)
class _View:
    """What both proofs cover, as one end sees it."""

    client: bytes
    server: bytes
    nonces: bytes = b""

    @property
    def places(self) -> bytes:
        return self.client + self.server

    def sign(self, secret: bytes, label: bytes) -> bytes:
        """Return HMAC-SHA256. Only the label varies in length; it ends with a zero byte."""
        message = GREETING + label + b"\0" + self.places + self.nonces
        return hmac.new(secret, message, "sha256").digest()

    def keys(self, secret: bytes, *, is_client: bool) -> Keys:
        client = self.sign(secret, b"messages of the client")
        server = self.sign(secret, b"messages of the server")
        return Keys(client, server) if is_client else Keys(server, client)


def introduce(line: socket.socket, secret: bytes, seconds: float) -> Keys:
    """Prove the secret to a server, and check that it knows it. Takes at most `seconds`.

    Raises `AuthenticationError` if the secrets differ, `Relayed` if the ends see different
    addresses, `OSError` or `EOFError` if the connection ends or no answer comes, `ValueError` if it
    is not a server of this protocol.
    """
    deadline = time.monotonic() + seconds
    greeting = _read(line, len(GREETING) + NONCE_BYTES, deadline)
    if not greeting.startswith(GREETING):
        raise ValueError("another version of Lockstep, or another program, listens there")
    own = secrets.token_bytes(NONCE_BYTES)
    nonces = greeting[len(GREETING) :] + own
    view = _View(_pack(line.getsockname()), _pack(line.getpeername()), nonces)
    line.sendall(own + view.places + view.sign(secret, b"client"))
    answer = _read(line, 1, deadline)
    proof = _read(line, PROOF_BYTES, deadline)
    if answer not in {verdict.value for verdict in Verdict}:
        raise ValueError("another version of Lockstep, or another program, listens there")
    verdict = Verdict(answer)
    if verdict is Verdict.OTHER_ADDRESSES:
        places = _read(line, 2 * _PLACE_BYTES, deadline)
        theirs = _View(places[:_PLACE_BYTES], places[_PLACE_BYTES:], view.nonces)
        if hmac.compare_digest(proof, theirs.sign(secret, b"other addresses")):
            raise Relayed(f"{_describe(view)} here, and {_describe(theirs)} there")
    is_proven = hmac.compare_digest(proof, view.sign(secret, b"server"))
    if verdict is not Verdict.WELCOME or not is_proven:
        raise AuthenticationError("the secrets differ")
    return view.keys(secret, is_client=True)


def examine(line: socket.socket, secret: bytes, seconds: float) -> Keys:
    """Check that a client knows the secret, and prove it in turn. Takes at most `seconds`.

    Raises `AuthenticationError` if the secrets differ, `Relayed` if the ends see different
    addresses, `OSError` or `EOFError` if the connection ends or no answer comes.
    """
    deadline = time.monotonic() + seconds
    own = secrets.token_bytes(NONCE_BYTES)
    line.settimeout(seconds)
    line.sendall(GREETING + own)
    answer = _read(line, NONCE_BYTES + 2 * _PLACE_BYTES + PROOF_BYTES, deadline)
    nonces = own + answer[:NONCE_BYTES]
    places = answer[NONCE_BYTES:-PROOF_BYTES]
    proof = answer[-PROOF_BYTES:]
    theirs = _View(places[:_PLACE_BYTES], places[_PLACE_BYTES:], nonces)
    view = _View(_pack(line.getpeername()), _pack(line.getsockname()), nonces)
    if not hmac.compare_digest(proof, theirs.sign(secret, b"client")):
        line.sendall(Verdict.OTHER_SECRET.value + bytes(PROOF_BYTES))
        raise AuthenticationError("the secrets differ")
    if theirs != view:
        proof = view.sign(secret, b"other addresses")
        line.sendall(Verdict.OTHER_ADDRESSES.value + proof + view.places)
        raise Relayed(f"{_describe(theirs)} there, and {_describe(view)} here")
    line.sendall(Verdict.WELCOME.value + view.sign(secret, b"server"))
    return view.keys(secret, is_client=False)


def _read(line: socket.socket, length: int, deadline: float) -> bytes:
    """Return exactly `length` bytes. A sender of one byte at a time gets no more time."""
    received = b""
    while len(received) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        line.settimeout(left)
        part = line.recv(length - len(received))
        if not part:
            raise EOFError("the connection was closed")
        received += part
    return received


def _pack(place: tuple[str, int]) -> bytes:
    """Return address and port of a socket as bytes. IPv4 within IPv6 is the same as IPv4."""
    address = ipaddress.ip_address(place[0].partition("%")[0])
    mapped = ipaddress.IPv6Address(f"::ffff:{address}") if address.version == 4 else address
    return mapped.packed + struct.pack("!H", place[1])


def _describe(view: _View) -> str:
    places = []
    for packed in (view.client, view.server):
        address = ipaddress.IPv6Address(packed[:16])
        places.append(f"{address.ipv4_mapped or address}:{int.from_bytes(packed[16:], 'big')}")
    return " to ".join(places)
