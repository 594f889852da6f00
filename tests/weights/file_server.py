"""A server of one file on this machine, which can end connections early."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

S = TypeVar("S", bound=ThreadingHTTPServer)


class Server(ThreadingHTTPServer):
    """Serves `content` at /`name`, counts the bytes it sends, and can end connections early."""

    daemon_threads = True

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.name = name
        self.etag = '"1"'
        self.cut_after: list[int] = []
        """After how many bytes the next connections end."""
        self.answers: list[tuple[int, dict[str, str], bytes] | None] = []
        """Status, headers and body of the next answers, which may be wrong ones; None for the right
        one."""
        self.requests: list[dict[str, str]] = []
        self.sent = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(dict(self.headers))
        answer = self.server.answers.pop(0) if self.server.answers else None
        if answer:
            status, headers, body = answer
            self.send_response(status)
            for header in headers.items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True
            return
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://192.0.2.1/w.pth")
            self.end_headers()
            return
        if self.path != f"/{self.server.name}":
            self.send_error(404)
            return
        content = self.server.content
        start = 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted and self.headers.get("If-Range", self.server.etag) == self.server.etag:
            start = int(wanted[1])
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", self.server.etag)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        body = content[start:]
        if self.server.cut_after:
            body = body[: self.server.cut_after.pop(0)]
        self.wfile.write(body)
        self.server.sent += len(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class HubHandler(BaseHTTPRequestHandler):
    """Answers as Hugging Face's hub does for the files of owner/model."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        name = self.path.removeprefix("/owner/model/resolve/main/")
        content = self.files.get(name)
        if content is None:
            self.send_response(404)
            has_model = self.path.startswith("/owner/model/")
            self.send_header("X-Error-Code", "EntryNotFound" if has_model else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.files.get(self.path.rpartition("/")[2], b""))

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve_hub(files: dict[str, bytes]) -> Iterator[str]:
    """Serve the files of owner/model as Hugging Face's hub does; yield its address."""
    handler = type("Handler", (HubHandler,), {"files": files})
    with _serve(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@contextmanager
def serve(content: bytes, name: str) -> Iterator[Server]:
    """Serve a file."""
    with _serve(Server(content, name)) as server:
        yield server


@contextmanager
def _serve(server: S) -> Iterator[S]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
