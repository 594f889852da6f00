"""A real S3 server on loopback, rclone's, behind a proxy that can fail as networks and stores do.

The proxy also gives answers to ranges the status 206 and honours If-Match, as S3 does and this
server does not.
"""

import http.client
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lockstep.system.ranks import free_ports

RCLONE = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
KEYS = ("lockstep", "not-so-secret")
_STARTS_SEC = 60
_HANGS_SEC = 60
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""
_OWN_HEADERS = ("content-length", "transfer-encoding", "date", "server", "connection")


@dataclass
class Server:
    """A store whose buckets are the folders of `root`."""

    root: Path
    port: int
    requests: list[tuple[str, str]] = field(default_factory=list)
    """The names of objects and the ranges that were asked for, in order."""
    fail: Callable[[str, str], str | None] = lambda name, wanted: None
    """What happens to the request for a range of an object: None, "503", "cut" (the answer ends
    before its end), "drop" (the connection ends), "hang" (there is no answer) or "stall" (its body
    stops). The range is "PUT" if it is written."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when what hangs may end."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which its users find it."""
        return {
            "AWS_ACCESS_KEY_ID": KEYS[0],
            "AWS_SECRET_ACCESS_KEY": KEYS[1],
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def serve(root: Path, *, looks_again: bool = True) -> Iterator[Server]:
    """Serve a folder of buckets while the block runs. If it `looks_again` at every request, it sees
    files that tests put there, and is slow after a hundred files."""
    cache_time = "0s" if looks_again else "1h"
    options = ["--auth-key", ",".join(KEYS), "--dir-cache-time", cache_time]
    with run_rclone("s3", root, *options) as behind:
        server = Server(root, 0)
        proxy = _Proxy(server, behind)
        server.port = proxy.server_port
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            proxy.shutdown()
            proxy.server_close()


@contextmanager
def run_rclone(protocol: str, root: Path, *options: str) -> Iterator[int]:
    """Let rclone serve a folder while the block runs, and give the port."""
    assert RCLONE is not None
    [port] = free_ports(1)
    command = [RCLONE, "serve", protocol, "--config", "/dev/null", "--addr", f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        [*command, *options, str(root)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + _STARTS_SEC
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("rclone does not serve")


class _Proxy(ThreadingHTTPServer):
    """Passes requests on to rclone at the port `behind`, or lets them fail."""

    daemon_threads = True

    def __init__(self, store: Server, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self.behind = behind


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would keep each body back for 40 ms
    server: _Proxy

    def do_GET(self) -> None:
        if "?list-type" in self.path:
            self._answer(*self._ask_server())
            return
        name = re.sub(r"\?.*", "", self.path)
        wanted = self.headers.get("Range", "")
        self.server.store.requests.append((name, wanted))
        failure = self.server.store.fail(name, wanted)
        if failure == "drop":
            self.close_connection = True
        elif failure == "503":
            self._answer(503, {}, b"")
        elif failure == "hang":
            self._hang()
        else:
            self._answer(*self._get_object(), failure=failure)

    def _hang(self) -> None:
        self.server.store.ended.wait(_HANGS_SEC)
        self.close_connection = True

    def do_HEAD(self) -> None:
        self._answer(*self._ask_server())

    def do_PUT(self) -> None:
        if self.server.store.fail(re.sub(r"\?.*", "", self.path), "PUT") == "drop":
            self.close_connection = True
            return
        self._answer(*self._ask_server())

    do_POST = do_DELETE = do_HEAD

    def log_message(self, *arguments: object) -> None:
        pass

    def _get_object(self) -> Answer:
        status, headers, body = self._ask_server()
        if "Content-Range" in headers:
            status = 206
        if status < 300 and self.headers.get("If-Match") not in (None, headers.get("Etag")):
            return 412, headers, b""
        return status, headers, body

    def _ask_server(self) -> Answer:
        length = int(self.headers.get("Content-Length", 0))
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for key, value in self.headers.items():
            connection.putheader(key, value)
        connection.endheaders(self.rfile.read(length))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), body

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, failure: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            if key.lower() not in _OWN_HEADERS:
                self.send_header(key, value)
        if self.command == "HEAD":
            self.send_header("Content-Length", headers.get("Content-Length", "0"))
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if failure else body)
        if failure == "cut":
            self.close_connection = True
        elif failure == "stall":
            self._hang()
