"""A web server on loopback, which sends files as most do, or lacks what some lack."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@dataclass
class WebServer:
    """A server of the files in `root`."""

    root: Path
    port: int = 0
    sends_parts: bool = True
    answers_pages: bool = False
    """Whether a page is the answer if there is no file, instead of status 404."""
    marks: tuple[str, ...] = ("ETag", "Last-Modified")
    """The headers by which a changed file is noticed."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Paths and ranges, in order."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serve_files(root: Path) -> Iterator[WebServer]:
    """Serve a folder while the block runs."""
    served = WebServer(root)
    server = _Server(served)
    served.port = server.server_port
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, served: WebServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.served = served


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        served = self.server.served
        wanted = self.headers.get("Range", "")
        served.requests.append((self.path, wanted))
        path = served.root / unquote(self.path).lstrip("/")
        if not path.is_file():
            page = {"Content-Type": "text/html; charset=utf-8", "ETag": '"page"'}
            self._answer(200 if served.answers_pages else 404, page, b"<html>Not Found</html>")
            return
        data = path.read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        every = {
            "ETag": tag,
            "weak ETag": f"W/{tag}",
            "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
        }
        marks = {name.removeprefix("weak "): every[name] for name in served.marks}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if part is None or not served.sends_parts:
            self._answer(200, marks, data)
            return
        begin = int(part[1])
        end = min(int(part[2]) + 1, len(data))
        content = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        self._answer(206, marks | content, data[begin:end])

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
