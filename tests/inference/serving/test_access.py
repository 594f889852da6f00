"""Who may use a server: hosts, origins, tokens."""

import socket

import pytest

from lockstep.inference.serving.access import Access, get_host_name, is_loopback, make_access
from lockstep.system.errors import UserError
from tests.inference.serving.cases import TOKEN

LOCAL = make_access("127.0.0.1", "127.0.0.1", None, no_token=False)
SECRET = make_access("0.0.0.0", "0.0.0.0", TOKEN, no_token=False)


def status(
    access: Access, method: str = "POST", path: str = "/predict", **headers: str
) -> int | None:
    names = {
        name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()
    }
    refusal = access.find_refusal(method, path, names)
    return None if refusal is None else refusal[0]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "localhost."]
)
def test_names_of_this_machine_are_allowed_on_loopback(host: str) -> None:
    assert status(LOCAL, host=host) is None


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8000", "127.0.0.1.evil", "localhost@evil", "::1:x"]
)
def test_other_names_are_refused_on_loopback(host: str) -> None:
    assert status(LOCAL, host=host) == 403
    assert status(LOCAL, "GET", "/v2/health/ready", host=host) == 403
    assert status(LOCAL) == 403  # no Host at all


def test_a_name_that_was_given_is_allowed() -> None:
    access = make_access("127.0.0.1", "127.0.0.1", None, no_token=False, hosts=["api.example"])
    assert [
        status(access, host=host)
        for host in ("api.example", "API.example:443", "localhost", "www.example")
    ] == [None, None, None, 403]
    public = make_access("0.0.0.0", "0.0.0.0", TOKEN, no_token=False, hosts=["api.example"])
    assert status(public, host="localhost", authorization=f"Bearer {TOKEN}") == 403


PROXIED = make_access(
    "127.0.0.1", "127.0.0.1", None, no_token=False, hosts=["photos.example", "localhost"]
)
PRIVATE = make_access("0.0.0.0", "0.0.0.0", None, no_token=True)
HERE = "127.0.0.1:8000"
PHOTOS = "photos.example"
EVIL = "evil.example"
REQUESTS = [
    # Programs that are no browsers send neither Origin nor Sec-Fetch-Site.
    (LOCAL, HERE, None, None, None),
    (LOCAL, EVIL, None, None, 403),
    (PROXIED, PHOTOS, None, None, None),
    # The server's own page, without a proxy: over plain HTTP to another machine, browsers send no
    # Sec-Fetch-Site.
    (LOCAL, HERE, f"http://{HERE}", "same-origin", None),
    (LOCAL, "localhost:8000", "http://LOCALHOST:8000", None, None),
    (LOCAL, "localhost", "http://localhost:80", None, None),
    (LOCAL, "[::1]:8000", "http://[::1]:8000", None, None),
    (PRIVATE, "192.0.2.7:8000", "http://192.0.2.7:8000", None, None),
    # Another program's page on this machine.
    (LOCAL, "localhost:8000", "http://localhost:3000", None, 403),
    (LOCAL, "localhost:8000", "http://localhost:3000", "same-site", 403),
    (LOCAL, "localhost:8000", "http://127.0.0.1:8000", None, 403),
    (LOCAL, "localhost:8000", "https://localhost:8000", None, 403),
    (PROXIED, HERE, "http://localhost:3000", None, 403),
    (PROXIED, HERE, "http://app.localhost:3000", None, 403),
    (PROXIED, "localhost:8000", "http://localhost:3000", "same-site", 403),
    # Pages of the web, from every kind of browser.
    (LOCAL, HERE, f"https://{EVIL}", "cross-site", 403),
    (LOCAL, HERE, f"https://{EVIL}", None, 403),
    (LOCAL, HERE, f"http://{EVIL}", None, 403),
    (LOCAL, HERE, None, "cross-site", 403),
    (LOCAL, HERE, None, "same-site", 403),
    (LOCAL, HERE, None, "Same-Origin", 403),
    (LOCAL, HERE, "", "same-origin", 403),
    (PROXIED, HERE, f"http://{EVIL}", None, 403),
    (PROXIED, PHOTOS, f"https://{EVIL}", None, 403),
    (PROXIED, PHOTOS, f"https://{PHOTOS}.{EVIL}", None, 403),
    (PROXIED, PHOTOS, f"https://other.{PHOTOS}", "same-site", 403),
    (PROXIED, PHOTOS, f"http://{PHOTOS}@{EVIL}", None, 403),
    # A page without an origin: a file, or a frame in a sandbox.
    (LOCAL, HERE, "null", None, 403),
    (LOCAL, HERE, "null", "same-origin", 403),
    (PROXIED, PHOTOS, "null", "none", 403),
    (LOCAL, HERE, "chrome-extension://abc", None, 403),
    # DNS rebinding: the name stays that of the page. If a proxy hides it, only Origin is left.
    (LOCAL, f"{EVIL}:8000", f"http://{EVIL}:8000", None, 403),
    (LOCAL, f"{EVIL}:8000", f"http://{EVIL}:8000", "same-origin", 403),
    (PRIVATE, f"{EVIL}:8000", None, None, 403),
    (PRIVATE, f"{EVIL}:8000", f"http://{EVIL}:8000", "same-origin", 403),
    (LOCAL, HERE, f"http://{EVIL}", "same-origin", 403),
    # A proxy with TLS that passes on another Host. The browser has compared the origins.
    (LOCAL, HERE, f"https://{PHOTOS}", "same-origin", None),
    (LOCAL, HERE, f"https://{PHOTOS}", None, 403),
    (LOCAL, HERE, f"https://{PHOTOS}", "none", 403),
    (PROXIED, HERE, f"https://{PHOTOS}", None, None),
    (PROXIED, HERE, f"https://{PHOTOS}:8443", "same-origin", None),
    (PROXIED, HERE, f"https://{PHOTOS}", "cross-site", 403),
    # A proxy without TLS: only --allow-host helps.
    (LOCAL, HERE, f"http://{PHOTOS}", None, 403),
    (LOCAL, PHOTOS, f"http://{PHOTOS}", None, 403),
    (PROXIED, HERE, f"http://{PHOTOS}:8080", None, None),
    (PROXIED, PHOTOS, f"http://{PHOTOS}", None, None),
    # A proxy on this machine.
    (LOCAL, HERE, "http://localhost:8080", "same-origin", None),
    (LOCAL, HERE, "http://app.localhost:8080", "same-origin", None),
    (LOCAL, HERE, "http://localhost:8080", None, 403),
]


@pytest.mark.parametrize(("access", "host", "origin", "site", "expected"), REQUESTS)
def test_only_the_servers_own_page_may_send_requests(
    access: Access, host: str, origin: str | None, site: str | None, expected: int | None
) -> None:
    headers = {"host": host, "origin": origin, "sec_fetch_site": site}
    sent = {name: value for name, value in headers.items() if value is not None}
    for method, path in (("POST", "/predict"), ("GET", "/about"), ("HEAD", "/v2")):
        assert status(access, method, path, **sent) == expected


def test_a_link_on_another_page_may_lead_to_the_page_only() -> None:
    for site in ("cross-site", "same-site", "none", "same-origin"):
        assert status(LOCAL, "GET", "/", host=HERE, sec_fetch_site=site) is None
        assert status(LOCAL, "GET", "/", host=EVIL, sec_fetch_site=site) == 403
    assert status(LOCAL, "POST", "/", host=HERE, sec_fetch_site="cross-site") == 403


def test_the_host_is_checked_before_anything_else() -> None:
    headers = {b"host": b"evil.example", b"origin": b"null", b"sec-fetch-site": b"cross-site"}
    access = make_access("127.0.0.1", "127.0.0.1", TOKEN, no_token=False)
    refusal = access.find_refusal("POST", "/predict", headers)
    assert refusal is not None
    assert refusal[1].startswith("Host is 'evil.example', which this server does not expect")


def test_a_proxys_user_reads_what_to_set() -> None:
    headers = {b"host": HERE.encode(), b"origin": b"http://photos.example"}
    refusal = LOCAL.find_refusal("POST", "/predict", headers)
    assert refusal is not None
    for words in ("http://photos.example", "--allow-host", "proxy_set_header Host $http_host;"):
        assert words in refusal[1]


@pytest.mark.parametrize(
    "name", ["https://photos.example", "photos.example/", "", "*.example", "b\xfccher.example"]
)
def test_a_name_that_no_host_can_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="without scheme and path"):
        make_access("127.0.0.1", "127.0.0.1", None, no_token=False, hosts=[name])


def test_without_a_token_other_machines_use_addresses_and_names_of_this_machine() -> None:
    named = make_access("0.0.0.0", "0.0.0.0", None, no_token=True, hosts=["api.example"])
    names = ("192.0.2.7:8000", "[2001:db8::1]", "localhost:8000", f"{socket.gethostname()}:8000")
    for access in (PRIVATE, named):
        assert [status(access, host=host) for host in names] == [None] * 4
        assert status(access, host="1.2.3.4.evil.example") == 403
    assert status(PRIVATE, host="api.example") == 403
    assert status(named, host="api.example:8000") is None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"Bearer {TOKEN}", None),
        (f"bearer  {TOKEN} ", None),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        (f"Basic {TOKEN}", 401),
        (TOKEN, 401),
        ("Bearer ", 401),
        ("", 401),
        ("Bearer \xff\xfe", 401),
    ],
)
def test_the_token_is_needed_and_compared_whole(header: str, expected: int | None) -> None:
    assert status(SECRET, authorization=header) == expected
    assert status(SECRET, "GET", "/metrics", authorization=header) == expected


def test_the_page_and_health_need_no_token() -> None:
    for path in ("/", "/v2/health/live", "/v2/health/ready"):
        assert status(SECRET, "GET", path) is None
    for path in ("/about", "/metrics", "/v2", "/v2/models/m", "/v2/health/ready/", "//"):
        assert status(SECRET, "GET", path) == 401


@pytest.mark.parametrize(
    "token",
    ["", "short", "fifteen-letters", "spaces in the middle", "a-newline-at-the-end\n", "\xe9" * 20],
)
def test_a_token_that_can_be_guessed_or_sent_wrong_is_refused(token: str) -> None:
    with pytest.raises(UserError, match="the token has"):
        make_access("127.0.0.1", "127.0.0.1", token, no_token=False)


def test_another_address_needs_a_token_or_the_users_word() -> None:
    expected = r"everyone who reaches 0\.0\.0\.0 could use this server; expected a token"
    with pytest.raises(UserError, match=expected):
        make_access("0.0.0.0", "0.0.0.0", None, no_token=False)
    assert make_access("0.0.0.0", "0.0.0.0", None, no_token=True).token is None
    assert make_access("::1", "::1", None, no_token=False).hosts is not None


def test_addresses_and_names() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1")))
    names = {"a:1": "a", "[::1]": "::1", "[::1]:2": "::1", "a.b.": "a.b", "": ""}
    assert {host: get_host_name(host) for host in names} == names
