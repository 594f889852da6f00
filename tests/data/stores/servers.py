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

RCLONE = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
KEYS = ("lockstep", "not-so-secret")
_STARTS_SEC = 60
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
    before its end) or "drop" (the connection ends)."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables with which its users find it."""
        return {
            "AWS_ACCESS_KEY_ID": KEYS[0],
            "AWS_SECRET_ACCESS_KEY": KEYS[1],
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def serve(root: Path) -> Iterator[Server]:
    """Serve a folder of buckets while the block runs."""
    assert RCLONE is not None
    behind = _find_port()
    command = [RCLONE, "serve", "s3", "--auth-key", ",".join(KEYS), "--config", "/dev/null"]
    command += ["--addr", f"127.0.0.1:{behind}", "--dir-cache-time", "0s", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(behind, process)
        server = Server(root, 0)
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(server, behind))
        proxy.daemon_threads = True
        server.port = proxy.server_port
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            proxy.shutdown()
            proxy.server_close()
    finally:
        process.kill()
        process.wait()


def _find_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port: int = place.getsockname()[1]
        return port


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + _STARTS_SEC
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("rclone does not serve")


def _make_handler(server: Server, behind: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._forward()

        def do_HEAD(self) -> None:
            self._forward()

        def do_PUT(self) -> None:
            self._forward()

        def log_message(self, *arguments: object) -> None:
            pass

        def _forward(self) -> None:
            name = re.sub(r"\?.*", "", self.path)
            is_object = self.command == "GET" and "?list-type" not in self.path
            failure = None
            if is_object:
                wanted = self.headers.get("Range", "")
                server.requests.append((name, wanted))
                failure = server.fail(name, wanted)
            if failure == "drop":
                self.close_connection = True
                return
            if failure == "503":
                self._answer(503, [], b"")
                return
            length = int(self.headers.get("Content-Length", 0))
            connection = http.client.HTTPConnection("127.0.0.1", behind)
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for key, value in self.headers.items():
                connection.putheader(key, value)
            connection.endheaders(self.rfile.read(length))
            answer = connection.getresponse()
            body = answer.read()
            headers = answer.getheaders()
            status = answer.status
            connection.close()
            if is_object and answer.getheader("Content-Range"):
                status = 206
            expected = self.headers.get("If-Match")
            if is_object and status < 300 and expected not in (None, answer.getheader("Etag")):
                status, body = 412, b""
            self._answer(status, headers, body, cut=failure == "cut")

        def _answer(
            self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False
        ) -> None:
            self.send_response(status)
            for key, value in headers:
                if key.lower() not in _OWN_HEADERS:
                    self.send_header(key, value)
            length = len(body)
            if self.command == "HEAD":
                length = int(dict(headers).get("Content-Length", 0))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True

    return Handler
