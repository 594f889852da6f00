"""A server in a process, and plain HTTP clients: answers compared with the NumPy reference,
headers, figures, logs."""

import base64
import io
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.inference.images import read_square
from lockstep.recipes import Execution
from lockstep.weights import open_weights
from tests.inference.cases import CLASSES
from tests.inference.serving.cases import (
    ENGINE,
    PATIENCE_SEC,
    TOKEN,
    Server,
    calibrated_softmax,
    encode_request,
    head,
    noise,
    reference_logits,
    serving,
    session,
)
from tests.processes import wait_until

CLIENTS = 12
REFERENCE = Execution(backend="reference", reference_dtype="float32")


@pytest.fixture(scope="module")
def expected(weights: Path, photos: list[Path]) -> list[lockstep.Prediction]:
    """What the reference predicts of the photos."""
    return list(lockstep.load(weights).on(execution=REFERENCE).predict(photos, top=10))


def test_an_image_gets_the_classes_that_the_reference_predicts(
    server: Server, photos: list[Path], expected: list[lockstep.Prediction]
) -> None:
    for photo, prediction in zip(photos, expected, strict=True):
        answer = server.post("/predict", photo.read_bytes(), params={"top": 10})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        content = answer.json()
        assert tuple(content["classes"]) == prediction.classes
        assert content["names"] == content["classes"]
        assert content["probabilities"] == pytest.approx(prediction.probabilities, abs=2e-6)
        assert content["unknown"] is prediction.is_unknown
        assert content["ms"].keys() == {"receive", "decode", "wait", "compute", "total"}
    assert {prediction.is_unknown for prediction in expected} == {True, False}


def test_predict_answers_no_head(server: Server) -> None:
    assert server.session.head(server.url + "/predict", timeout=PATIENCE_SEC).status_code == 405


def test_a_form_with_an_image_gets_the_same_answer(server: Server, photos: list[Path]) -> None:
    data = photos[1].read_bytes()
    left_empty = [("first", ("", b"")), ("image", ("a b.jpg", data)), ("second", ("x", b""))]
    raw = server.post("/predict", data)
    for files in ([("image", ("a b.jpg", data))], left_empty):
        answer = server.post("/predict", {"note": "x"}, files=files)
        assert raw.json()["probabilities"] == answer.json()["probabilities"]
    assert len(raw.json()["classes"]) == 5
    chunked = server.post("/predict", iter([data[:100], data[100:]]))
    assert chunked.json()["probabilities"] == raw.json()["probabilities"]


def test_json_and_binary_tensors_get_the_references_logits(server: Server, weights: Path) -> None:
    images = noise(3, 32)
    logits = reference_logits(weights, images)
    url = "/v2/models/model/infer"
    names = ("logits", "probabilities", "classes")
    tensor = {"name": "images", "shape": list(images.shape), "datatype": "UINT8"}
    request = {
        "inputs": [tensor | {"data": images.ravel().tolist()}],
        "outputs": [{"name": name} for name in names],
    }
    body, headers = encode_request(images, *names)
    for answer in (server.post(url, json=request), server.post(url, body, headers=headers)):
        values = {
            output["name"]: np.reshape(output["data"], output["shape"])
            for output in answer.json()["outputs"]
        }
        assert values["logits"] == pytest.approx(logits, abs=1e-4 * float(np.abs(logits).max()))
        assert values["probabilities"] == pytest.approx(calibrated_softmax(logits), abs=1e-5)
        assert values["classes"].tolist() == logits.argmax(axis=1)[:, None].tolist()


def test_the_protocols_addresses(server: Server) -> None:
    assert server.get("/v2/health/live").json() == {"live": True}
    assert server.get("/v2/health/ready").json() == {"ready": True}
    assert server.get("/v2").json()["name"] == "lockstep"
    assert server.get("/v2/models/model/ready").status_code == 200
    for path in ("/v2/models/model", "/v2/models/model/versions/1"):
        assert server.get(path).json()["versions"] == ["1"]
    for path in (
        *("/", "/about", "/metrics", "/v2", "/v2/health/live", "/v2/health/ready"),
        "/v2/models/model",
    ):
        answer = server.session.head(server.url + path, timeout=PATIENCE_SEC)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0
    for path in (
        *("/v2/models/other", "/v2/models/model/versions/2", "/v2/models/other/ready", "/nothing"),
        "/docs",
    ):
        answer = server.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]
    assert server.get("/predict").status_code == 405
    answer = server.post("/v2/models/model/infer", json={"inputs": [{}]})
    assert "expected images or encoded" in answer.json()["error"]


def test_a_path_with_another_slash_is_another_path(server: Server, photos: list[Path]) -> None:
    data = photos[0].read_bytes()
    answers = [
        server.post("/predict/", data, allow_redirects=False),
        server.post("/v2/models/model/infer/", data, allow_redirects=False),
        server.get("/about/", allow_redirects=False),
        server.get("/v2/", allow_redirects=False),
    ]
    assert [answer.status_code for answer in answers] == [404] * 4
    assert all("location" not in answer.headers for answer in answers)
    assert "end without a slash" in answers[0].json()["error"]


def test_a_thumbnail_is_what_is_seen(server: Server, weights: Path, photos: list[Path]) -> None:
    data = photos[0].read_bytes()
    answer = server.post("/predict?thumbnail=1", data).json()
    kind, _, text = answer["thumbnail"].partition(",")
    assert kind == "data:image/png;base64"
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
    seen = np.empty((32, 32, 3), np.uint8)
    read_square(data, open_weights(weights).recipe, seen)
    assert np.array_equal(picture, seen)
    assert "thumbnail" not in server.post("/predict?thumbnail=0", data).json()


@pytest.mark.parametrize(
    "query", ["thumbnail=2", "top=0", "top=x", "top=-1", "explain=maybe", "other=1", "explain=1"]
)
def test_unknown_options_are_refused(server: Server, photos: list[Path], query: str) -> None:
    answer = server.post(f"/predict?{query}", photos[0].read_bytes())
    assert answer.status_code == 400
    if query == "explain=1":
        reason = "this runtime cannot compute Grad-CAM; serve with --runtime native and --backend"
        assert answer.json()["error"] == f"{reason} jax or torch"


def test_clients_get_their_own_answers_of_common_batches(weights: Path, tmp_path: Path) -> None:
    """Also: the first batch waits for an image that is in progress, until all clients have sent
    theirs."""
    images = noise(CLIENTS, 32, seed=1)
    logits = reference_logits(weights, images)
    wrong: list[float] = []

    def client(server: Server, number: int) -> None:
        body, headers = encode_request(images[number : number + 1], "logits")
        url = f"{server.url}/v2/models/model/infer"
        with session() as own:
            for _ in range(10):
                [output] = own.post(url, body, headers=headers).json()["outputs"]
                wrong.append(float(np.abs(np.array(output["data"]) - logits[number]).max()))

    options = ("--max-wait-ms", 10_000 * PATIENCE_SEC, "--timeout-sec", 10 * PATIENCE_SEC)
    with serving(weights, tmp_path / "log", "--runtime", ENGINE, *options) as server:
        with server.connect() as late:
            late.sendall(head(server, 1))
            wait_until(lambda: server.metric("lockstep_coming_requests") == 1)
            threads = [
                threading.Thread(target=client, args=(server, number)) for number in range(CLIENTS)
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: server.metric("lockstep_queue_images") == CLIENTS)
            late.sendall(b"x")  # no image
            for thread in threads:
                thread.join(PATIENCE_SEC)
            assert late.recv(12) == b"HTTP/1.1 415"
        images_done, batches = (
            server.metric(f"lockstep_batch_images_{what}") for what in ("sum", "count")
        )
    assert len(wrong) == images_done == 10 * CLIENTS
    assert max(wrong) < 1e-4 * float(np.abs(logits).max())
    assert batches <= 1 + 9 * CLIENTS


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_the_health_check_of_the_images(server: Server, name: str) -> None:
    text = (Path(__file__).parents[3] / name).read_text()
    [check] = re.findall(r"^HEALTHCHECK .*? CMD ((?:.*\\\n)*.*)", text, re.MULTILINE)
    check = check.replace("\\\n", "").replace("python -c", f"{sys.executable} -c")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()[1]
    serves = server.process.pid
    results = []
    for process, port in ((serves, server.port), (serves, nobody), (os.getpid(), nobody)):
        line = check.replace("/proc/1/", f"/proc/{process}/").replace("8000", str(port))
        done = subprocess.run(["sh", "-c", line], capture_output=True, check=False)
        results.append(done.returncode)
    assert results == [0, 1, 0]


def test_every_answer_has_the_headers_of_security(server: Server) -> None:
    for answer in (
        server.get("/"),
        server.get("/nothing"),
        server.get("/metrics"),
        server.post("/predict", b"x"),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


def test_other_hosts_and_origins_are_refused(server: Server, photos: list[Path]) -> None:
    data = photos[0].read_bytes()
    assert server.post("/predict", data, headers={"Host": "evil.example"}).status_code == 403
    here = {"Host": "localhost", "Origin": "http://localhost"}
    for headers, status in (({"Origin": "https://evil.example"}, 403), (here, 200)):
        assert server.post("/predict", data, headers=headers).status_code == status
    assert server.get("/v2", headers={"Host": "evil.example"}).status_code == 403


def test_figures_count_requests_by_path_and_status(server: Server) -> None:
    labels = {"method": "GET", "path": "/v2/models/{name}", "status": "404"}
    server.get("/v2/models/first")
    before = server.metric("lockstep_requests_total", **labels)
    server.get("/v2/models/second")
    assert server.metric("lockstep_requests_total", **labels) == before + 1
    server.session.request("BREW", server.url + "/coffee")
    assert server.metric("lockstep_requests_total", method="other", path="other") >= 1
    assert server.metric("lockstep_info", model="model", engine=ENGINE) == 1
    assert server.metric("lockstep_ready") == 1
    assert server.metric("process_resident_memory_bytes") > 1e6
    assert server.metric("lockstep_admitted_images") == 0


def test_the_log_is_lines_of_json(server: Server) -> None:
    server.get("/v2/models/%1b[31m%0aforged")
    wait_until(lambda: "forged" in server.events()[-1].get("path", ""))  # it follows the answer
    events = server.events()
    assert events[-1].items() >= {"event": "request", "method": "GET", "status": 404}.items()
    assert events[-1]["path"] == "/v2/models/\x1b[31m\nforged"
    listening = next(event for event in events if event["event"] == "listening")
    assert (listening["url"], listening["runtime"]) == (server.url, ENGINE)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", event["time"]) for event in events)


def test_a_token_is_required(weights: Path, photos: list[Path], tmp_path: Path) -> None:
    """Also: the environment gives the token, the model is a bare export with a name, successes
    are not logged, and the limit of pixels holds for tensors too."""
    lockstep.load(weights).export(tmp_path / "export", to="onnx", bare=True, compare=False)
    data = photos[0].read_bytes()
    right = {"Authorization": f"Bearer {TOKEN}"}
    options = ("--name", "tiny", "--quiet", "--allow-host", "api.example", "--max-megapixels", 1)
    body, length = encode_request(np.zeros((1, 1001, 1000, 3), np.uint8))
    with serving(
        tmp_path / "export", tmp_path / "log", *options, LOCKSTEP_SERVE_TOKEN=TOKEN
    ) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for answer in (
                server.post("/predict", data, headers=headers),
                server.get("/metrics", headers=headers),
            ):
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert server.get("/v2/health/ready").status_code == 200
        content = server.post("/predict", data, headers=right | {"Host": "api.example"}).json()
        assert server.get("/v2/models/tiny", headers=right).status_code == 200
        large = server.post("/v2/models/tiny/infer", body, headers=right | length)
        assert (large.status_code, "1000 x 1001 pixels" in large.json()["error"]) == (413, True)
        assert server.stop() == 0
        assert TOKEN not in (tmp_path / "log").read_text()
        logged = [event["status"] for event in server.events() if event["event"] == "request"]
        assert logged == [401] * 4 + [413]
    expected = lockstep.load(weights).on(execution=REFERENCE).predict(photos[0])
    assert content["model"] == "tiny"
    assert set(content["classes"]) <= set(CLASSES)
    assert content["probabilities"] == pytest.approx(expected.probabilities, abs=2e-6)


def test_files_of_pillow_and_photos_on_their_side_are_images(
    server: Server, photos: list[Path]
) -> None:
    upright = Image.open(photos[0])
    webp, turned = io.BytesIO(), io.BytesIO()
    upright.save(webp, "WEBP", lossless=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(turned, "PNG", exif=exif)
    expected = server.post("/predict", photos[0].read_bytes()).json()["probabilities"]
    for file in (webp, turned):
        assert server.post("/predict", file.getvalue()).json()["probabilities"] == expected
