"""Decoders that are stuck, have ended, or are left by their clients: they cost nobody else an
answer.

A process that is stopped stands for one that never ends its work.
"""

import asyncio
import os
import select
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from lockstep.inference.decoding import pool
from lockstep.inference.decoding.pool import Decoders, _Forker
from lockstep.inference.decoding.process import MOST_PARTS, BadForm, Settings, image_in
from lockstep.recipes import Recipe
from tests.inference.cases import MEAN, STD, image_file, save_random
from tests.inference.serving.cases import ENGINE, PATIENCE_SEC, Server, head, serving, session
from tests.processes import is_running, wait_until

ONE_DECODER = ("--set", "loader_threads=1")
FRAMEWORKS = ("torch", "tensorflow", "paddle", "mxnet", "jax", "onnxruntime")


def children(process: int) -> list[int]:
    """Return the processes that a process has started and that have not ended."""
    numbers = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == process and is_running(int(folder.name)):
            numbers.append(int(folder.name))
    return numbers


def forker_of(server: Server) -> int:
    [forker] = children(server.process.pid)
    return forker


def decoders_of(server: Server) -> list[int]:
    return children(forker_of(server))


@pytest.fixture
def pool_settings(tiny_recipe: Recipe) -> Settings:
    recipe = tiny_recipe.replace(mean=MEAN, std=STD)
    return Settings(recipe.fields(), most_pixels=2**20, side=32, body_bytes=2**16)


@contextmanager
def stuck_upload(server: Server, data: bytes) -> Iterator[socket.socket]:
    """Stop all decoders, and send an image that one of them is to decode."""
    wait_until(lambda: bool(decoders_of(server)))
    for decoder in decoders_of(server):
        os.kill(decoder, signal.SIGSTOP)
    before = server.metric("lockstep_admitted_images")
    with server.connect() as connection:
        connection.sendall(head(server, len(data)) + data)
        wait_until(
            lambda: (
                server.metric("lockstep_admitted_images") == before + 1
                or bool(select.select([connection], [], [], 0)[0])  # its time is over already
            )
        )
        yield connection


def test_stuck_decoders_cost_only_their_requests(tiny_recipe: Recipe, tmp_path: Path) -> None:
    """Also: a full queue answers 429, clients that leave free their places, and decoders end with a
    killed server."""
    large = save_random(
        tiny_recipe.replace(mean=MEAN, std=STD, image_size=256, eval_resize=256, eval_crop=256),
        tmp_path,
    )
    data = image_file(tmp_path, 256, 256, ".jpg").read_bytes()
    options = ("--max-batch", 1, "--max-queue", 2, "--timeout-sec", 10 * PATIENCE_SEC, *ONE_DECODER)
    with serving(large, tmp_path / "log", "--runtime", ENGINE, *options) as server:

        def client(_: int) -> tuple[int, str | None]:
            with session() as own:
                answer = own.post(server.url + "/predict", data)
            return answer.status_code, answer.headers.get("retry-after")

        forker = forker_of(server)
        maps = Path(f"/proc/{forker}/maps").read_text()
        assert not any(f"/{name}/" in maps for name in FRAMEWORKS)
        with ExitStack() as opened, ThreadPoolExecutor(12) as clients:
            uploads = [opened.enter_context(server.connect()) for _ in range(3)]
            for upload in uploads:
                upload.sendall(head(server, len(data)) + data[:-1])
            wait_until(lambda: server.metric("lockstep_coming_requests") == len(uploads))
            with stuck_upload(server, data):
                assert server.post("/predict", data).status_code == 200
                assert server.get("/v2/health/ready").status_code == 200
                stuck = set(decoders_of(server))
                with stuck_upload(server, data):
                    stuck |= set(decoders_of(server))
                    refused = list(clients.map(client, range(12)))
            wait_until(lambda: server.metric("lockstep_admitted_images") == 0)
            assert {status for status, _ in refused} == {429}
            for upload in uploads:
                upload.sendall(data[-1:])
                assert upload.recv(12) == b"HTTP/1.1 200"
            answers = list(clients.map(client, range(120)))
        assert 200 in {status for status, _ in answers} <= {200, 429}
        assert all(int(after or 0) >= 1 for status, after in (*refused, *answers) if status == 429)
        wait_until(lambda: not any(map(is_running, stuck)))
        assert server.metric("lockstep_images_total") >= 1
        last = decoders_of(server)
        for decoder in last:
            os.kill(decoder, signal.SIGSTOP)
        server.process.kill()
        wait_until(lambda: not any(map(is_running, (forker, *last))))


def test_stuck_decoders_delay_nothing(weights: Path, photos: list[Path], tmp_path: Path) -> None:
    """Also: it is not ready while nothing can be decoded, and is ready again when something can."""
    data = photos[0].read_bytes()
    options = ("--timeout-sec", 1, "--drain-sec", 0, *ONE_DECODER)
    with serving(weights, tmp_path / "log", "--runtime", ENGINE, *options) as server:
        with stuck_upload(server, data) as connection:
            assert connection.recv(12) == b"HTTP/1.1 503"
        # 503: forking took longer on a busy machine.
        assert server.post("/predict", data).status_code in (200, 503)

        forker = forker_of(server)
        os.kill(forker, signal.SIGSTOP)
        for decoder in decoders_of(server):
            os.kill(decoder, signal.SIGKILL)
        wait_until(lambda: server.get("/v2/health/ready").status_code == 503)
        assert server.metric("lockstep_ready") == 0
        os.kill(forker, signal.SIGCONT)
        wait_until(lambda: server.get("/v2/health/ready").status_code == 200)
        os.kill(forker, signal.SIGKILL)
        wait_until(lambda: bool(set(children(server.process.pid)) - {forker}))
        wait_until(lambda: server.post("/predict", data).status_code == 200)

        with stuck_upload(server, data):
            assert server.stop() == 0


def test_a_process_that_starts_decoders_is_replaced_however_often_that_fails(
    pool_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([OSError("no memory"), OSError("no memory")])
    reports: list[str] = []

    class FailingForker(_Forker):
        def __init__(self) -> None:
            for failure in failures:
                raise failure
            super().__init__()

    async def run() -> None:
        await decoders.start(pool_settings)
        assert decoders._forker is not None
        decoders._forker._process.kill()
        monkeypatch.setattr(pool, "_Forker", FailingForker)
        async with asyncio.timeout(PATIENCE_SEC):
            while not decoders.is_ready or len(reports) < 3:
                decoders.mend()
                await asyncio.sleep(0.01)

    monkeypatch.setattr(pool, "_AGAIN_SEC", 0.01)
    with closing(Decoders(1, reports.append)) as decoders:
        asyncio.run(run())
    assert sum("no memory" in report for report in reports) == 2


def test_a_process_that_starts_decoders_is_replaced_when_it_is_stopped(
    pool_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Replacement(_Forker):
        def __init__(self) -> None:
            monkeypatch.setattr(pool, "_STARTING_SEC", PATIENCE_SEC)
            super().__init__()

    async def run() -> None:
        await decoders.start(pool_settings)
        assert decoders._forker is not None
        stopped = decoders._forker._process.pid
        [decoder] = children(stopped)
        monkeypatch.setattr(pool, "_Forker", Replacement)
        monkeypatch.setattr(pool, "_STARTING_SEC", 0.01)
        os.kill(stopped, signal.SIGSTOP)
        os.kill(decoder, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_SEC):
            while is_running(stopped) or not decoders.is_ready:
                decoders.mend()
                await asyncio.sleep(0.01)

    monkeypatch.setattr(pool, "_AGAIN_SEC", 0.01)
    with closing(Decoders(1, lambda report: None)) as decoders:
        asyncio.run(run())


def test_a_decoder_is_ended_although_its_forker_was_busy(pool_settings: Settings) -> None:
    async def run() -> None:
        await decoders.start(pool_settings)
        forker = decoders._forker
        assert forker is not None
        [decoder] = children(forker._process.pid)
        os.kill(decoder, signal.SIGSTOP)
        os.kill(forker._process.pid, signal.SIGSTOP)
        with suppress(BlockingIOError):
            while True:
                forker.send(b'["yield", 99]')
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await decoders.decode(b"", None, np.empty((32, 32, 3), np.uint8))
        os.kill(forker._process.pid, signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_SEC):
            while is_running(decoder):
                await asyncio.sleep(0.01)

    with closing(Decoders(1, lambda report: None)) as decoders:
        asyncio.run(run())


def test_no_decoder_is_started_when_the_event_loop_has_ended(pool_settings: Settings) -> None:
    async def run() -> None:
        await decoders.start(pool_settings)
        assert decoders._forker is not None
        for process in children(decoders._forker._process.pid):
            os.kill(process, signal.SIGSTOP)
        image = np.empty((32, 32, 3), np.uint8)
        decoding.append(asyncio.ensure_future(decoders.decode(b"", None, image)))
        await asyncio.sleep(0.1)

    decoding: list[asyncio.Future[None]] = []
    decoders = Decoders(1, lambda report: None)
    asyncio.run(run())
    assert decoding[0].cancelled()
    decoders.close()


def test_a_form_has_at_most_100_parts() -> None:
    def form(parts: int) -> bytes:
        last = (
            b'--b\r\nContent-Disposition: form-data; name="f";'
            b' filename="x"\r\n\r\nimage\r\n--b--\r\n'
        )
        return (parts - 1) * b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n" + last

    kind = "multipart/form-data; boundary=b"
    assert image_in(form(MOST_PARTS), kind) == b"image"
    with pytest.raises(BadForm, match="more than 100 parts"):
        image_in(form(MOST_PARTS + 1), kind)


def test_what_starts_decoders_can_be_closed_again_after_a_failed_start() -> None:
    forker = _Forker()
    forker.close()
    assert forker.close() == ""
