"""The Open Inference Protocol: requests and answers as bytes, checked against the protocol's text
by hand."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.inference.serving import open_inference as oip
from lockstep.inference.serving.open_inference import (
    BadRequest,
    InferRequest,
    Output,
    Shapes,
    encode_answer,
    parse_request,
)
from tests.inference.serving.cases import noise

SHAPES = Shapes(logits=3, most_images=4)
IMAGES = noise(2, 2)
IN_TEXT = (Output("classes", False), Output("probabilities", False))


def body(**changes: Any) -> dict[str, Any]:
    tensor = {
        "name": "images",
        "shape": [2, 2, 2, 3],
        "datatype": "UINT8",
        "data": IMAGES.ravel().tolist(),
    }
    return {"inputs": [tensor | changes.pop("tensor", {})], **changes}


def read(value: Any, binary: bytes | None = None) -> InferRequest:
    text = json.dumps(value).encode()
    if binary is None:
        return parse_request(text, None, SHAPES)
    return parse_request(text + binary, len(text), SHAPES)


def body_in_binary(size: int, **changes: Any) -> dict[str, Any]:
    value = body(tensor={"parameters": {"binary_data_size": size}} | changes)
    del value["inputs"][0]["data"]
    return value


def encode_files(*files: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(file)) + file for file in files)


def test_the_same_images_as_a_flat_list_nested_lists_and_bytes() -> None:
    nested = body(tensor={"data": IMAGES.tolist()})
    binary = read(body_in_binary(24), IMAGES.tobytes())
    for request in (read(body(id="7")), read(nested), binary):
        assert request.images is not None
        assert request.images.dtype == np.uint8
        np.testing.assert_array_equal(request.images, IMAGES)
        assert request.outputs == IN_TEXT
        assert len(request) == 2
    assert read(body(id="7")).id == "7"
    assert read(body()).id is None


@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_files_are_a_tensor_of_bytes_with_their_lengths(shape: list[int]) -> None:
    data = encode_files(b"first", b"")
    content = body_in_binary(len(data), name="encoded", shape=shape, datatype="BYTES")
    request = read(content, data)
    assert (request.encoded, request.images, len(request)) == ((b"first", b""), None, 2)


def test_outputs_are_those_that_are_asked_for() -> None:
    outputs = [
        {"name": "logits", "parameters": {"binary_data": True}},
        {"name": "probabilities", "parameters": {"classification": 99}},
    ]
    assert read(body(outputs=outputs)).outputs == (
        Output("logits", True),
        Output("probabilities", False, best=3),
    )
    in_binary = (Output("classes", True), Output("probabilities", True))
    assert read(body(parameters={"binary_data_output": True})).outputs == in_binary


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "not a JSON object"),
        ({}, "one input"),
        ({"inputs": []}, "one input"),
        ({"inputs": [1]}, "not a JSON object"),
        (body(id=7), "id is not"),
        (body(id="x" * 300), "id is not"),
        (body(id="\ud83d"), "id is not .* whole characters"),
        (body(id="a\udc80b"), "id is not .* whole characters"),
        (body(tensor={"name": "input"}), "no such input; expected images or encoded"),
        (body(tensor={"name": ["images"]}), "no such input"),
        (body(tensor={"datatype": "FP32"}), "datatype of images is not UINT8"),
        (body(tensor={"shape": "2"}), "shape of images"),
        (body(tensor={"shape": []}), "shape of images"),
        (body(tensor={"shape": [2, 2, 2, 3.0]}), "shape of images"),
        (body(tensor={"shape": [2, 3, 2, 2]}), "expected .N, height, width, 3."),
        (body(tensor={"shape": [2, 2, 3, 3]}), "has 24 numbers, expected 36"),
        (body(tensor={"shape": [0, 2, 2, 3], "data": []}), "1 to 4 images, not 0"),
        (body(tensor={"shape": [5, 2, 2, 3]}), "1 to 4 images, not 5"),
        (body(tensor={"shape": [10**12, 2, 2, 3]}), "1 to 4 images"),
        (body(tensor={"data": None}), "no data"),
        (body(tensor={"data": []}), "not whole numbers"),
        (body(tensor={"data": [0] * 23}), "23 numbers, expected 24"),
        (body(tensor={"data": [0] * 23 + [256]}), "0 to 255"),
        (body(tensor={"data": [0] * 23 + [-1]}), "0 to 255"),
        (body(tensor={"data": [0] * 23 + [10**30]}), "whole numbers"),
        (body(tensor={"data": [0] * 23 + [0.5]}), "whole numbers"),
        (body(tensor={"data": [0] * 23 + ["a"]}), "whole numbers"),
        (body(tensor={"data": [True] * 24}), "whole numbers"),
        (body(tensor={"data": [[0], [0, 1]]}), "equal length"),
        (
            body(tensor={"name": "encoded", "datatype": "BYTES", "shape": [1], "data": ["x"]}),
            "cannot hold files",
        ),
        (body(tensor={"parameters": []}), "parameters is not"),
        (body(tensor={"parameters": {"shared_memory_region": "x"}}), "shared memory"),
        (body(outputs={}), "outputs is not a list"),
        (body(outputs=["logits"]), "not a JSON object"),
        (
            body(outputs=[{"name": "softmax"}]),
            "no such output; expected classes, probabilities, logits",
        ),
        (body(outputs=[{"name": "logits"}, {"name": "logits"}]), "named twice"),
        (
            body(outputs=[{"name": "classes", "parameters": {"classification": 1}}]),
            "classification of classes",
        ),
        (
            body(outputs=[{"name": "logits", "parameters": {"classification": -1}}]),
            "classification of logits",
        ),
        (body_in_binary(24), "binary_data_size is 24; 0 bytes"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(value: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read(value)


@pytest.mark.parametrize(
    ("value", "binary", "message"),
    [
        (body(), b"x", "bytes after the JSON"),
        (body_in_binary(24), bytes(23), "24; 23 bytes"),
        (body_in_binary(23), bytes(23), "has 23 bytes, expected 24"),
        (body_in_binary(-1), bytes(24), "binary_data_size"),
        (
            body_in_binary(4, name="encoded", shape=[2], datatype="BYTES"),
            encode_files(b""),
            "ends before element 1",
        ),
        (
            body_in_binary(5, name="encoded", shape=[1], datatype="BYTES"),
            b"\xff\xff\xff\xffx",
            "longer than the tensor",
        ),
        (
            body_in_binary(5, name="encoded", shape=[1], datatype="BYTES"),
            encode_files(b"") + b"x",
            "after its 1 elements",
        ),
    ],
)
def test_a_wrong_binary_tensor_is_refused(value: Any, binary: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read(value, binary)


@pytest.mark.parametrize(
    ("text", "length"),
    [(b"{", None), (b"\xff{}", None), (b"{}", 3), (b"{}", 0), (b"[" * 10**5, None)],
)
def test_what_is_not_json_is_refused(text: bytes, length: int | None) -> None:
    with pytest.raises(BadRequest):
        parse_request(text, length, SHAPES)


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 400), st.integers(-1, 500))
def test_any_damage_is_refused_or_read(piece: bytes, start: int, end: int, length: int) -> None:
    whole = json.dumps(body_in_binary(24)).encode() + IMAGES.tobytes()
    data = whole[:start] + piece + whole[end:]
    try:
        request = parse_request(data, None if length < 0 else length, SHAPES)
    except BadRequest:
        return
    assert 1 <= len(request) <= SHAPES.most_images


def test_answers_are_json_or_json_and_bytes() -> None:
    tensors = {
        "probabilities": np.array([[0.25, 0.5, 0.25], [0.75, 0.125, 0.125]], np.float32),
        "classes": np.array([[1], [0]]),
        "logits": np.array([[0, 1, 0], [2, 0, 0]], np.float32),
    }
    outputs = (
        Output("classes", True),
        Output("probabilities", False),
        Output("logits", True),
        Output("logits", True, best=2),
    )
    parts, length = encode_answer(
        InferRequest("7", outputs, images=IMAGES), "tiny", tensors, ["a", "b:c"]
    )
    whole = b"".join(parts)
    assert length is not None
    head = json.loads(whole[:length])
    rest = whole[length:]
    assert (head["model_name"], head["model_version"], head["id"]) == ("tiny", "1", "7")
    texts = [b"1.000000:1:b:c", b"0.000000:0:a", b"2.000000:0:a", b"0.000000:1:b:c"]
    shares = [0.25, 0.5, 0.25, 0.75, 0.125, 0.125]
    text_bytes = len(encode_files(*texts))
    expected = [
        ("classes", "INT64", [2, 1], {"parameters": {"binary_data_size": 16}}),
        ("probabilities", "FP32", [2, 3], {"data": shares}),
        ("logits", "FP32", [2, 3], {"parameters": {"binary_data_size": 24}}),
        ("logits", "BYTES", [2, 2], {"parameters": {"binary_data_size": text_bytes}}),
    ]
    for output, (name, kind, shape, rest_of_it) in zip(head["outputs"], expected, strict=True):
        assert output == {"name": name, "datatype": kind, "shape": shape, **rest_of_it}
    assert rest == struct.pack("<2q6f", 1, 0, 0, 1, 0, 2, 0, 0) + encode_files(*texts)
    parts, length = encode_answer(InferRequest(None, IN_TEXT, images=IMAGES), "tiny", tensors, [])
    assert length is None
    assert "id" not in json.loads(b"".join(parts))


def test_the_description_has_every_tensor_that_requests_and_answers_may_have() -> None:
    model = oip.describe_model("tiny", "lockstep_x", SHAPES)
    assert model["inputs"][0] == {"name": "images", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}
    assert {output["name"] for output in model["outputs"]} == {"classes", "probabilities", "logits"}
