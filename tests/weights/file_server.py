"""A server of one file on this machine, which can end connections early."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs

import yaml

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
        self.server.sent += len(body)  # first: the client goes on when it has the last byte
        self.wfile.write(body)
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
            if has_model:
                self.send_header("X-Repo-Commit", "a" * 40)
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


class Hub(ThreadingHTTPServer):
    """Hugging Face's hub for one account, whose repositories are changed by commits."""

    daemon_threads = True
    token = "hf_secret"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), UploadHandler)
        self.files: dict[str, bytes] | None = None
        """The files of owner/model; None before it is created."""
        self.is_private = False
        self.commits: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        """The large files by SHA-256, also those of no commit."""
        self.uploads = 0
        self.storage = ""
        """The address of Xet's storage that the hub names, if it speaks Xet."""
        self.refused: dict[str, int] = {}
        """The status of answers to paths with these parts."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def head(self) -> str:
        return f"{len(self.commits):040x}"


SMALL = (".json", ".md")
"""How the names of files end that are part of a commit."""


class UploadHandler(HubHandler):
    """Answers to the hub's client as far as an upload needs it: a repository, which files it has,
    which of them are large, where these go, whether a card is one, and a commit."""

    server: Any

    @property
    def files(self) -> dict[str, bytes]:  # type: ignore[override]
        return self.server.files or {}

    def do_HEAD(self) -> None:
        if self._is_allowed():
            super().do_HEAD()

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        if self.path == "/api/whoami-v2":
            self._answer({"name": "owner", "type": "user"})
        elif not self.path.startswith("/api/"):
            super().do_HEAD()
            self.wfile.write(self.files.get(self.path.rpartition("/")[2], b""))
        elif self.server.files is None:
            self._refuse(404, "RepoNotFound")
        elif "/xet-write-token/" in self.path and self.server.storage:
            self._name_storage()
        else:
            about = {"id": "owner/model", "private": self.server.is_private}
            names = [{"rfilename": name} for name in self.files]
            self._answer({**about, "sha": self.server.head, "siblings": names, "tags": []})

    def _name_storage(self) -> None:
        body = json.dumps({"casUrl": self.server.storage, "exp": 2**33, "accessToken": "t"})
        self.send_response(200)
        self.send_header("X-Xet-Cas-Url", self.server.storage)
        self.send_header("X-Xet-Access-Token", "t")
        self.send_header("X-Xet-Token-Expiration", str(2**33))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_PUT(self) -> None:
        content = b"".join(self._read_chunks())
        digest = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == digest
        if self._is_allowed(needs_token=False):
            self.server.objects[digest] = content
            self.server.uploads += 1
            self._answer({})

    def _read_chunks(self) -> Iterator[bytes]:
        if self.headers["Transfer-Encoding"] != "chunked":
            yield self.rfile.read(int(self.headers["Content-Length"]))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self._is_allowed():
            return
        action = self.path.removeprefix("/api/models/owner/model/").removeprefix("/api/")
        if action == "repos/create":
            wanted = json.loads(body)
            assert (wanted["name"], wanted["organization"]) == ("model", "owner")
            self.server.files = {}
            self.server.is_private = wanted.get("private") or wanted.get("visibility") == "private"
            self._answer({"url": f"{self.server.address}/owner/model"})
        elif action == "validate-yaml":
            front = json.loads(body)["content"].split("---\n")[1:2]
            is_card = any(isinstance(yaml.safe_load(text), dict) for text in front)
            errors = [] if is_card else [{"message": "it is no YAML"}]
            self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif action.startswith("paths-info/"):
            names = parse_qs(body.decode())["paths"]
            self._answer([self._describe(name) for name in names if name in self.files])
        elif action.startswith("preupload/"):
            entries = [entry["path"] for entry in json.loads(body)["files"]]
            modes = ["regular" if name.endswith(SMALL) else "lfs" for name in entries]
            pairs = zip(entries, modes, strict=True)
            self._answer(
                {"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in pairs]}
            )
        elif action.endswith("/objects/batch"):
            wanted = json.loads(body)["objects"]
            self._answer({"transfer": "basic", "objects": list(map(self._place, wanted))})
        elif action.startswith("commit/"):
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._refuse(404, "")

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.server.objects:
            return wanted
        href = f"{self.server.address}/objects/{wanted['oid']}"
        return {**wanted, "actions": {"upload": {"href": href}}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        header, *changes = lines
        assert header["key"] == "header"
        if header["value"].get("parentCommit") not in (None, self.server.head):
            self._refuse(412, "")
            return
        for change in changes:
            value = change["value"]
            if change["key"] == "lfsFile":
                content = self.server.objects[value["oid"]]
            else:
                content = base64.b64decode(value["content"])
            self.server.files[value["path"]] = content
        self.server.commits.append(header["value"])
        url = f"{self.server.address}/owner/model/commit/{self.server.head}"
        self._answer({"success": True, "commitOid": self.server.head, "commitUrl": url})

    def _describe(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
        entry["oid"] = blob.hexdigest()
        if not name.endswith(SMALL):
            digest = hashlib.sha256(content).hexdigest()
            entry |= {"oid": "0" * 40, "lfs": {"oid": digest, "size": 1, "pointerSize": 1}}
        return entry

    def _is_allowed(self, *, needs_token: bool = True) -> bool:
        for part, status in self.server.refused.items():
            if part in self.path:
                self._refuse(status, "")
                return False
        if needs_token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._refuse(401, "")
            return False
        return True

    def _refuse(self, status: int, code: str) -> None:
        self._answer({"error": "refused"}, status, code)

    def _answer(self, value: Any, status: int = 200, code: str = "") -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve_account() -> Iterator[Hub]:
    """Serve a hub that takes uploads of owner/model."""
    with _serve(Hub()) as hub:
        yield hub


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
