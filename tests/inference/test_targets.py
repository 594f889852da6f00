"""Formats that are made of the ONNX model: a repository for Triton, OpenVINO's files, and
TensorRT's plan."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

import lockstep
from lockstep.system.errors import BackendError, CheckpointError
from tests.edges import softmax
from tests.inference.cases import CLASSES, MEAN, STD, check_with_proof, open_session, pictures

FIELDS = {
    "Reshape": [("shape", 1, "int64", "repeated")],
    "ModelInput": [
        ("name", 1, "string", ""),
        ("data_type", 2, "DataType", ""),
        ("dims", 4, "int64", "repeated"),
        ("reshape", 5, "Reshape", ""),
    ],
    "ModelOutput": [
        ("name", 1, "string", ""),
        ("data_type", 2, "DataType", ""),
        ("dims", 3, "int64", "repeated"),
        ("label_filename", 4, "string", ""),
        ("reshape", 5, "Reshape", ""),
    ],
    "ModelDynamicBatching": [
        ("preferred_batch_size", 1, "int32", "repeated"),
        ("max_queue_delay_microseconds", 2, "uint64", ""),
    ],
    "ModelConfig": [
        ("name", 1, "string", ""),
        ("platform", 2, "string", ""),
        ("max_batch_size", 4, "int32", ""),
        ("input", 5, "ModelInput", "repeated"),
        ("output", 6, "ModelOutput", "repeated"),
        ("dynamic_batching", 11, "ModelDynamicBatching", ""),
    ],
}
"""A part of Triton's model_config.proto: fields with number, type and label."""
NEEDS_OPENVINO = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="openvino is not installed"
)
TYPES = {"TYPE_UINT8": 2, "TYPE_INT64": 9, "TYPE_FP32": 11}


def config_class() -> Any:
    """Return the message ModelConfig, as far as `FIELDS` describes it."""
    file = descriptor_pb2.FileDescriptorProto(
        name="model_config.proto", package="inference", syntax="proto3"
    )
    kinds = file.enum_type.add(name="DataType")
    kinds.value.add(name="TYPE_INVALID", number=0)
    for name, number in TYPES.items():
        kinds.value.add(name=name, number=number)
    proto = descriptor_pb2.FieldDescriptorProto
    for message, fields in FIELDS.items():
        described = file.message_type.add(name=message)
        for name, number, kind, label in fields:
            field = described.field.add(name=name, number=number)
            field.label = proto.LABEL_REPEATED if label else proto.LABEL_OPTIONAL
            if kind[0].isupper():
                field.type = proto.TYPE_ENUM if kind == "DataType" else proto.TYPE_MESSAGE
                field.type_name = f".inference.{kind}"
            else:
                field.type = getattr(proto, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))


@pytest.mark.parametrize("bare", [False, True])
def test_tritons_configuration_fits(weights: Path, bare: bool, tmp_path: Path) -> None:
    result = lockstep.load(weights).export(tmp_path / "models", to="triton", batch=5, bare=bare)
    assert result["comparison"]["runtime"].startswith("onnxruntime ")
    model = tmp_path / "models" / "model"
    config = text_format.Parse((model / "config.pbtxt").read_text(), config_class()())
    assert config.name == model.name
    assert (config.platform, config.max_batch_size) == ("onnxruntime_onnx", 5)
    assert config.dynamic_batching.max_queue_delay_microseconds > 0
    session = open_session(model / "1" / "model.onnx")
    kinds = {"tensor(uint8)": 2, "tensor(int64)": 9, "tensor(float)": 11}
    for configured, there in (
        (config.input, session.get_inputs()),
        (config.output, session.get_outputs()),
    ):
        for described, node in zip(configured, there, strict=True):
            assert (described.name, described.data_type) == (node.name, kinds[node.type])
            dims = described.reshape.shape if described.HasField("reshape") else described.dims
            assert not isinstance(node.shape[0], int), "Triton makes batches of several sizes"
            assert len(dims) == len(node.shape[1:])
            assert all(
                isinstance(size, str) or size == wanted
                for wanted, size in zip(dims, node.shape[1:], strict=True)
            )
    labels = {entry.name: entry.label_filename for entry in config.output if entry.label_filename}
    assert labels == {"logits" if bare else "probabilities": "labels.txt"}
    assert (model / "labels.txt").read_text().splitlines() == list(CLASSES)
    if not bare:
        check_with_proof(model, "triton")


@NEEDS_OPENVINO
@pytest.mark.parametrize(
    "options",
    [{}, {"bare": True, "batch": 3}, {"precision": "fp16"}],
    ids=["default", "bare, batch of 3", "fp16"],
)
def test_openvino_is_near_float64(weights: Path, options: dict[str, Any], tmp_path: Path) -> None:
    import openvino

    export = lockstep.load(weights).export(tmp_path / "model", to="openvino", **options)
    assert "crops" in export["takes"]
    if not options.get("bare"):
        check_with_proof(tmp_path / "model", "openvino")
    assert export["takes"].count(f"[{options.get('batch', 'N')}, ") == 1
    result = export["comparison"]
    assert result["largest_difference"] < result["bound"]
    assert (tmp_path / "model" / "classes.txt").read_text().splitlines() == list(CLASSES)
    # Without this, processors that multiply bf16 compute in it.
    how = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(tmp_path / "model" / "model.xml"), "CPU", how)
    images = pictures(36, 36)  # of the size after the resize, so that only the crop is left
    x = ((images[:, 2:34, 2:34] - MEAN) / STD).transpose(0, 3, 1, 2)
    logits = lockstep.load(weights).on("reference").module()(x)
    if options.get("bare"):
        assert compiled([x.astype(np.float32)])["logits"] == pytest.approx(logits, abs=1e-3)
    else:
        probabilities = compiled([images[:, 2:34, 2:34].copy()])["probabilities"]
        assert probabilities == pytest.approx(softmax(logits), abs=1e-2 if options else 1e-5)
    if not options:
        with pytest.raises(RuntimeError, match="shape"):
            compiled([images])
        # On processors with bf16 instructions, what it chooses itself is bf16.
        assert (tmp_path / "model" / "preprocessing.py").exists()
        compiled = openvino.Core().compile_model(str(tmp_path / "model" / "model.xml"), "CPU")
        probabilities = compiled([images[:, 2:34, 2:34].copy()])["probabilities"]
        assert probabilities == pytest.approx(softmax(logits), abs=0.05)


@pytest.mark.parametrize(("to", "package"), [("tensorrt", "tensorrt"), ("openvino", "openvino")])
def test_without_the_package_that_writes_a_format_it_is_told_how_to_get_it(
    weights: Path, to: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendError, match=rf"needs {package}: pip install {package}=="):
        lockstep.load(weights).export(tmp_path / "model", to=to)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("to", ["onnx", "triton", "openvino", "tensorrt"])
def test_bf16_is_left_to_the_runtime(weights: Path, to: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{to} .* bf16"):
        lockstep.load(weights).export(tmp_path / "model", to=to, precision="bf16")
