"""Triton's own HTTP client."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.recipes import Execution
from tests.inference.cases import CLASSES
from tests.inference.serving.cases import Server, calibrated_softmax, noise, reference_logits

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / name for name in ("how-to/serve.md", "reference/server.md", "how-to/python.md")]
pytestmark = pytest.mark.filterwarnings("ignore")  # of gevent and its friends


@pytest.fixture(scope="module")
def triton() -> Any:
    import tritonclient.http

    return tritonclient.http


@pytest.fixture
def client(triton: Any, server: Server) -> Any:
    address = f"{server.host}:{server.port}"
    with triton.InferenceServerClient(address, concurrency=4) as triton_client:
        yield triton_client


def test_the_client_finds_the_server_and_its_model_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("model")
    assert client.is_model_ready("model", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "lockstep"
    assert client.get_model_metadata("model")["inputs"][0]["shape"] == [-1, -1, -1, 3]


@pytest.mark.parametrize("in_binary", [True, False])
def test_the_client_infers(triton: Any, client: Any, weights: Path, in_binary: bool) -> None:
    images = noise(2, 32, seed=2)
    tensor = triton.InferInput("images", list(images.shape), "UINT8")
    tensor.set_data_from_numpy(images, binary_data=in_binary)
    outputs = [
        triton.InferRequestedOutput(name, binary_data=in_binary)
        for name in ("probabilities", "logits", "classes")
    ]
    answer = client.infer("model", [tensor], outputs=outputs, request_id="17", timeout=1000)
    logits = reference_logits(weights, images)
    assert answer.get_response()["id"] == "17"
    theirs = answer.as_numpy("logits")
    assert theirs == pytest.approx(logits, abs=1e-4 * float(np.abs(logits).max()))
    assert theirs.dtype == np.float32
    assert answer.as_numpy("probabilities") == pytest.approx(calibrated_softmax(logits), abs=1e-5)
    assert answer.as_numpy("classes").tolist() == logits.argmax(axis=1)[:, None].tolist()


def test_the_client_sends_files_and_asks_for_names(
    triton: Any, client: Any, weights: Path, photos: list[Path]
) -> None:
    files = np.array([photo.read_bytes() for photo in photos[:3]], dtype=object)
    tensor = triton.InferInput("encoded", [3], "BYTES")
    tensor.set_data_from_numpy(files)
    answer = client.infer(
        "model", [tensor], outputs=[triton.InferRequestedOutput("probabilities", class_count=2)]
    )
    execution = Execution(backend="reference", reference_dtype="float32")
    expected = list(lockstep.load(weights).on(execution=execution).predict(photos[:3], top=2))
    for row, prediction in zip(answer.as_numpy("probabilities"), expected, strict=True):
        texts = [text.decode().split(":") for text in row]
        assert [text[2] for text in texts] == list(prediction.classes)
        assert [CLASSES[int(text[1])] for text in texts] == list(prediction.classes)
        shares = [float(text[0]) for text in texts]
        assert shares == pytest.approx(prediction.probabilities, abs=2e-6)


def test_by_default_outputs_are_those_of_an_export(triton: Any, client: Any) -> None:
    tensor = triton.InferInput("images", [1, 32, 32, 3], "UINT8")
    tensor.set_data_from_numpy(noise(1, 32))
    answer = client.infer("model", [tensor])
    names = [output["name"] for output in answer.get_response()["outputs"]]
    assert names == ["classes", "probabilities"]
    assert answer.as_numpy("probabilities").sum() == pytest.approx(1)


def test_the_examples_of_the_page_run(
    server: Server,
    photos: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = []
    for page in PAGES:
        blocks += re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    examples = [block for block in blocks if "127.0.0.1:8000" in block]
    *_, starts_a_server = blocks
    assert len(examples) == 2
    assert ".serve(port=8000)" in starts_a_server
    (tmp_path / "photo.jpg").write_bytes(photos[1].read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    for example in examples:
        example = example.replace("127.0.0.1:8000", f"{server.host}:{server.port}").replace(
            '"MODEL"', '"model"'
        )
        exec(compile(example, "an example of a page", "exec"), {})
    printed = capsys.readouterr().out
    assert any(name in printed for name in CLASSES)


def test_requests_of_the_client_at_the_same_time(triton: Any, client: Any, weights: Path) -> None:
    images = noise(8, 41, seed=3)  # of another size than the crop
    waiting = []
    for image in images:
        tensor = triton.InferInput("images", [1, 41, 41, 3], "UINT8")
        tensor.set_data_from_numpy(image[None])
        waiting.append(
            client.async_infer("model", [tensor], outputs=[triton.InferRequestedOutput("logits")])
        )
    logits = np.concatenate([one.get_result().as_numpy("logits") for one in waiting])
    assert logits == pytest.approx(reference_logits(weights, images), abs=1e-3)


def test_the_client_gets_the_reason_of_a_refusal(triton: Any, client: Any) -> None:
    tensor = triton.InferInput("images", [1, 8, 6, 4], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, 8, 6, 4), np.uint8))
    with pytest.raises(triton.InferenceServerException, match="expected"):
        client.infer("model", [tensor])
    with pytest.raises(triton.InferenceServerException, match="compressed"):
        client.infer("model", [tensor], request_compression_algorithm="gzip")
