"""What the server tells a person, and which of uvicorn's settings it chooses: without a server."""

import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import uvicorn

from lockstep.inference.serving.limits import Limits
from lockstep.inference.serving.logs import log, open_logs
from lockstep.inference.serving.server import _configure, describe_ways

TOKEN = "a+token/of=the&tests%20"
NOT_USED = re.compile(
    "self|app|host|port|uds|fd|ssl_.*|ws_.*|reload_.*|limit_max_requests_jitter|timeout_worker.*"
    "|timeout_notify|callback_notify|factory"
)
"""What is only used for sockets, TLS, WebSockets, workers and reloads, of which there are none."""


class Terminal(NamedTuple):
    other_end: int
    stream: Any

    def read(self, end: str) -> str:
        """Return what was written, which ends with these words."""
        self.stream.flush()
        text = ""
        while not text.endswith(end):
            text += os.read(self.other_end, 2**16).decode().replace("\r\n", "\n")
        return text


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    other_end, end = os.openpty()
    with os.fdopen(end, "w") as stream:
        yield Terminal(other_end, stream)
    os.close(other_end)


def test_every_setting_of_uvicorn_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = dict[str, Any]()
    monkeypatch.setattr(uvicorn, "Config", lambda app, **settings: chosen.update(settings))
    _configure(None, Limits())  # type: ignore[arg-type]
    monkeypatch.undo()
    names = inspect.signature(uvicorn.Config.__init__).parameters
    assert {name for name in names if not NOT_USED.fullmatch(name)} == chosen.keys()


def test_the_environment_changes_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "auto")
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    settings = _configure(None, Limits())  # type: ignore[arg-type]
    assert (settings.workers, settings.forwarded_allow_ips) == (1, [])


def test_a_terminal_gets_words(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    request = {"method": "POST", "path": "/a\nforged\x1b[31m", "status": 404, "ms": 3.21}
    with open_logs():
        log("listening", url="http://127.0.0.1:8000")
        log("request", **request, received_bytes=7, client="127.0.0.1")
        log("note", 30, message="there is no token")
        try:
            raise ValueError("broken")
        except ValueError as error:
            log("error", 40, trace=error)
    first, second, third, *trace = terminal.read("ValueError: broken\n").splitlines()
    time = r"\d\d:\d\d:\d\d "
    line = re.escape(r"POST /a\nforged\x1b[31m: 404 in 3 ms, from 127.0.0.1")
    assert re.fullmatch(time + line, first)
    assert re.fullmatch(time + "warning: there is no token", second)
    assert re.fullmatch(time + "error: error", third)
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ValueError: broken")


def test_a_file_gets_lines_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with open_logs():
            log("listening", url="http://127.0.0.1:8000")
    line = json.loads((tmp_path / "log").read_text())
    assert (line["event"], line["url"]) == ("listening", "http://127.0.0.1:8000")


def list_kernel_addresses() -> set[str]:
    """Return the machine's IPv4 addresses, without those of loopback, as the kernel routes them."""
    table = Path("/proc/net/fib_trie").read_text()
    local = set(re.findall(r"-- (\S+)\n +/32 host LOCAL", table))
    return {address for address in local if not address.startswith("127.")}


def test_a_phone_gets_links(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    text = describe_ways("0.0.0.0", 8123, TOKEN)
    links = re.findall(r"http://(\S+):8123/#token=(\S+) \(with the token", text)
    assert {address for address, _ in links} == list_kernel_addresses()
    [[address, token]] = re.findall(
        r"http://(\S+):8123/#token=(\S+) ", describe_ways("192.0.2.7", 8123, TOKEN)
    )
    assert (address, token) == ("192.0.2.7", "a%2Btoken%2Fof%3Dthe%26tests%2520")
    assert "http://[2001:db8::1]:8123/#" in describe_ways("2001:db8::1", 8123, TOKEN)
    assert describe_ways("192.0.2.7", 8123, None).endswith("http://192.0.2.7:8123/\n")
    assert describe_ways("127.0.0.1", 8123, TOKEN) == describe_ways("::1", 8123, TOKEN) == ""


def test_the_token_is_written_to_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        text = describe_ways("192.0.2.7", 8123, TOKEN)
    assert text.endswith("http://192.0.2.7:8123/\n")
