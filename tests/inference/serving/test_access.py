"""Who may use a server: hosts, origins, tokens."""

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
    ] == [
        None,
        None,
        None,
        403,
    ]
    public = make_access("0.0.0.0", "0.0.0.0", TOKEN, no_token=False, hosts=["api.example"])
    assert status(public, host="localhost", authorization=f"Bearer {TOKEN}") == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"origin": "http://localhost:8000"}, None),
        ({"origin": "https://LOCALHOST:8000"}, None),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "same-origin"}, None),
        ({"sec_fetch_site": "none"}, None),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
    ],
)
def test_pages_of_other_origins_are_refused(headers: dict[str, str], expected: int | None) -> None:
    assert status(LOCAL, host="localhost:8000", **headers) == expected


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
    with pytest.raises(
        UserError, match=r"everyone who reaches 0\.0\.0\.0 could use this server; expected a token"
    ):
        make_access("0.0.0.0", "0.0.0.0", None, no_token=False)
    assert make_access("0.0.0.0", "0.0.0.0", None, no_token=True) == Access(None, None)
    assert make_access("::1", "::1", None, no_token=False).hosts is not None


def test_addresses_and_names() -> None:
    assert [
        is_loopback(address)
        for address in ("127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "10.0.0.1")
    ] == [
        *(True, True, True),
        *(False, False, False),
    ]
    assert [get_host_name(host) for host in ("a:1", "[::1]", "[::1]:2", "a.b.", "")] == [
        "a",
        "::1",
        "::1",
        "a.b",
        "",
    ]
