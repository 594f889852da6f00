"""Sixteen clients at the same time: no error, right answers, and no growth. Under `make soak` for a
minute."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.inference.serving.cases import (
    ENGINE,
    Server,
    encode_request,
    noise,
    reference_logits,
    serving,
    session,
)
from tests.processes import wait_until
from tests.soak import SOAK

CLIENTS = 16
WARM_SEC, SECONDS = (10, 60) if SOAK else (1, 2)
FEWEST_ROUNDS = 3
"""What every client sends at least, so that a slow machine has something to count, too."""
GROWTH_MB = 10 if SOAK else 30
"""A leak of a kilobyte a request would be more. Less time leaves more of the growth until all batch
sizes were seen."""


def client(
    server: Server,
    number: int,
    until: float,
    photos: list[Path],
    expected: np.ndarray,
    wrong: list[object],
) -> None:
    """Send tensors, files and damaged files in turn until a time, and a few of them in any case."""
    image = noise(CLIENTS, 32)[number : number + 1]
    logits = expected[number]
    photo = photos[number % len(photos)].read_bytes()
    body, headers = encode_request(image, "logits")
    with session() as own:
        first = own.post(f"{server.url}/predict", photo).json()["probabilities"]
        rounds = 0
        while time.monotonic() < until or rounds < FEWEST_ROUNDS:
            rounds += 1
            url = f"{server.url}/v2/models/model/infer"
            answer = own.post(url, body, headers=headers).json()
            if (
                "outputs" not in answer
                or np.abs(np.array(answer["outputs"][0]["data"]) - logits).max() > 1e-3
            ):
                wrong.append(answer)
            answer = own.post(f"{server.url}/predict", photo).json()
            # Batches of other sizes round otherwise.
            if answer.get("probabilities") != pytest.approx(first, abs=2e-6):
                wrong.append(answer)
            if own.post(f"{server.url}/predict", photo[:-40]).status_code != 415:
                wrong.append("a damaged image")


def load(server: Server, seconds: float, photos: list[Path], expected: np.ndarray) -> list[object]:
    wrong: list[object] = []
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client, args=(server, number, until, photos, expected, wrong))
        for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        assert not thread.is_alive()
    return wrong


@pytest.mark.slow
def test_many_clients_need_no_memory(weights: Path, photos: list[Path], tmp_path: Path) -> None:
    expected = reference_logits(weights, noise(CLIENTS, 32))
    with serving(weights, tmp_path / "log", "--runtime", ENGINE, "--quiet") as server:
        assert load(server, WARM_SEC, photos, expected) == []
        before = server.metric("process_resident_memory_bytes")
        files = server.metric("process_open_fds")
        assert load(server, SECONDS, photos, expected) == []
        assert (server.metric("process_resident_memory_bytes") - before) / 1e6 < GROWTH_MB
        # It closes what its clients have closed.
        wait_until(lambda: server.metric("process_open_fds") <= files + 2)
        assert server.metric("lockstep_requests_total", status="200") > 3 * CLIENTS
        assert server.stop() == 0
        assert [event for event in server.events() if event["level"] == "error"] == []
