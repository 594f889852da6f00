"""Engines of inference and their predictions, compared with the reference."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import lockstep
from lockstep.inference import onnx_model, runtimes
from lockstep.inference.runtimes import NATIVE, RUNTIMES, list_installed, open_runtime, tensorrt
from lockstep.inference.runtimes import onnxruntime as runtime
from lockstep.inference.runtimes.scores import Pace, compute_scores
from lockstep.inference.session import list_export_runtimes
from lockstep.models.metrics import Scores
from lockstep.models.quantisation import layers
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import zero_momentum
from lockstep.system import machine
from lockstep.system.errors import BackendError
from lockstep.system.machine import parse_arithmetic
from lockstep.weights import Weights
from tests.backends import oracle
from tests.backends.cases import NARROWED
from tests.backends.drawing import draw_batch, draw_images
from tests.inference.cases import MEAN, STD, image_file, random_tensors, save_random

CPU = Execution(device="cpu")
HERE = [
    name
    for name in list_installed("torch")
    if "cpu" in (RUNTIMES[name].precisions if name != NATIVE else {"cpu"})
]
QUANTISING = [name for name in HERE if name != NATIVE and RUNTIMES[name].quantises]


def make_weights(recipe: Recipe, **others: Any) -> Weights:
    return Weights(
        recipe, State(0, random_tensors(recipe, 1), {}), (), Path("weights"), "Lockstep", **others
    )


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.fixture
def pretend_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package of OpenVINO seem to be there, for what is refused before it is imported."""
    monkeypatch.setitem(
        RUNTIMES, "openvino", replace(RUNTIMES["openvino"], distributions=("numpy",))
    )


def test_the_runtimes_that_tests_need_are_installed() -> None:
    assert {NATIVE, "onnxruntime", "paddle-inference"} <= {*HERE}


@pytest.mark.parametrize(
    ("name", "changes"),
    # Paddle is slow to open.
    [(name, changes) for changes in NARROWED.values() for name in HERE][: 2 * len(HERE) - 1],
)
def test_logits_are_near_float64(tiny_recipe: Recipe, name: str, changes: dict[str, Any]) -> None:
    recipe = tiny_recipe.replace(mean=MEAN, std=STD, **changes)
    weights = make_weights(recipe)
    with open_runtime(name, weights, CPU, most_images=5) as runtime:
        assert (runtime.name, runtime.precision, runtime.on_gpu) == (name, "fp32", False)
        for count in (1, 5):
            images = draw_images(count, recipe.eval_crop)
            logits = runtime.predict(images)
            assert logits.dtype == np.float32
            # Twice the bound of `lockstep verify` for models with as many layers.
            assert distance(logits, oracle.logits(recipe, weights.tensors, images)) < 1e-4


@pytest.mark.parametrize("name", QUANTISING)
def test_weights_trained_in_int8_are_computed_in_int8(tiny_recipe: Recipe, name: str) -> None:
    recipe = tiny_recipe.replace(quantisation="int8", mean=MEAN, std=STD)
    scales = dict.fromkeys(layers(recipe.spec), 0.0155)
    weights = make_weights(recipe, scales=scales)
    images = draw_images(4, recipe.eval_crop)
    reference: Any = oracle.make_engine(recipe, [0.0])
    reference.write(State(0, weights.tensors, zero_momentum(recipe)))
    in_float = reference.predict(images)
    reference.quantise(scales)
    wanted = reference.predict(images)
    with open_runtime(name, weights, CPU) as runtime:
        logits = runtime.predict(images)
    assert distance(logits, wanted) < distance(logits, in_float) / 3


def test_a_model_in_fp16_computes_in_float16(tiny_recipe: Recipe) -> None:
    weights = make_weights(tiny_recipe)
    images = draw_images(3, tiny_recipe.eval_crop)
    recipe = tiny_recipe.replace(precision="fp16")
    wanted = oracle.logits(tiny_recipe, weights.tensors, images)
    whole = onnx_model.logits_model(recipe, weights.tensors), None
    for model in (whole, onnx_model.logits_model_apart(recipe, weights.tensors, as_inputs=False)):
        [logits] = runtime.open_session(*model).run(None, {"images": images})
        assert 1e-6 < distance(logits, wanted) < 6e-3


@pytest.mark.parametrize("as_inputs", [False, True])
def test_large_weights_are_not_copied(tiny_recipe: Recipe, as_inputs: bool) -> None:
    tensors = make_weights(tiny_recipe).tensors
    model, apart = onnx_model.logits_model_apart(tiny_recipe, tensors, as_inputs=as_inputs)
    assert {name for name, value in tensors.items() if value.nbytes >= 1024} == {*apart}
    assert all(np.shares_memory(value, tensors[name]) for name, value in apart.items())
    graph = onnx.load_from_string(model).graph
    stored = {array.name for array in graph.initializer if array.raw_data}
    assert stored | {*apart} == {*tensors, "mean", "std"} - {
        name for name in tensors if name.endswith("num_batches_tracked")
    }


@pytest.mark.parametrize(
    "name", [name for name in HERE if name != NATIVE and RUNTIMES[name].runs_onnx]
)
@pytest.mark.parametrize(
    "images", [np.zeros((1, 31, 32, 3), np.uint8), np.zeros((1, 32, 32, 3), np.float32)]
)
def test_other_images_are_refused(tiny_recipe: Recipe, name: str, images: np.ndarray) -> None:
    with (
        open_runtime(name, make_weights(tiny_recipe), CPU) as runtime,
        pytest.raises(ValueError, match=r"expected uint8 \(N, 32, 32, 3\)"),
    ):
        runtime.predict(images)


@pytest.mark.usefixtures("pretend_installed")
@pytest.mark.parametrize(
    ("name", "changes", "device", "message"),
    [
        (
            "onnx-runtime",
            {},
            "cpu",
            r"there is no runtime 'onnx-runtime'\. Did you mean onnxruntime",
        ),
        (
            "onnxruntime",
            {"precision": "bf16"},
            "cpu",
            "does not compute in bf16 on a CPU; use --set precision=fp32$",
        ),
        ("onnxruntime", {}, "cuda", "this onnxruntime has no CUDA; install onnxruntime-gpu"),
        ("openvino", {}, "cuda", "OpenVINO computes on CPUs"),
        (
            "paddle-inference",
            {"quantisation": "int8"},
            "cpu",
            "computes in float, and the weights were trained for int8",
        ),
    ],
)
def test_what_a_runtime_cannot_do_is_said(
    tiny_recipe: Recipe, name: str, changes: dict[str, Any], device: str, message: str
) -> None:
    weights = make_weights(
        tiny_recipe.replace(**changes), scales={"conv1": 1.0} if "quantisation" in changes else {}
    )
    with pytest.raises(BackendError, match=message):
        open_runtime(name, weights, Execution.of({"device": device}))


@pytest.mark.usefixtures("pretend_installed")
def test_bf16_needs_a_processor(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "arithmetic", lambda: parse_arithmetic("flags: fma avx2", {}))
    with pytest.raises(BackendError, match=r"openvino .* bf16"):
        open_runtime("openvino", make_weights(tiny_recipe.replace(precision="bf16")), CPU)


def test_missing_packages_are_named(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        RUNTIMES, "openvino", replace(RUNTIMES["openvino"], distributions=("no-such-distribution",))
    )
    assert "openvino" not in list_installed("torch")
    with pytest.raises(BackendError, match="no-such-distribution: pip install openvino=="):
        open_runtime("openvino", make_weights(tiny_recipe), CPU)


def test_tensorrt_needs_a_gpu(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(tiny_recipe)
    expected = r"tensorrt needs tensorrt or .*: pip install tensorrt=="
    with pytest.raises(BackendError, match=expected):
        open_runtime("tensorrt", weights)
    # With another package in its place, all of it runs up to the import.
    monkeypatch.setitem(
        RUNTIMES, "tensorrt", replace(RUNTIMES["tensorrt"], distributions=("numpy",))
    )
    with pytest.raises(BackendError, match="TensorRT finds no GPU here"):
        open_runtime("tensorrt", weights)
    monkeypatch.setattr(tensorrt, "gpu", lambda: ("H100", machine.describe_gpu_arithmetic((9, 0))))
    with pytest.raises(BackendError, match="device is cpu"):
        open_runtime("tensorrt", weights, CPU)
    with pytest.raises(BackendError, match=r"TensorRT .* 'tensorrt'"):
        open_runtime("tensorrt", weights)


def test_a_session_is_on_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(runtime, "_import", lambda: package)
    monkeypatch.setattr(runtime, "gpu", lambda: None)
    assert runtime.choose_device(Execution()) == "cpu"
    with pytest.raises(BackendError, match="no GPU is found"):
        runtime.choose_device(Execution(device="cuda"))
    monkeypatch.setattr(runtime, "gpu", lambda: ("H100", machine.describe_gpu_arithmetic((9, 0))))
    for name, device in (("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        assert runtime.choose_device(Execution.of({"device": name})) == device


def test_a_gpu_computes_fp32_in_fp32_and_fp16_by_tensorrt() -> None:
    there = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    for precision, tf32 in (("fp32", "0"), ("tf32", "1")):
        chosen = runtime.choose_providers(precision, there, quantised=False)
        assert chosen == [("CUDAExecutionProvider", {"use_tf32": tf32})]
    for precision, quantised in (("fp16", False), ("fp32", True)):
        chosen = runtime.choose_providers(precision, there, quantised=quantised)
        assert [name for name, _ in chosen] == there[:2]
    options = dict(runtime.choose_providers("fp16", there, quantised=False))[there[0]]
    assert Path(options["trt_timing_cache_path"]).is_absolute()  # not in the current folder
    [(name, _)] = runtime.choose_providers("fp16", there[1:], quantised=False)
    assert name == there[1]


@pytest.mark.parametrize("flips", [False, True])
def test_scores_are_those_of_the_reference_engine(tiny_recipe: Recipe, flips: bool) -> None:
    tiny_recipe = tiny_recipe.replace(eval_flips=flips)
    weights = make_weights(tiny_recipe)
    batch = draw_batch(tiny_recipe)
    # Two are padding.
    batch = replace(batch, labels=np.where(np.arange(len(batch.labels)) < 6, batch.labels, -1))
    reference: Any = oracle.make_engine(tiny_recipe, [0.0])
    reference.write(State(0, weights.tensors, zero_momentum(tiny_recipe)))
    wanted: Scores = reference.evaluate([batch])
    with open_runtime("onnxruntime", weights, CPU) as runtime:
        scores = compute_scores(runtime.predict, [batch], flips=flips)
    assert scores.labels.tolist() == wanted.labels.tolist()
    assert scores.ranks.tolist() == wanted.ranks.tolist()
    assert scores.predictions.tolist() == wanted.predictions.tolist()
    assert scores.losses == pytest.approx(wanted.losses, rel=1e-4)
    assert scores.confidences == pytest.approx(wanted.confidences, rel=1e-4)


def test_speed_omits_the_first_batch(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = draw_batch(tiny_recipe)
    pace = Pace()
    # Given at 0, 20 and 24 s; done at 10, 22 and 30 s: 2 and 6 s of computing, 20 s from the end of
    # the first batch.
    clock = iter([0.0, 10.0, 20.0, 22.0, 24.0, 30.0])
    monkeypatch.setattr(
        "lockstep.inference.runtimes.scores.time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    assert len(list(pace.watch([batch] * 3))) == 3
    speed = pace.describe_speed(batch_images=8, on_gpu=False)
    assert speed["images_per_sec"] == 2 * len(batch.labels) / 20
    assert speed["latency_ms"] is not None
    assert speed["latency_ms"]["mean"] == 4000
    assert (speed["latency_ms"]["p50"], speed["latency_ms"]["p99"]) == (2000, 6000)
    assert pace.describe_speed(batch_images=8, on_gpu=True)["latency_ms"] is None


REFERENCE = Execution(backend="reference", reference_dtype="float32")


@pytest.fixture
def weights(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    return save_random(
        tiny_recipe.replace(mean=MEAN, std=STD, eval_resize=40, antialias=True), tmp_path
    )


@pytest.mark.parametrize("name", list_export_runtimes())
def test_runtimes_have_the_references_logits(name: str, weights: Path, tmp_path: Path) -> None:
    path = image_file(tmp_path, 50, 70)
    results = []
    for where, chosen in (("reference", "native"), (name, name)):
        with lockstep.load(weights).on(where) as model:
            results.append((model.predict(path, features=True), model.logits(path)))
            assert model.runtime == chosen
    (expected, logits), (other, others_logits) = results
    assert others_logits == pytest.approx(logits, abs=1e-4 * float(np.abs(logits).max()))
    assert other.features == pytest.approx(
        expected.features, abs=1e-4 * float(expected.features.max())
    )
    assert (other.classes, other.path) == (expected.classes, path)


def test_an_exported_model_is_run_as_it_is(weights: Path, tmp_path: Path) -> None:
    lockstep.load(weights).export(tmp_path / "model", to="onnx", compare=False)
    path = image_file(tmp_path, 50, 70)
    expected = lockstep.load(weights).on("reference").predict(path)
    for chosen, runs in ((None, list_export_runtimes()[0]), ("native", "native")):
        with lockstep.load(tmp_path / "model").on(chosen) as model:
            prediction = model.predict(path)
            assert model.runtime == runs
        assert prediction.classes == expected.classes
        assert prediction.probabilities == pytest.approx(expected.probabilities, rel=1e-4)


def test_grad_cam_needs_the_runtime_of_a_framework(weights: Path) -> None:
    model = lockstep.load(weights).on(list_export_runtimes()[0])
    with pytest.raises(BackendError, match=r"Grad-CAM.* --runtime"):
        model.predict(np.zeros((40, 40, 3), np.uint8), explain=True)
