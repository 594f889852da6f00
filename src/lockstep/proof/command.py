"""The command of `proof/check.py`: it asks the model, a server or the user's own function for
answers.

Its source is a part of `proof/check.py`, like those of `record.py` and `diagnosis.py`.
"""

import argparse
import importlib
import json
import os
import runpy
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.proof.diagnosis import Comparison, judge, read_answers
from lockstep.proof.record import (
    CannotCheck,
    Proof,
    find_changes,
    measure_pixels,
    read_photo,
    read_proof,
)

Answer = Callable[[np.ndarray], Any]
"""Returns a model's answers for inputs: probabilities or logits [N, logits]."""
Prepare = Callable[[np.ndarray], np.ndarray]
"""Returns a model's input for a photo, uint8 [H, W, 3]: a batch of one."""
Read = Callable[[Path], np.ndarray]
"""Returns the pixels of a photo, uint8 RGB [H, W, 3]."""
_MOST_ANSWERED = 2**26
_SECONDS = 120
_OF_LOGITS = ("timm", "transformers")
"""The formats whose models return logits."""


def load_package(module: str, distributions: str = "") -> Any:
    """Return a module. Raises `CannotCheck` if it is missing; `distributions` are what to install
    if it has a different name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"pip install {distributions or module}"
        raise CannotCheck(f"{module} is missing: {install} ({error})") from None


def take_photo(pixels: np.ndarray) -> np.ndarray:
    """Return a photo as a batch of one, for a model that takes photos."""
    return pixels[None]


def load_preparation(folder: Path) -> Prepare:
    """Return `prepare` of `preprocessing.py` next to a model, which makes squares of photos."""
    path = folder / "preprocessing.py"
    if not path.is_file():
        raise CannotCheck(f"{path} is missing; expected the program that turns photos into squares")
    prepare: Prepare = runpy.run_path(str(path))["prepare"]
    return prepare


def check_model(
    proof: Proof,
    prepare: Prepare,
    answer: Answer,
    read: Read | None = None,
    *,
    must_normalise: bool = False,
) -> tuple[list[str], int]:
    """Ask a model for its answers to all photos, one by one and those of one size together.

    Args:
        proof: The photos and what is expected.
        prepare: Turns a photo into the model's input.
        answer: Returns the model's answers for inputs.
        read: Decodes a photo; by default with Pillow.
        must_normalise: Whether answers must be probabilities.

    Returns:
        The lines to print, and the exit code (`diagnosis.judge`).
    """
    about = proof.document["input"]
    inputs = []
    pixels: dict[str, list[float]] = {"decoded": []}
    for number, probe in enumerate(proof.probes):
        path = proof.path(number)
        photo = read(path) if read else read_photo(path, turns=about["exif"])
        pixels["decoded"].append(measure_pixels(photo, probe["decoded"]))
        inputs.append(prepare(photo))
        if prepare is not take_photo:
            square = inputs[-1][0]
            if square.dtype != np.uint8:
                square = square.transpose(1, 2, 0) * about["std"] + about["mean"]
            pixels.setdefault("seen", []).append(measure_pixels(square, probe["seen"]))
    rows = [_ask(answer, np.repeat(photo, about["batch"] or 1, axis=0)) for photo in inputs]
    if all(isinstance(row, Exception) for row in rows):
        raise rows[0]
    rows = [row if isinstance(row, Exception) else row[0] for row in rows]
    comparison = Comparison(proof, read_answers(proof, rows))
    lines, code = judge(comparison, pixels, _compare_batches(proof, inputs, rows, answer))
    if comparison.answers.are_logits and must_normalise:
        lines.append("Cause: the softmax is missing; the model returns logits, not probabilities")
        code = 1
    return lines, code


def _ask(function: Callable[..., Any], argument: Any) -> Any:
    """Return the answer of a model, or the exception that it raises."""
    try:
        answer = function(argument)
        return np.asarray(answer, np.float64) if isinstance(argument, np.ndarray) else answer
    except Exception as error:
        return error


def _compare_batches(
    proof: Proof, inputs: Sequence[np.ndarray], rows: Sequence[Any], answer: Answer
) -> list[str]:
    """Return sentences on photos whose answers in a batch differ from those one by one. A batch
    that is refused is left out: some servers take single photos."""
    batches: dict[tuple[int, ...], list[int]] = {}
    for number, prepared in enumerate(inputs):
        batches.setdefault(prepared.shape, []).append(number)
    answers = list(rows)
    sentences = []
    for numbers in batches.values():
        size = proof.document["input"]["batch"] or len(numbers)
        for start in range(0, len(numbers) if min(size, len(numbers)) > 1 else 0, size):
            places = (numbers[start : start + size] * size)[:size]
            together = _ask(answer, np.concatenate([inputs[place] for place in places]))
            if isinstance(together, Exception):
                continue
            if len(together) == len(places):
                for place, row in zip(places, together, strict=True):
                    answers[place] = row
            else:
                sentences.append(f"a batch of {len(places)} photos gets {len(together)} answers")
    alone = read_answers(proof, rows).logs
    for number, logs in enumerate(read_answers(proof, answers).logs):
        difference = float(np.abs(logs - alone[number]).max()) / proof.unit
        bound = 2 * proof.document["bounds"]["logits"]
        if np.isfinite(alone[number]).all() and not difference <= bound:
            sentences.append(
                f"{proof.name(number)}: in a batch with other photos, its logits differ by"
                f" {difference:.2g} of the largest from those of the photo alone"
            )
    return sentences


def check_predictor(proof: Proof, name: str) -> tuple[list[str], int]:
    """Compare the answers of a user's function, `module:function`, from the path of a photo to
    probabilities. The module may be in the current folder."""
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        function: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
    except Exception as error:
        raise CannotCheck(
            f"{name} cannot be imported ({type(error).__name__}: {error}); expected MODULE:FUNCTION"
            " in the current folder or in an installed package"
        ) from error
    rows = [_ask(function, str(proof.path(number))) for number in range(len(proof.probes))]
    return judge(Comparison(proof, read_answers(proof, rows)), {})


class _Straight(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: keys of a request are for its own server."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


class Server:
    """A model behind the Open Inference Protocol, such as Triton's or that of `lockstep serve`."""

    def __init__(self, url: str, headers: Sequence[str]) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError("it is not http:// or https://")
        self._url = url.rstrip("/")
        self._headers = {}
        for header in headers:
            name, _, value = header.partition(":")
            self._headers[name.strip()] = value.strip()
        self._opener = urllib.request.build_opener(_Straight)
        about = json.loads(self._request(self._url)[0])
        root = self._url.split("/v2/")[0]
        self._is_binary = "binary_tensor_data" in json.loads(self._request(f"{root}/v2")[0]).get(
            "extensions", []
        )
        self.inputs = {tensor["name"]: tensor["shape"] for tensor in about["inputs"]}
        self._input = next(name for name in self.inputs if name != "encoded")
        self.takes_photos = self.inputs[self._input][-3] == -1
        self.output = next(
            name
            for name in ("probabilities", "logits", about["outputs"][-1]["name"])
            if name in [tensor["name"] for tensor in about["outputs"]]
        )

    def answer(self, images: np.ndarray) -> np.ndarray:
        """Return the answers to images, uint8 [N, H, W, 3]."""
        return self._infer(self._input, "UINT8", list(images.shape), images.tobytes(), images)

    def answer_file(self, path: str) -> np.ndarray:
        """Return the answer to an encoded photo, which the server decodes."""
        data = Path(path).read_bytes()
        content = len(data).to_bytes(4, "little") + data
        return self._infer("encoded", "BYTES", [1], content, None)[0]

    def _infer(
        self, name: str, datatype: str, shape: list[int], content: bytes, values: Any
    ) -> np.ndarray:
        tensor: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
        output: dict[str, Any] = {"name": self.output}
        if self._is_binary:
            tensor["parameters"] = {"binary_data_size": len(content)}
            output["parameters"] = {"binary_data": True}
        else:
            tensor["data"] = values.ravel().tolist()
            content = b""
        request = {"inputs": [tensor], "outputs": [output]}
        text = json.dumps(request, allow_nan=False).encode()
        headers = {"Content-Type": "application/json"}
        if content:
            headers["Content-Type"] = "application/octet-stream"
            headers["Inference-Header-Content-Length"] = str(len(text))
        body, length = self._request(f"{self._url}/infer", text + content, headers)
        answer = json.loads(body[:length])["outputs"][0]
        if "data" in answer:
            return np.array(answer["data"], np.float64).reshape(answer["shape"])
        dtype = {"FP32": "<f4", "FP16": "<f2", "FP64": "<f8"}[answer["datatype"]]
        return np.frombuffer(body[length:], dtype).astype(np.float64).reshape(answer["shape"])

    def _request(
        self, url: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[bytes, int]:
        """Return the body of an answer, and the length of its part in JSON."""
        request = urllib.request.Request(url, body, self._headers | (headers or {}))
        try:
            with self._opener.open(request, timeout=_SECONDS) as response:
                content = response.read(_MOST_ANSWERED)
                length = response.headers.get("Inference-Header-Content-Length")
                return content, len(content) if length is None else int(length)
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            raise OSError(f"{url} answers {error.code} {error.reason}: {text}") from None


def check_server(proof: Proof, url: str, headers: Sequence[str]) -> tuple[list[str], int]:
    """Compare the answers of a server to photos that are decoded here, and to files that it
    decodes, if it does."""
    try:
        server = Server(url, headers)
    except (OSError, ValueError, LookupError, StopIteration) as error:
        raise CannotCheck(
            f"{url} does not answer as a model of the Open Inference Protocol ({error}); expected"
            " an address such as http://localhost:8000/v2/models/NAME, with --header for keys"
        ) from None
    prepare: Prepare = take_photo
    if not server.takes_photos:
        prepare = load_preparation(proof.folder.parent)
    must_normalise = server.output == "probabilities"
    lines, code = check_model(proof, prepare, server.answer, must_normalise=must_normalise)
    if "encoded" in server.inputs:
        paths = [str(proof.path(number)) for number in range(len(proof.probes))]
        rows = [_ask(server.answer_file, path) for path in paths]
        others, its_code = judge(Comparison(proof, read_answers(proof, rows)), {})
        lines += ["Files that the server decodes:", *others]
        code = max(code, its_code)
    return lines, code


def main(open_model: Callable[[Path], tuple[Prepare, Answer]]) -> int:
    """Run the command, and return its exit code: 0 if all is right, 1 if something differs, 2 if
    nothing can be compared. `open_model` opens the model in a folder in its own runtime."""
    parser = argparse.ArgumentParser(description="Compare a deployed model with proof.json.")
    parser.add_argument("--url", help="a server's model: http://HOST:PORT/v2/models/NAME")
    parser.add_argument("--header", action="append", default=[], help="such as 'api-key: KEY'")
    parser.add_argument("--predictor", help="your function, MODULE:FUNCTION: path to probabilities")
    chosen = parser.parse_args()
    folder = Path(__file__).resolve().parent
    code = 2
    try:
        proof = read_proof(folder)
        if chosen.url:
            lines, code = check_server(proof, chosen.url, chosen.header)
        elif chosen.predictor:
            lines, code = check_predictor(proof, chosen.predictor)
        else:
            changes = find_changes(proof, folder.parent)
            show(changes)
            must_normalise = proof.document["model"]["target"] not in _OF_LOGITS
            prepare, answer = open_model(folder.parent)
            lines, code = check_model(proof, prepare, answer, must_normalise=must_normalise)
            code = 1 if changes else code
    except CannotCheck as error:
        lines = [str(error)]
    except Exception as error:  # runtimes' errors have no common base
        lines = [f"the model does not run here: {type(error).__name__}: {error}"]
    show(lines)
    return code


def show(lines: Sequence[str]) -> None:
    """Print lines without control characters, which names in a file could have."""
    for line in lines:
        shown = "".join(c if c.isprintable() else "?" for c in line.replace("\n", " "))
        sys.stdout.write(f"{shown}\n")
