"""Real servers in separate processes, and requests to them."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import requests

from lockstep.inference.images import read_square
from lockstep.inference.runtimes import NATIVE, open_runtime
from lockstep.recipes import Execution
from lockstep.weights import open_weights
from tests.processes import command

TOKEN = "a-token-of-the-tests-0123456789"
ENGINE = "onnxruntime"
"""It starts in less time than a framework."""
PATIENCE_SEC = 60
"""How long clients wait. It is no claim: a busy machine needs many times longer than an idle one.
"""


class Server:
    """A server that listens."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self._log = log
        self.address = re.fullmatch(r"http://([\d.]+):(\d+)", url)
        assert self.address is not None
        self.host, self.port = self.address[1], int(self.address[2])
        self.session = session()

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of the log, without one that is being written."""
        whole, _, _ = self._log.read_text(encoding="ascii").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def get(self, path: str, **how: Any) -> requests.Response:
        return self.session.get(self.url + path, timeout=PATIENCE_SEC, **how)

    def post(self, path: str, data: Any = None, **how: Any) -> requests.Response:
        return self.session.post(self.url + path, data, timeout=PATIENCE_SEC, **how)

    def connect(self, seconds: float = PATIENCE_SEC) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=seconds)

    def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE_SEC) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a figure's samples with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        values = [
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, name
        return sum(values)


def session() -> requests.Session:
    """Return a client that the tester's environment does not send through a proxy."""
    client = requests.Session()
    client.trust_env = False
    return client


@contextmanager
def serving(source: Path, log: Path, *options: object, **environment: str) -> Iterator[Server]:
    """Start a server on a free port of the loopback interface. It is killed at the end of the block
    if it still runs."""
    variables = os.environ | environment
    with log.open("w") as errors:
        process = subprocess.Popen(
            command("serve", source, "--port", 0, *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=variables,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url = re.search(r"on (http://\S+) ", line)
        assert url is not None, f"{line}{log.read_text()}"
        server = Server(process, url[1], log)
        try:
            wait_for_port(server)
            yield server
        finally:
            server.session.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def wait_for_port(server: Server) -> None:
    deadline = time.monotonic() + PATIENCE_SEC
    while True:
        try:
            server.connect().close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def reference_logits(source: Path, images: np.ndarray) -> np.ndarray:
    """Return the logits of the NumPy reference, float32 [N, logits], of photos of one size, uint8
    [N, H, W, 3]."""
    execution = Execution(backend="reference", reference_dtype="float32")
    weights = open_weights(source).replace_precision("fp32")
    side = weights.recipe.eval_crop
    squares = np.empty((len(images), side, side, 3), np.uint8)
    for image, square in zip(images, squares, strict=True):
        read_square(image, weights.recipe, square)
    with open_runtime(NATIVE, weights, execution) as engine:
        return engine.predict(squares)


TEMPERATURE = 2.0
"""The temperature of the fixture `weights`."""
UNKNOWN_BELOW = 0.137
"""Its threshold. Some of the photos are above it, and some are below."""


def calibrated_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits / TEMPERATURE
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return shares


def head(server: Server, length: object, path: str = "/predict") -> bytes:
    lines = [
        *(f"POST {path} HTTP/1.1", f"Host: {server.host}:{server.port}"),
        *(f"Content-Length: {length}", "", ""),
    ]
    return "\r\n".join(lines).encode()


def encode_request(images: np.ndarray, *outputs: str) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request with a binary tensor, uint8 [N, H, W, 3]."""
    tensor = {
        "name": "images",
        "shape": list(images.shape),
        "datatype": "UINT8",
        "parameters": {"binary_data_size": images.nbytes},
    }
    text = json.dumps({"inputs": [tensor], "outputs": [{"name": name} for name in outputs]})
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return text.encode() + images.tobytes(), headers


def noise(images: int, side: int, seed: int = 0) -> np.ndarray:
    """Return uint8 images [N, side, side, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (images, side, side, 3), np.uint8)
