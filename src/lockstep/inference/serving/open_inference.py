"""The Open Inference Protocol (KServe V2): its requests and answers as bytes, with tensors as JSON
or binary.

Source: the KServe project's "Open Inference Protocol", and Triton Inference Server's extensions
"binary tensor data" and "classification". Names of tensors are those of `lockstep export --to
triton`; `encoded` and `logits` are additional.
"""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.system.strict_json import is_count, is_positive, is_text, parsed

IMAGES = "images"
ENCODED = "encoded"
CLASSES = "classes"
PROBABILITIES = "probabilities"
LOGITS = "logits"
HEADER_LENGTH = "Inference-Header-Content-Length"
"""The header with the length of the JSON part of a request or an answer that also has binary
tensors."""
EXTENSIONS = ["binary_tensor_data", "classification"]
VERSION = "1"
"""The only version of the model. `lockstep export --to triton` writes the same."""
_LONGEST_ID = 256
_HALF = re.compile("[\ud800-\udfff]")
"""Half a UTF-16 character, which JSON can spell, and no encoding can write."""
_DATATYPES = {CLASSES: "INT64", PROBABILITIES: "FP32", LOGITS: "FP32"}


class BadRequest(ValueError):
    """A request that does not follow the protocol, or asks for what the model does not have."""


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model's tensors."""

    logits: int
    most_images: int
    """The most images of a request."""


@dataclass(frozen=True)
class Output:
    """A tensor that a request wants."""

    name: str
    binary: bool
    best: int = 0
    """The number of most likely classes to return as text in place of the values; 0 for the values.
    """


@dataclass(frozen=True)
class InferRequest:
    """A request. Either `images` or `encoded` is there."""

    id: str | None
    outputs: tuple[Output, ...]
    images: np.ndarray | None = None
    """Photos of one size, uint8 [N, height, width, 3]."""
    encoded: tuple[bytes, ...] = ()
    """Encoded image files."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.encoded) if self.images is None else len(self.images)


def describe_model(name: str, platform: str, shapes: Shapes) -> dict[str, Any]:
    """Return the description of the model. -1 stands for any number."""
    logits = shapes.logits
    sizes = {CLASSES: [-1, 1], PROBABILITIES: [-1, logits], LOGITS: [-1, logits]}
    return {
        "name": name,
        "versions": [VERSION],
        "platform": platform,
        "inputs": [
            {"name": IMAGES, "datatype": "UINT8", "shape": [-1, -1, -1, 3]},
            {"name": ENCODED, "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": tensor, "datatype": _DATATYPES[tensor], "shape": shape}
            for tensor, shape in sizes.items()
        ],
    }


def parse_request(body: bytes, json_length: int | None, shapes: Shapes) -> InferRequest:
    """Return what a request wants. Raises `BadRequest`.

    `json_length` is the value of `HEADER_LENGTH`; None: all of the body is JSON.
    """
    if json_length is not None and not 0 < json_length <= len(body):
        raise BadRequest(f"{HEADER_LENGTH} is {json_length}, but the body has {len(body)} bytes")
    try:
        content = parsed(body if json_length is None else body[:json_length])
    except ValueError as error:  # JSON, or UTF-8
        raise BadRequest(f"the request is not JSON: {error}") from None
    _expect(isinstance(content, dict), "the request is not a JSON object")
    identity = content.get("id")
    _expect(
        identity is None
        or (is_text(identity) and len(identity) <= _LONGEST_ID and not _HALF.search(identity)),
        f"id is not a string of at most {_LONGEST_ID} whole characters",
    )
    inputs = content.get("inputs")
    _expect(
        isinstance(inputs, list) and len(inputs) == 1, f"expected one input: {IMAGES} or {ENCODED}"
    )
    binary = memoryview(body)[json_length:] if json_length is not None else memoryview(b"")
    outputs = _parse_outputs(content, shapes)
    name, shape, values = _parse_input(inputs[0], binary, shapes)
    if name == ENCODED:
        return InferRequest(identity, outputs, encoded=_split_files(values, shape[0]))
    return InferRequest(identity, outputs, images=_parse_pixels(values, shape))


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BadRequest(otherwise)


def _get_parameters(owner: dict[str, Any]) -> dict[str, Any]:
    parameters = owner.get("parameters", {})
    _expect(isinstance(parameters, dict), "parameters is not a JSON object")
    _expect(
        not any(name.startswith("shared_memory") for name in parameters),
        "shared memory is not supported; send the tensor",
    )
    return dict(parameters)


def _parse_input(
    tensor: Any, binary: memoryview, shapes: Shapes
) -> tuple[str, list[int], memoryview | list[Any]]:
    """Return the name of an input, its shape, and its values: bytes, or a list of JSON."""
    _expect(isinstance(tensor, dict), "an input is not a JSON object")
    name = tensor.get("name")
    shape = tensor.get("shape")
    datatype = {IMAGES: "UINT8", ENCODED: "BYTES"}.get(name) if is_text(name) else None
    _expect(datatype is not None, f"there is no such input; expected {IMAGES} or {ENCODED}")
    _expect(tensor.get("datatype") == datatype, f"the datatype of {name} is not {datatype}")
    _expect(
        isinstance(shape, list) and all(map(is_count, shape)),
        f"the shape of {name} is not a list of whole numbers",
    )
    if name == IMAGES:
        fits = len(shape) == 4 and shape[3] == 3 and min(shape[1:]) > 0
        expected = "[N, height, width, 3]"
    else:
        fits = bool(shape) and shape[1:] in ([], [1])
        expected = "[N]"
    _expect(fits, f"the shape of {name} is {shape!s:.60}, expected {expected}")
    count = shape[0]
    _expect(
        1 <= count <= shapes.most_images,
        f"a request has 1 to {shapes.most_images} images, not {count}",
    )
    size = _get_parameters(tensor).get("binary_data_size")
    if size is None:
        values = tensor.get("data")
        _expect(isinstance(values, list), f"{name} has no data")
        _expect(not binary, "the body has bytes after the JSON that belong to no input")
        return str(name), shape, values
    _expect(
        is_count(size) and size == len(binary),
        f"binary_data_size is {size!r:.20}; {len(binary)} bytes were sent",
    )
    return str(name), shape, binary


def _parse_pixels(values: memoryview | list[Any], shape: list[int]) -> np.ndarray:
    if isinstance(values, memoryview):
        _expect(
            len(values) == math.prod(shape),
            f"{IMAGES} has {len(values)} bytes, expected {math.prod(shape)}",
        )
        return np.frombuffer(values, np.uint8).reshape(shape)
    try:
        pixels = np.array(values)
    except (ValueError, OverflowError):  # lists of different lengths
        raise BadRequest(f"the data of {IMAGES} are not numbers in lists of equal length") from None
    _expect(pixels.dtype.kind in "iu", f"the data of {IMAGES} are not whole numbers")
    _expect(
        pixels.shape in (tuple(shape), (math.prod(shape),)),
        f"{IMAGES} has {pixels.size} numbers, expected {math.prod(shape)}",
    )
    _expect(
        bool(((pixels >= 0) & (pixels <= 255)).all()),
        f"the data of {IMAGES} are not all from 0 to 255",
    )
    return pixels.astype(np.uint8).reshape(shape)


def _split_files(values: memoryview | list[Any], count: int) -> tuple[bytes, ...]:
    """Return the elements of a binary tensor of BYTES: each follows its length in four bytes, the
    lowest first."""
    if not isinstance(values, memoryview):
        raise BadRequest(
            f"{ENCODED} is JSON, which cannot hold files; send it in binary ({HEADER_LENGTH})"
        )
    files: list[bytes] = []
    start = 0
    for _ in range(count):
        _expect(start + 4 <= len(values), f"{ENCODED} ends before element {len(files)}")
        [length] = struct.unpack_from("<I", values, start)
        start += 4
        _expect(
            start + length <= len(values),
            f"element {len(files)} of {ENCODED} is longer than the tensor",
        )
        files.append(bytes(values[start : start + length]))
        start += length
    _expect(start == len(values), f"{ENCODED} has bytes after its {count} elements")
    return tuple(files)


def _parse_outputs(content: dict[str, Any], shapes: Shapes) -> tuple[Output, ...]:
    binary = _get_parameters(content).get("binary_data_output", False) is True
    outputs = content.get("outputs", [])
    _expect(isinstance(outputs, list), "outputs is not a list")
    if not outputs:
        return Output(CLASSES, binary), Output(PROBABILITIES, binary)
    _expect(all(isinstance(output, dict) for output in outputs), "an output is not a JSON object")
    names = [output.get("name") for output in outputs]
    are_known = all(is_text(name) and name in _DATATYPES for name in names)
    _expect(are_known, f"there is no such output; expected {', '.join(_DATATYPES)}")
    _expect(len(set(names)) == len(names), "an output is named twice")
    return tuple(_parse_output(output, binary, shapes) for output in outputs)


def _parse_output(output: dict[str, Any], binary: bool, shapes: Shapes) -> Output:
    parameters = _get_parameters(output)
    name = str(output["name"])
    best = parameters.get("classification", 0)
    _expect(
        best == 0 or (is_positive(best) and name != CLASSES),
        f"classification of {name} is not a number above 0",
    )
    return Output(name, parameters.get("binary_data", binary) is True, min(best, shapes.logits))


def encode_answer(
    request: InferRequest, model: str, tensors: Mapping[str, np.ndarray], labels: Sequence[str]
) -> tuple[list[bytes], int | None]:
    """Return the parts of an answer's body, and the length of its JSON if binary tensors follow it;
    otherwise None.

    `tensors` are `probabilities`, `logits`, float32 [N, logits], and `classes`, int64 [N, 1].
    `labels` are names of classes.
    """
    descriptions = []
    parts = []
    for output in request.outputs:
        values = tensors[output.name]
        about: dict[str, Any] = {
            "name": output.name,
            "datatype": _DATATYPES[output.name],
            "shape": list(values.shape),
        }
        if output.best:
            texts = _list_most_likely(values, output.best, labels)
            about |= {"datatype": "BYTES", "shape": [len(values), output.best]}
            encoded = [text.encode() for text in texts]
            data = b"".join(struct.pack("<I", len(text)) + text for text in encoded)
        else:
            texts = []
            data = values.tobytes()
        if output.binary:
            about["parameters"] = {"binary_data_size": len(data)}
            parts.append(data)
        else:
            about["data"] = texts or values.ravel().tolist()
        descriptions.append(about)
    identity = {} if request.id is None else {"id": request.id}
    head = {"model_name": model, "model_version": VERSION, **identity, "outputs": descriptions}
    text = json.dumps(head, allow_nan=False, separators=(",", ":")).encode()
    return [text, *parts], len(text) if parts else None


def _list_most_likely(values: np.ndarray, count: int, labels: Sequence[str]) -> list[str]:
    """Return the largest values of each image as Triton writes them: "VALUE:CLASS:NAME"; without a
    name "VALUE:CLASS"."""
    texts = []
    for row in values:
        for place in np.argsort(-row, kind="stable")[:count].tolist():
            name = f":{labels[place]}" if place < len(labels) else ""
            texts.append(f"{row[place]:f}:{place}{name}")
    return texts
