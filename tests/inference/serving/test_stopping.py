"""How a server stops: under load, in the drain, at a second signal."""

import signal
import threading
import time
from pathlib import Path

import pytest
import requests

from tests.inference.serving.cases import ENGINE, PATIENCE_SEC, Server, head, serving, session
from tests.processes import wait_until
from tests.soak import SOAK

CLIENTS = 16
SECONDS = 30 if SOAK else 1


def client(server: Server, data: bytes, statuses: list[int], lost: list[Exception]) -> None:
    """Send images until the server refuses them or does not listen. `lost` are requests without an
    answer."""
    with session() as own:
        while True:
            try:
                status = own.post(server.url + "/predict", data, timeout=PATIENCE_SEC).status_code
            except requests.ConnectionError as error:
                # The connection was made, so this request had been sent.
                if "refused" not in str(error).lower():
                    lost.append(error)
                return
            statuses.append(status)
            if status == 503:
                return


@pytest.mark.slow
def test_a_signal_loses_no_request(weights: Path, photos: list[Path], tmp_path: Path) -> None:
    data = photos[1].read_bytes()
    statuses = list[int]()
    lost = list[Exception]()
    with serving(weights, tmp_path / "log", "--runtime", ENGINE, "--drain-sec", 0.3) as server:
        threads = [
            threading.Thread(target=client, args=(server, data, statuses, lost))
            for _ in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(statuses) > 5 * CLIENTS)
        time.sleep(SECONDS)
        assert server.stop() == 0
        for thread in threads:
            thread.join(60)
        events = server.events()
    assert lost == []
    assert set(statuses) <= {200, 503}
    logged = [event["status"] for event in events if event["event"] == "request"]
    assert sorted(logged) == sorted(statuses)
    names = [event["event"] for event in events]
    assert (names.count("stopping"), names.count("stopped"), names[-1]) == (1, 1, "stopped")


def test_it_answers_while_it_drains(weights: Path, photos: list[Path], tmp_path: Path) -> None:
    with serving(
        weights, tmp_path / "log", "--runtime", ENGINE, "--drain-sec", 10 * PATIENCE_SEC
    ) as server:
        idle = server.connect()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/v2/health/ready").status_code == 503)
        ready = server.get("/v2/health/ready")
        assert (ready.json(), ready.headers["connection"]) == ({"ready": False}, "close")
        assert server.get("/v2/health/live").status_code == 200
        assert server.metric("lockstep_ready") == 0
        assert server.post("/predict", photos[0].read_bytes()).status_code == 200
        assert server.stop() == 128 + signal.SIGTERM  # the second signal
        idle.close()


def test_ctrl_c_closes_connections(weights: Path, photos: list[Path], tmp_path: Path) -> None:
    # It does not end because a limit has passed.
    options = ("--drain-sec", 0, "--timeout-sec", 10 * PATIENCE_SEC)
    with serving(weights, tmp_path / "log", "--runtime", ENGINE, *options) as server:
        silent = server.connect()
        assert server.get("/v2").status_code == 200  # its connection stays open
        assert server.stop(signal.SIGINT) == 0
        silent.close()


def test_a_begun_upload_is_answered(weights: Path, photos: list[Path], tmp_path: Path) -> None:
    data = photos[0].read_bytes()
    options = ("--drain-sec", 0, "--timeout-sec", 10 * PATIENCE_SEC)
    with serving(weights, tmp_path / "log", "--runtime", ENGINE, *options) as server:
        with server.connect() as connection:
            connection.sendall(head(server, len(data)) + data[:100])
            wait_until(lambda: server.metric("lockstep_coming_requests") == 1)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in {event["event"] for event in server.events()})
            time.sleep(1)  # longer than requests are accepted
            assert server.post("/predict", data).status_code == 503
            connection.sendall(data[100:])
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(PATIENCE_SEC) == 0
