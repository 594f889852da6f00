"""Who may use the server: shared secret, names in the Host header, and pages of other origins."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockstep.system.errors import UserError

SHORTEST_TOKEN = 16
"""Characters. Shorter ones can be guessed."""
OPEN = frozenset(("/", "/v2/health/live", "/v2/health/ready"))
"""Paths that need no token: the page, which asks for it, and what load balancers ask."""
MAKES_TOKEN = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Access:
    """The rules for requests."""

    token: str | None = None
    hosts: frozenset[str] | None = None
    """The names that the Host header may have, without port; None: any."""

    def find_refusal(
        self, method: str, path: str, headers: Mapping[bytes, bytes]
    ) -> tuple[int, str] | None:
        """Return status and reason if a request is refused; None if it is allowed. Names of headers
        are in lower case.

        - A page of another server whose name was changed to this address (DNS rebinding) has a Host
          that is not expected.
        - A page of another origin cannot read answers, but could send images; browsers send its
          Origin.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and get_host_name(host) not in self.hosts:
            return (
                403,
                f"Host is {host!r:.80}, which this server does not expect; add --allow-host NAME",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if b"origin" in headers and origin.partition("://")[2].lower() != host.lower():
            return (
                403,
                "the request comes from a page of another origin; only this server's own page"
                " may send requests",
            )
        is_foreign = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        if is_foreign and method not in ("GET", "HEAD"):
            return (
                403,
                "the request comes from a page of another site; only this server's own page may"
                " send requests",
            )
        if self.token is None or path in OPEN:
            return None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = b""
        if not hmac.compare_digest(_digest(token.strip()), _digest(self.token.encode())):
            return (
                401,
                "the token is missing or wrong; expected the header Authorization: Bearer TOKEN",
            )
        return None


def _digest(secret: bytes) -> bytes:
    # Digests have equal length, so the time of a comparison reveals nothing.
    return hashlib.sha256(secret).digest()


def get_host_name(host: str) -> str:
    """Return the name in a Host header, without port, in lower case.

    >>> get_host_name("LocalHost:8000"), get_host_name("[::1]:8000"), get_host_name("::1")
    ('localhost', '::1', '::1')
    """
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::\d*)?", host)
    if bracketed:
        return bracketed[1].lower()
    name, colon, _ = host.partition(":")
    return (name if colon and ":" not in host[len(name) + 1 :] else host).lower().rstrip(".")


def is_loopback(address: str) -> bool:
    """Return whether an address is reached from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def make_access(
    host: str, address: str, token: str | None, *, no_token: bool, hosts: Iterable[str] = ()
) -> Access:
    """Return the rules for a server that listens on `address`, which is that of `host`.

    Raises `UserError` if the token can be guessed, or if others could use the server without one.
    """
    if token is not None and (len(token) < SHORTEST_TOKEN or not re.fullmatch(r"[!-~]+", token)):
        raise UserError(
            f"the token has {len(token)} characters; expected at least {SHORTEST_TOKEN}, visible"
            f" ASCII without spaces. Make one: {MAKES_TOKEN}"
        )
    local = is_loopback(address)
    if not local and token is None and not no_token:
        raise UserError(
            f"everyone who reaches {host} could use this server; expected a token. Set"
            " LOCKSTEP_SERVE_TOKEN or --token-file, listen on 127.0.0.1, or add --no-token if the"
            " network is private"
        )
    names = {get_host_name(allowed) for allowed in hosts}
    if local:
        names |= {*_LOOPBACK_NAMES, get_host_name(host), address}
    return Access(token, frozenset(names) if names else None)
