"""`check.py --url`, with a server of the Open Inference Protocol whose requests Lockstep reads."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from lockstep.inference.serving import open_inference
from lockstep.proof.command import check_server
from lockstep.proof.record import CannotCheck, read_proof
from tests.inference.cases import CLASSES

KEY = "api-key"


class Handler(BaseHTTPRequestHandler):
    """A server with one model of photos, "cats", as Triton has it: it decodes no files."""

    extensions: tuple[str, ...] = ("binary_tensor_data",)
    swaps = False
    most_bytes = 2**30
    session: Any = None
    shapes = open_inference.Shapes(len(CLASSES), 64)
    requests: list[tuple[int, bool]]

    def log_message(self, *arguments: Any) -> None:
        pass

    def send(self, code: int, content: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        about: Any = {"name": "triton", "version": "2", "extensions": self.extensions}
        if self.headers.get(KEY) != "secret":
            return self.send(401, b"a key, please")
        if self.path == "/v2/models/moved":
            return self.send(302, b"", Location="/v2/models/cats")
        if self.path == "/v2/models/cats":
            about = open_inference.describe_model("cats", "onnxruntime_onnx", self.shapes)
            about["inputs"].pop()
            about["outputs"].pop()
        return self.send(200, json.dumps(about).encode())

    def do_POST(self) -> None:
        assert self.path == "/v2/models/cats/infer"
        length = self.headers.get(open_inference.HEADER_LENGTH)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if len(body) > self.most_bytes:
            return self.send(413, b"too large")
        try:
            request = open_inference.parse_request(
                body, None if length is None else int(length), self.shapes
            )
        except open_inference.BadRequest as error:
            return self.send(400, str(error).encode())
        assert request.images is not None
        self.requests.append((len(request), length is not None))
        photos = request.images[..., ::-1] if self.swaps else request.images
        classes, shares = self.session.run(None, {"images": np.ascontiguousarray(photos)})
        tensors = {"classes": classes[:, None], "probabilities": shares}
        parts, size = open_inference.encode_answer(request, "cats", tensors, CLASSES)
        headers = {} if size is None else {open_inference.HEADER_LENGTH: str(size)}
        return self.send(200, b"".join(parts), **headers)


@contextmanager
def serve(folder: Path, **settings: Any) -> Iterator[tuple[str, list[tuple[int, bool]]]]:
    """Yield the address of a model on a server, and the number of photos of each request and
    whether it was binary."""
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    requests: list[tuple[int, bool]] = []
    handler = type("Settled", (Handler,), {"session": session, "requests": requests, **settings})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v2/models/cats", requests
        server.shutdown()


@pytest.mark.parametrize("extensions", [("binary_tensor_data",), ()], ids=str)
def test_a_server_answers_one_by_one_and_in_batches(
    extensions: tuple[str, ...], folder: Path
) -> None:
    whole = read_proof(folder / "proof")
    few = [0, 5, 6]  # two of one size; large ones take long in JSON
    document = {**whole.document, "probes": [whole.probes[number] for number in few]}
    proof = replace(whole, document=document, logits=whole.logits[few], faults=())
    with serve(folder, extensions=extensions) as (url, requests):
        lines, code = check_server(proof, url, [f"{KEY}: secret"])
    assert (lines[0].split(":")[0], code) == ("3 of 3 probes", 0)
    assert [count for count, _ in requests] == [1, 1, 1, 2]
    assert {is_binary for _, is_binary in requests} == {bool(extensions)}


def test_a_server_may_take_single_photos_and_must_take_large_ones(folder: Path) -> None:
    single = open_inference.Shapes(len(CLASSES), 1)
    with serve(folder, shapes=single, most_bytes=10**6) as (url, _):
        lines, code = check_server(read_proof(folder / "proof"), url, [f"{KEY}:secret"])
    assert lines[0].startswith("1 of 13 probes differ")
    assert "photos/large.jpg" in lines[1]
    assert "413" in lines[1]
    assert "too large" in lines[1]
    assert len(lines) == 2
    assert code == 1


def test_a_fault_of_a_server_is_named(folder: Path) -> None:
    with serve(folder, swaps=True) as (url, _):
        lines, code = check_server(read_proof(folder / "proof"), url, [f"{KEY}:secret"])
    assert [line for line in lines if line.startswith("Cause: colours swapped;")]
    assert code == 1


def test_a_server_that_cannot_be_asked_is_named(folder: Path) -> None:
    proof = read_proof(folder / "proof")
    with serve(folder) as (url, requests):
        with pytest.raises(CannotCheck, match=r"401.*a key, please.*--header"):
            check_server(proof, url, [])
        # A key is for the server of the address alone.
        with pytest.raises(CannotCheck, match="302"):
            check_server(proof, url.replace("cats", "moved"), [f"{KEY}: secret"])
    with pytest.raises(CannotCheck, match="refused"):
        check_server(proof, url, [])
    with pytest.raises(CannotCheck, match="not http://"):
        check_server(proof, "file:///etc/passwd", [])
    assert requests == []
