"""Compare `lockstep serve` with the runtime that it uses: latency of one image, and throughput
under 16 clients.

The server is a separate process. The runtime alone and the server are measured alternately; the one
that is not measured is idle. Clients keep their connections and send uint8 images in binary, so
that both compute the same from the same bytes. The clients share the cores with the server. A last
part sends JPEGs to `/predict`, which the server decodes.
"""

import argparse
import contextlib
import io
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.inference.runtimes import Runtime, count_threads, open_runtime
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.machine import arithmetic, cores
from lockstep.weights import open_weights
from lockstep.weights.checkpoint import write_weights
from measuring import make_parser, median, recipe, record, round_all

ADDED_MS = 3.0
KEPT = 0.9
"""What is wanted: at most this many ms more than the runtime, and at least this share of its
throughput."""
MODELS = {"resnet50": {"eval_crop": 224, "eval_resize": 256}, "demo": {}}
WARM_SHARE = 0.2
"""The memory after this share of the time is compared with that at the end."""


class Client:
    """A connection that sends the same request again and again."""

    def __init__(self, port: int, path: str, body: bytes, headers: str = "") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length:"
            f" {len(body)}\r\n{headers}\r\n"
        )
        self._request = head.encode() + body

    def close(self) -> None:
        self._socket.close()

    def ms(self) -> float:
        """Send the request, and return the milliseconds until its answer is there. Raises
        `ValueError` unless it is 200."""
        began = time.perf_counter()
        self._socket.sendall(self._request)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._receive()
        head, _, rest = data.partition(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
        if not head.startswith(b"HTTP/1.1 200 ") or length is None:
            raise ValueError(head.decode("latin-1"))
        missing = int(length[1]) - len(rest)
        while missing > 0:
            missing -= len(self._receive())
        return 1000 * (time.perf_counter() - began)

    def _receive(self) -> bytes:
        data = self._socket.recv(2**18)
        if not data:
            raise ValueError("the server closed the connection")
        return data


def tensor_client(port: int, name: str, images: np.ndarray) -> Client:
    """Return a client that sends images in binary and gets logits in binary."""
    about = {"name": "images", "shape": list(images.shape), "datatype": "UINT8"}
    request = {
        "inputs": [about | {"parameters": {"binary_data_size": images.nbytes}}],
        "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(request).encode()
    path = f"/v2/models/{name}/infer"
    return Client(
        port, path, text + images.tobytes(), f"Inference-Header-Content-Length: {len(text)}\r\n"
    )


def photo() -> bytes:
    """Return a JPEG of 500 x 375 pixels."""
    coarse = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(
        file, "JPEG", quality=90
    )
    return file.getvalue()


@contextlib.contextmanager
def server(weights: Path, runtime: str, log: Path) -> Iterator[tuple[int, int]]:
    """Start a server; yield its port and its process id."""
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "serve",
        str(weights),
        "--port",
        "0",
        "--quiet",
        "--name",
        "model",
    ]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--runtime", runtime], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout is not None
    try:
        port = re.search(r":(\d+) ", process.stdout.readline())
        if port is None:
            sys.exit(log.read_text())
        wait_for(int(port[1]))
        yield int(port[1]), process.pid
    finally:
        process.terminate()
        process.wait(60)


def wait_for(port: int) -> None:
    for _ in range(1000):
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.01)


def under_load(clients: list[Client], pid: int, seconds: float) -> dict[str, Any]:
    """Let all clients send for some seconds. Return rate, percentiles, errors, and the growth of
    the server's memory."""
    times: list[float] = []  # threads append to it
    errors: list[str] = []
    end = time.perf_counter() + seconds

    def send(client: Client) -> None:
        try:
            while time.perf_counter() < end:
                times.append(client.ms())
        except (OSError, ValueError) as error:
            errors.append(str(error))

    workers = [threading.Thread(target=send, args=(client,)) for client in clients]
    began = time.perf_counter()
    spent = processor_ms(pid)
    for worker in workers:
        worker.start()
    time.sleep(WARM_SHARE * seconds)
    warm = memory_mb(pid)
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    spent = processor_ms(pid) - spent
    for client in clients:
        client.close()
    percentiles = statistics.quantiles(times, n=100)
    return {
        "images_per_sec": round(len(times) / took, 2),
        "processor_ms_per_image": round(spent / len(times), 3),
        "requests": len(times),
        "errors": errors[:3],
        "p50_ms": round(percentiles[49], 2),
        "p99_ms": round(percentiles[98], 2),
        "memory_mb": round(memory_mb(pid), 1),
        "growth_mb": round(memory_mb(pid) - warm, 1),
    }


def memory_mb(pid: int) -> float:
    """Return the memory that a process has in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def processor_ms(pid: int) -> float:
    """Return the processor time that a process has spent."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_rate(runtime: Runtime, images: np.ndarray, seconds: float) -> tuple[float, float]:
    """Return images per second of the runtime in batches of these images, and ms of processor time
    for an image."""
    done = 0
    began = time.perf_counter()
    spent = time.process_time()
    while time.perf_counter() - began < seconds:
        runtime.predict(images)
        done += len(images)
    return done / (time.perf_counter() - began), 1000 * (time.process_time() - spent) / done


def measure_ms(runtime: Runtime, images: np.ndarray) -> float:
    began = time.perf_counter()
    runtime.predict(images)
    return 1000 * (time.perf_counter() - began)


def measure_all(settings: Recipe, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of a model."""
    weights = folder / "weights.safetensors"
    side = settings.eval_crop
    write_weights(
        weights, initial_state(settings).tensors, {"recipe": settings.fields(), "classes": []}
    )
    images = np.random.default_rng(0).integers(
        0, 256, (options.clients, side, side, 3), dtype=np.uint8
    )
    how = {"most_images": options.clients}
    with (
        server(weights, options.runtime, folder / "log") as (port, pid),
        open_runtime(
            options.runtime, open_weights(weights), Execution(device="cpu"), **how
        ) as runtime,
        contextlib.ExitStack() as opened,
    ):
        single = tensor_client(port, "model", images[:1])
        opened.callback(single.close)
        one = images[:1]
        many = images
        for _ in range(5):
            single.ms(), runtime.predict(one), runtime.predict(many)
        added = []
        alone = []
        served = []
        for _ in range(options.rounds):
            runtimes = median(measure_ms(runtime, one) for _ in range(options.iterations))
            servers = median(single.ms() for _ in range(options.iterations))
            alone.append(runtimes)
            served.append(servers)
            added.append(servers - runtimes)
        before = measure_rate(runtime, many, options.seconds / 6)
        load = under_load(
            [tensor_client(port, "model", image[None]) for image in images], pid, options.seconds
        )
        after = measure_rate(runtime, many, options.seconds / 6)
        decoding = under_load(
            [Client(port, "/predict", photo()) for _ in images], pid, options.seconds / 4
        )
    own = (before[0] + after[0]) / 2
    own_cpu = (before[1] + after[1]) / 2
    return {
        "engine_batch_1_p50_ms": round_all(alone),
        "server_batch_1_p50_ms": round_all(served),
        "added_ms": round(median(added), 3),
        "engine_images_per_sec": [round(before[0], 2), round(after[0], 2)],
        "engine_processor_ms_per_image": round(own_cpu, 3),
        "engine_batch_images": len(many),
        "tensors": load,
        "throughput_kept": round(load["images_per_sec"] / own, 3),
        "throughput_kept_by_processor_time": round(own_cpu / load["processor_ms_per_image"], 3),
        "photos": decoding,
        "photos_over_engine": round(decoding["images_per_sec"] / own, 3),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runtime", default="onnxruntime")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60, help="Of the load with tensors.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=30, help="Single images in a round.")
    parser.add_argument(
        "--no-record", action="store_true", help="Print the result without writing it."
    )
    options = parser.parse_args()
    result: dict[str, Any] = {
        "what": (
            f"lockstep serve with {options.runtime} in {options.precision},"
            f" {options.clients} clients for {options.seconds:g} s"
        ),
        "processor": f"{', '.join(arithmetic().extensions)}; limit: {arithmetic().limit}",
        "threads": count_threads(),
        "load_average": os.getloadavg()[0],
        "idle_machine": os.getloadavg()[0] < cores() + 1,
    }
    for name in options.models.split(","):
        base = load_recipe("demo").replace(logits=5) if name == "demo" else recipe()
        settings = base.replace(precision=options.precision, **MODELS[name])
        with tempfile.TemporaryDirectory() as folder:
            result[name] = measure_all(settings, options, Path(folder))
    result["targets"] = {"added_ms": ADDED_MS, "throughput_kept": KEPT}
    if options.no_record:
        print(json.dumps(result, indent=1))
    else:
        record("serve", result)


if __name__ == "__main__":
    main()
