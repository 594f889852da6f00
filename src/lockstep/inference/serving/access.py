"""Who may use the server: shared secret, names in the Host header, and pages of other origins."""

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockstep.system.errors import UserError

SHORTEST_TOKEN = 16
"""Characters. Shorter tokens can be guessed."""
OPEN = frozenset(("/", "/v2/health/live", "/v2/health/ready"))
"""Paths that need no token: the page, which asks for it, and what load balancers ask."""
MAKES_TOKEN = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_SITES = (b"", b"none", b"same-origin")
"""Values of Sec-Fetch-Site that a request of this server's page, of its address in a browser, or of
another program has."""


@dataclass(frozen=True)
class Access:
    """The rules for requests."""

    token: str | None = None
    hosts: frozenset[str] | None = None
    """The names that the Host header may have, without port; None: any."""
    public_names: frozenset[str] = frozenset()
    """Names of a proxy. Its page may have any scheme and port."""
    takes_addresses: bool = False
    """Whether the Host header may also be any IP address."""

    def find_refusal(
        self, method: str, path: str, headers: Mapping[bytes, bytes]
    ) -> tuple[int, str] | None:
        """Return status and reason if a request is refused; None if it is allowed. Names of headers
        are in lower case.

        - A page of another server whose name was changed to this address (DNS rebinding) has a Host
          that is not expected.
        - A page of another origin cannot read answers, but could send images; browsers send its
          Origin. They send Sec-Fetch-Site only to https and to loopback.
        """
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = get_host_name(host)
        is_address = self.takes_addresses and _parse_address(name) is not None
        if self.hosts is not None and name not in self.hosts and not is_address:
            return (
                403,
                f"Host is {host!r:.80}, which this server does not expect; add --allow-host NAME",
            )
        site = headers.get(b"sec-fetch-site", b"")
        if site not in _SITES and not (path == "/" and method in ("GET", "HEAD")):
            return (
                403,
                "the request comes from a page of another site; only this server's own page may"
                " send requests",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if b"origin" in headers and not self._is_own_page(origin, host, site):
            return (
                403,
                f"the request comes from a page of another origin, {origin!r:.80}, and its Host is"
                f" {host!r:.80}; only this server's own page may send requests. If that is its page"
                " behind a proxy, start lockstep serve with --allow-host NAME, the page's name, and"
                " let the proxy pass on the Host (nginx: proxy_set_header Host $http_host;)",
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

    def _is_own_page(self, origin: str, host: str, site: bytes) -> bool:
        """Return whether an Origin is that of this server's page, when Host is expected."""
        scheme, _, place = origin.partition("://")
        name = get_host_name(place)
        if scheme not in ("http", "https"):  # null, or a browser's extension
            return False
        if name in self.public_names:
            return True
        if scheme == "http" and place.removesuffix(":80") == host.removesuffix(":80"):
            return True
        # The browser has compared its page with the address, before a proxy changed Host.
        return site == b"same-origin" and (scheme == "https" or is_loopback(name))


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


def is_loopback(name: str) -> bool:
    """Return whether a name or an address is reached from this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("app.localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    address = _parse_address(name.partition("%")[0])
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback


def _parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


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
    public = set()
    names = set()
    for allowed in hosts:
        name = get_host_name(allowed)
        if not re.fullmatch(r"[a-z0-9_.:-]+", name) or "/" in allowed:
            raise UserError(
                f"the allowed host is {allowed!r}; expected a name without scheme and path, such as"
                " photos.example"
            )
        names.add(name)
        if not is_loopback(name):
            public.add(name)
    if local:
        names |= {*_LOOPBACK_NAMES, get_host_name(host), address}
    elif token is None:  # pages of a changed name could use the server
        machine = socket.gethostname().lower()
        names |= {*_LOOPBACK_NAMES, get_host_name(host), machine, f"{machine}.local"}
    expected = frozenset(names) if names else None
    return Access(token, expected, frozenset(public), takes_addresses=not local)
