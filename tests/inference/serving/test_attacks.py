"""Damaged, huge, slow and half requests: the answers are bounded, and the server goes on."""

import io
import json
import random
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import requests
from PIL import Image

from lockstep.inference.serving.limits import HELD_BODIES, STALLED_SEC
from tests.data.pictures import progressive_jpeg
from tests.inference.serving.cases import (
    ENGINE,
    PATIENCE_SEC,
    Server,
    encode_request,
    head,
    noise,
    serving,
)
from tests.processes import wait_until
from tests.soak import SOAK

MUTATED = 2000 if SOAK else 160
BUSY = (408, 503)
"""What a server answers, too, if the machine stalls for longer than its times."""
CONNECTIONS = 40
TIMEOUT_SEC = 1
BOUNDED_SEC = 60
"""Longer than any answer may take: the time to send, the time to compute and the time to linger, on
a busy machine. A connection that nothing bounds stays open for longer."""


@pytest.fixture(scope="module")
def strict(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with small sizes, and with times that do not pass, however busy the machine is."""
    yield from small_server(weights, tmp_path_factory, 10 * PATIENCE_SEC)


@pytest.fixture(scope="module")
def hasty(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with small sizes and times, for requests that are bounded by time."""
    yield from small_server(weights, tmp_path_factory, TIMEOUT_SEC)


def small_server(
    weights: Path, tmp_path_factory: pytest.TempPathFactory, timeout_sec: int
) -> Iterator[Server]:
    """Start a server. After all tests it still answers, and holds nothing."""
    options = (
        *("--max-body-mb", 1, "--max-megapixels", 2, "--timeout-sec", timeout_sec),
        *("--max-connections", CONNECTIONS),
    )
    with serving(
        weights, tmp_path_factory.mktemp("log") / "small.log", "--runtime", ENGINE, *options
    ) as server:
        yield server
        wait_until(lambda: server.metric("lockstep_admitted_images") == 0)
        assert server.stop() == 0
        errors = [event for event in server.events() if event["level"] in ("error", "critical")]
        assert errors == []


@pytest.fixture(autouse=True)
def still_right(request: pytest.FixtureRequest, photos: list[Path]) -> Iterator[None]:
    """Check that the test's server answers as before the test."""
    server = request.getfixturevalue("hasty" if "hasty" in request.fixturenames else "strict")
    data = photos[0].read_bytes()
    before = read_probabilities(server, data)
    yield
    # Batches of other sizes round otherwise.
    assert read_probabilities(server, data) == pytest.approx(before, abs=2e-6)


def read_probabilities(server: Server, data: bytes) -> list[float]:
    """Return what the server finds, when it has closed enough connections to take another one and
    is not too busy."""
    probabilities: list[list[float]] = []

    def is_answered() -> bool:
        try:
            answer = server.post("/predict", data)
        except requests.ConnectionError:
            return False
        if answer.status_code in BUSY:
            return False
        probabilities.append(answer.json()["probabilities"])
        return True

    wait_until(is_answered)
    return probabilities[0]


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """Return a PNG with one bit a pixel that claims this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def form(*files: bytes) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    return b"".join(head + file + b"\r\n" for file in files) + b"--b--\r\n"


def jpeg(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (png(60_000, 60_000), 413),
        (png(2_000_000_000, 2_000_000_000), 413),
        (png(2000, 1001, bytes(251 * 1001)), 413),
        (jpeg(2000, 1001), 413),
        (png(200_000, 1, bytes(25_001)), 413),
        (jpeg(2000, 999), 200),
        (b"", 415),
        (b"not an image", 415),
        (jpeg(100, 100)[:-20], 415),
        (png(100, 100), 415),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", 415),
        (b"GIF89a" + b"\xff" * 100, 415),
        (progressive_jpeg(repeated=2000), 413),
        (progressive_jpeg(), 200),
    ],
    ids=[
        *("bomb", "absurd", "large png", "large jpeg", "strip", "fits", "empty", "text", "half"),
        *("no rows", "eps", "gif", "scans", "usual scans"),
    ],
)
def test_large_and_other_images_are_refused(strict: Server, data: bytes, status: int) -> None:
    answer = strict.post("/predict", data)
    assert answer.status_code == status, answer.text
    assert ("error" in answer.json()) == (status != 200)


def test_a_body_that_is_too_large_is_refused_and_its_sender_sees_why(strict: Server) -> None:
    large = bytes(3 * 2**20)
    for body in (large, iter([large[: 2**20], large[2**20 :]])):
        answer = strict.post("/predict", body)
        assert (answer.status_code, answer.headers["connection"]) == (413, "close")
        assert "expected at most 1 MiB" in answer.json()["error"]
    assert exchange(strict, head(strict, len(large)), large).startswith(b"HTTP/1.1 413 ")


def test_compressed_bodies_are_refused(strict: Server) -> None:
    bomb = zlib.compress(bytes(10**7))
    assert strict.post("/predict", bomb, headers={"Content-Encoding": "deflate"}).status_code == 415


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data", b"x", 400),
        ("multipart/form-data; boundary=" + "b" * 300, b"x", 400),
        (
            "multipart/form-data; boundary=b",
            b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n--b--\r\n",
            400,
        ),
        (
            "multipart/form-data; boundary=b",
            b"--b\r\n" + b"A: b\r\n" * 100 + b"\r\nx\r\n--b--\r\n",
            400,
        ),
        ("multipart/form-data; boundary=b", b"--b\r\n" * 100_000, 400),
        (
            "multipart/form-data; boundary=b",
            b"--b\r\nContent-Disposition: form-data; filename=a\r\n\r\nx\r\n--b--\r\n",
            415,
        ),
        ("multipart/mixed; boundary=b", b"x", 415),
        ("multipart/form-data; boundary=b", form(b"x", b"y"), 400),
        ("multipart/form-data; boundary=b", form(b"x", b"", b"y"), 400),
        ("multipart/form-data; boundary=b", form(b"", b""), 415),
    ],
)
def test_imageless_forms_are_refused(strict: Server, kind: str, body: bytes, status: int) -> None:
    assert strict.post("/predict", body, headers={"Content-Type": kind}).status_code == status


def test_json_that_grows_is_refused(strict: Server) -> None:
    for text in (
        b"[" * 900_000,
        b'{"inputs":[' + b"{}," * 300_000 + b"{}]}",
        b'{"id":"' + b"x" * 900_000 + b'"}',
    ):
        assert strict.post("/v2/models/model/infer", text).status_code == 400


def exchange(server: Server, *pieces: bytes, trickle: bytes = b"") -> bytes:
    """Send pieces, and return all that comes until the server closes the connection; b"" if that is
    a reset.

    Then the bytes of `trickle` are sent, one after the other, until the answer comes: after it the
    connection may be closed at any time.
    """
    with server.connect(BOUNDED_SEC) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            for number in range(len(trickle)):
                if select.select([connection], [], [], 0.05)[0]:
                    break
                connection.sendall(trickle[number : number + 1])
            answer = b""
            while data := connection.recv(2**16):
                answer += data
        except (ConnectionResetError, BrokenPipeError):
            return b""
        return answer


def test_half_an_upload_is_answered_when_its_time_is_over(hasty: Server) -> None:
    # Of a client that stalls before its first byte, the connection closes.
    answers = (exchange(hasty, head(hasty, 1000) + b"\xff\xd8half") for _ in range(3))
    answer = next(filter(None, answers))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()


def test_an_upload_that_trickles_is_answered_when_its_time_is_over(hasty: Server) -> None:
    answers = (exchange(hasty, head(hasty, 1000), trickle=bytes(999)) for _ in range(3))
    assert next(filter(None, answers)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("start", [b"", b"POST /predict HTTP/1.1\r\nHost: x\r\nA", b"P"])
def test_headers_that_do_not_come_close_the_connection(hasty: Server, start: bytes) -> None:
    assert exchange(hasty, start) == b""


def test_a_sender_that_asks_first_gets_its_refusal_and_sends_nothing(strict: Server) -> None:
    asks = head(strict, 3 * 2**20)[:-2] + b"Expect: 100-continue\r\n\r\n"
    assert exchange(strict, asks).startswith(b"HTTP/1.1 413 ")


def test_large_uploads_at_the_same_time_are_bounded_together(strict: Server) -> None:
    size = 2**20 - 1000
    with ExitStack() as opened:
        senders = [opened.enter_context(strict.connect()) for _ in range(12)]
        for sender in senders:
            sender.sendall(head(strict, size) + bytes(size - 1))
        wait_until(lambda: len(select.select(senders, [], [], 0)[0]) >= len(senders) - HELD_BODIES)
        refused = select.select(senders, [], [], 0)[0]
        for sender in senders:
            if sender not in refused:
                sender.sendall(b"x")
        answers = [sender.recv(12) for sender in senders]
    assert {b"HTTP/1.1 415"} <= set(answers)
    # 408: on a machine that stalls for a second, the first ones count as stalled.
    assert set(answers) <= {b"HTTP/1.1 408", b"HTTP/1.1 415", b"HTTP/1.1 429"}
    assert answers.count(b"HTTP/1.1 415") <= HELD_BODIES


def test_large_uploads_that_stall_give_way_to_others(strict: Server) -> None:
    size = 2**20 - 1000
    with ExitStack() as opened:
        senders = [opened.enter_context(strict.connect()) for _ in range(HELD_BODIES)]
        for sender in senders:
            sender.sendall(head(strict, size) + bytes(size - 1))
        wait_until(lambda: strict.metric("lockstep_held_bytes") == HELD_BODIES * (size - 1))
        wait_until(lambda: strict.post("/predict", bytes(size)).status_code == 415)
        [stalled] = select.select(senders, [], [], 0)[:1]
        assert {sender.recv(12) for sender in stalled} == {b"HTTP/1.1 408"}


def test_an_upload_whose_sender_leaves_is_forgotten(strict: Server) -> None:
    for _ in range(20):
        with strict.connect() as connection:
            connection.sendall(head(strict, 10_000) + bytes(100))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_an_answer_that_nobody_reads_closes_the_connection(hasty: Server) -> None:
    request = f"GET / HTTP/1.1\r\nHost: {hasty.host}\r\n\r\n".encode()

    def send_on(connection: socket.socket) -> None:
        while True:
            connection.sendall(request)

    with hasty.connect(BOUNDED_SEC) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_on(connection)


def open_many_connections(server: Server, opened: ExitStack) -> socket.socket:
    """Open more connections than the server keeps, wait until it has accepted all of them, and
    return the first one."""
    first, *_, last = [opened.enter_context(server.connect()) for _ in range(CONNECTIONS + 20)]
    last.sendall(f"GET /v2/health/live HTTP/1.1\r\nHost: {server.host}\r\n\r\n".encode())
    assert last.recv(100).startswith(b"HTTP/1.1 200 ")
    return first


def test_of_too_many_connections_those_that_wait_longest_are_closed(strict: Server) -> None:
    strict.session.close()
    with ExitStack() as opened:
        uploads = [opened.enter_context(strict.connect()) for _ in range(CONNECTIONS)]
        for upload in uploads:
            upload.sendall(head(strict, 100) + b"half")
        time.sleep(STALLED_SEC)
        first = open_many_connections(strict, opened)
        for closed in (uploads[0], first):
            with suppress(ConnectionResetError):
                assert closed.recv(100) == b""


def test_idle_connections_are_closed_before_a_moving_upload(strict: Server) -> None:
    strict.session.close()

    def is_answered() -> bool:
        with ExitStack() as opened:
            upload = opened.enter_context(strict.connect())
            upload.sendall(head(strict, 100) + b"half")
            time.sleep(1.5 * STALLED_SEC)
            upload.sendall(b"more")
            open_many_connections(strict, opened)
            try:
                upload.sendall(bytes(92))
                return upload.recv(12) == b"HTTP/1.1 415"
            except ConnectionError:
                return False

    # The first one is, unless the machine stalls for a second.
    assert any(is_answered() for _ in range(3))


def test_pipelined_requests_are_answered_in_order(strict: Server) -> None:
    names = ["/v2", "/v2/health/live", "/nothing"]
    requests = [f"GET {name} HTTP/1.1\r\nHost: {strict.host}\r\n" for name in names]
    requests[-1] += "Connection: close\r\n"
    answers = exchange(strict, "".join(f"{request}\r\n" for request in requests).encode())
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]


def mutations(server: Server, photos: list[Path]) -> Iterator[bytes]:
    """Yield whole requests of all kinds with random damage, without end."""
    draw = random.Random(7)
    images = noise(2, 32)
    tensor = {"name": "images", "shape": [2, 32, 32, 3], "datatype": "UINT8"}
    numbers = json.dumps({"inputs": [tensor | {"data": images.ravel().tolist()}]}).encode()
    binary, headers = encode_request(images)
    [length] = [f"{name}: {value}" for name, value in headers.items()]
    form = b'--b\r\nContent-Disposition: form-data; name="f"; filename="x"\r\n\r\n%s\r\n--b--\r\n'
    infer = "/v2/models/model/infer"
    known = []
    for path, kind, body in (
        ("/predict", "image/jpeg", photos[1].read_bytes()),
        ("/predict?top=3", "image/png", photos[0].read_bytes()),
        ("/predict", "multipart/form-data; boundary=b", form % photos[1].read_bytes()),
        (infer, f"x\r\n{length}", binary),
        (infer, "application/json", numbers),
    ):
        lines = head(server, len(body), path)[:-2] + f"Content-Type: {kind}\r\n\r\n".encode()
        known.append((lines, body))
    while True:
        lines, body = draw.choice(known)
        if draw.random() < 0.4:
            lines = damage(lines, draw)
        yield lines + (damage(body, draw) if draw.random() < 0.8 else body)


def damage(data: bytes, draw: random.Random) -> bytes:
    content = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        start = draw.randrange(len(content) or 1)
        how: list[Callable[[], None]] = [
            lambda at=start: content.__setitem__(slice(at, at + 1), draw.randbytes(1)),
            lambda at=start: content.__delitem__(slice(at, at + draw.randrange(200))),
            lambda at=start: content.__setitem__(
                slice(at, at), draw.randbytes(draw.randrange(200))
            ),
            lambda at=start: content.__setitem__(slice(at, at), content[: draw.randrange(300)]),
            lambda at=start: content.__delitem__(slice(at, None)),
        ]
        draw.choice(how)()
    return bytes(content)


@pytest.mark.slow
def test_mutated_requests_get_bounded_answers(hasty: Server, photos: list[Path]) -> None:
    requests = mutations(hasty, photos)
    lock = threading.Lock()

    def send(_: int) -> tuple[bytes, float]:
        with lock:
            request = next(requests)
        began = time.monotonic()
        answer = exchange_once(hasty, request)
        return answer, time.monotonic() - began

    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(send, range(MUTATED)))
    statuses = {answer[9:12] for answer, _ in answers if answer}
    assert {answer[:9] for answer, _ in answers if answer} == {b"HTTP/1.1 "}
    assert {b"200", b"400", b"415"} <= statuses
    # 503: the machine was too busy.
    assert not {status for status in statuses if status.startswith(b"5")} - {b"503"}
    assert max(len(answer) for answer, _ in answers) < 20_000
    assert max(seconds for _, seconds in answers) < BOUNDED_SEC


def exchange_once(server: Server, request: bytes) -> bytes:
    """Send a request and return the first part of its answer; b"" if the server closes the
    connection without one."""
    try:
        with server.connect(BOUNDED_SEC) as connection:
            connection.sendall(request)
            return connection.recv(2**16)
    except (ConnectionResetError, BrokenPipeError):
        return b""
