"""Compare a model's answers to the probe photos of a proof with those that are expected, and name
the fault that explains a difference.

It needs NumPy and Pillow, but not Lockstep: its source is a part of `proof/check.py`
(`lockstep.proof.runtimes.write_check`).
"""

import base64
import hashlib
import json
import math
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

PROOF = "proof.json"
_GRID = 8
_LARGEST_LOGIT = 0.1
"""Differences are a share of at least this logit."""
_MOST_BYTES = 2**24
_MOST_PIXELS = 2**24
_FEWEST_PROBES = 8
_MOST_PROBES = 64
_LARGEST_BOUND = 0.3
"""The bound of int8 after training."""
_MOST_LOGITS = 2**18
_MOST_BATCH = 1024
_DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading unexpected JSON raises."""
LEAST = 1e-30
"""Smaller probabilities are replaced by this one."""


class CannotCheck(Exception):
    """The check cannot run: a package or a file is missing, or `proof.json` is damaged."""


@dataclass(frozen=True)
class Fault:
    """What a model with a known fault would answer."""

    name: str
    advice: str
    probes: tuple[int, ...]
    """The photos whose answers it changes."""
    logs: np.ndarray
    """Logarithms of probabilities for these photos: float64 [photos, columns]."""
    columns: np.ndarray
    """The classes that it has answers for."""
    computed: int
    """It was computed for this many of the photos, the first ones."""
    twins: tuple[str, ...]
    """Names of faults with the same answers."""


@dataclass(frozen=True)
class Proof:
    """The content of a folder `proof`."""

    folder: Path
    document: Mapping[str, Any]
    classes: tuple[str, ...]
    logits: np.ndarray
    """The expected ones: float64 [photos, logits]."""
    faults: tuple[Fault, ...]

    @property
    def probes(self) -> Sequence[Mapping[str, Any]]:
        """The photos, as `proof.json` describes them."""
        return self.document["probes"]

    @property
    def logs(self) -> np.ndarray:
        """Logarithms of the expected probabilities."""
        return take_log_softmax(self.logits)

    @property
    def unit(self) -> float:
        """The logit that differences are a share of."""
        return max(float(np.abs(self.logits).max()), _LARGEST_LOGIT)

    def path(self, probe: int) -> Path:
        """Return the file of a photo."""
        return self.folder / self.probes[probe]["file"]

    def name(self, probe: int) -> str:
        """Return a photo's file and what it is."""
        return f"{self.probes[probe]['file']} ({self.probes[probe]['what']})"

    def name_class(self, number: int) -> str:
        """Return the name of a class; its number if it has none."""
        return self.classes[number] if number < len(self.classes) else str(number)


def read_proof(folder: Path) -> Proof:
    """Return what a folder `proof` holds.

    Raises:
        CannotCheck: A file is missing, damaged, or not what Lockstep writes.
    """
    try:
        text = read_file(folder, PROOF, _MOST_BYTES)
        document = json.loads(text, parse_constant=_refuse_constant)
        proof = _parse(folder, document)
        for number, probe in enumerate(proof.probes):
            data = read_file(folder, probe["file"], _MOST_BYTES)
            _require(probe["sha256"] == hashlib.sha256(data).hexdigest(), proof.name(number))
    except OSError as error:
        raise CannotCheck(f"{error}; expected the folder that lockstep export wrote") from None
    except _DAMAGED as error:
        raise CannotCheck(
            f"{folder / PROOF} is not what lockstep export writes ({error!s:.200}); export the"
            " model again"
        ) from None
    spread = proof.logs - proof.logs[0]
    if float(np.abs(spread).max()) <= 2 * proof.document["bounds"]["logits"] * proof.unit:
        raise CannotCheck(
            "the model gives all photos the same answer, so a comparison proves nothing"
        )
    return proof


def read_file(folder: Path, name: str, most: int) -> bytes:
    """Return the content of a regular file in a folder, with no more than `most` bytes.

    Raises `OSError` if there is none, also if a link leads to it, and `ValueError` for a name that
    leads out of the folder.
    """
    path = folder
    for part in name.split("/"):
        _require(part not in ("", ".", "..") and not re.search(r"[\\:\0]", part), f"file {name!r}")
        path = path / part
        if stat.S_ISLNK(path.lstat().st_mode):
            raise OSError(f"{path} is a link")
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        raise OSError(f"{path} is not a file of at most {most} bytes")
    return path.read_bytes()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _parse(folder: Path, document: Any) -> Proof:
    """Return what `proof.json` says. Raises `LookupError`, `TypeError` or `ValueError`."""
    _require(document["format"] == 1, "format is not 1")
    model = document["model"]
    count = len(document["probes"])
    logits = model["logits"]
    _require(type(logits) is int and 0 < logits <= _MOST_LOGITS, "logits")
    _require(_FEWEST_PROBES <= count <= _MOST_PROBES, "probes")
    about = document["input"]
    batch = about["batch"]
    _require(about["takes"] in ("photos", "squares") and type(about["exif"]) is bool, "input")
    _require(batch is None or (type(batch) is int and 0 < batch <= _MOST_BATCH), "batch")
    _require(np.shape(about["mean"]) == np.shape(about["std"]) == (3,), "mean or std")
    texts = [model["target"], model["precision"], document["bounds"]["why"], *model["files"]]
    texts += [*model["files"].values(), *model["classes"]]
    numbers = [document["bounds"][name] for name in ("decoded", "seen", "logits")]
    numbers += [*about["mean"], *about["std"]]
    for probe in document["probes"]:
        texts += [probe["file"], probe["what"]]
        for stage in ("decoded", "seen"):
            for name, shape in (("size", (2,)), ("grid", (_GRID, _GRID, 3)), ("means", (3,))):
                _require(np.shape(probe[stage][name]) == shape, f"{name} of {probe['file']!r:.80}")
                numbers += np.ravel(probe[stage][name]).tolist()
    _require(all(isinstance(text, str) for text in texts), "a value is not a string")
    _require(
        all(type(n) in (int, float) and math.isfinite(n) for n in numbers),
        ("a value is not a finite number"),
    )
    _require(len(model["classes"]) <= logits, "classes")
    bounds = document["bounds"]
    is_strict = bounds["logits"] <= _LARGEST_BOUND and max(bounds["decoded"], bounds["seen"]) <= 8
    _require(is_strict, "bounds are too loose")
    expected = _unpack(document["expected"], "float32", (count, logits))
    faults = tuple(_parse_fault(entry, count, logits) for entry in document["faults"])
    return Proof(folder, document, tuple(model["classes"]), expected, faults)


def _parse_fault(entry: Any, count: int, logits: int) -> Fault:
    probes = tuple(map(int, entry["probes"]))
    columns = np.array(entry.get("columns", range(logits)), np.int64)
    _require(len(set(probes) & set(range(count))) == len(probes) > 0, "probes of a fault")
    _require(columns.ndim == 1 and columns.min() >= 0 and columns.max() < logits, "columns")
    logs = take_log_softmax(_unpack(entry["logits"], "float16", (len(probes), len(columns))))
    texts = [entry["name"], entry["advice"], *entry["cannot_be_told_from"]]
    _require(all(isinstance(text, str) for text in texts), "a fault")
    computed = int(entry["computed"])
    return Fault(texts[0], texts[1], probes, logs, columns, computed, tuple(texts[2:]))


def _unpack(entry: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers of base64, float64. Raises `ValueError` unless they are finite and have this
    shape."""
    content = base64.b64decode(entry[dtype], validate=True)
    values = np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).astype(np.float64)
    _require(values.size == math.prod(shape) and bool(np.isfinite(values).all()), f"{dtype}")
    return values.reshape(shape)


def take_log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return logarithms of the probabilities of logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return np.maximum(logs, math.log(LEAST))


def find_changes(proof: Proof, model: Path) -> list[str]:
    """Return sentences on files of a model that are missing or have changed since its export."""
    changes = []
    for name, expected in proof.document["model"]["files"].items():
        try:
            digest = hashlib.sha256(read_file(model, name, sys.maxsize)).hexdigest()
        except (OSError, ValueError) as error:
            changes.append(f"{name} cannot be read: {error}")
            continue
        if digest != expected:
            changes.append(f"{name} has changed since the export: its SHA-256 differs")
    return changes


def read_photo(path: Path, *, turns: bool) -> np.ndarray:
    """Return the pixels of a photo, uint8 RGB [H, W, 3]; with `turns`, upright by its EXIF
    orientation."""
    with Image.open(path, formats=("JPEG", "PNG")) as image:
        if image.width * image.height > _MOST_PIXELS:
            raise CannotCheck(f"{path} has more than {_MOST_PIXELS} pixels")
        upright = ImageOps.exif_transpose(image) if turns else image
        if upright.mode.startswith("I"):  # 16 bits of grey
            grey = np.clip(np.asarray(upright), 0, 65535).astype(np.uint32)
            upright = Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8))
        return np.array(upright.convert("RGB"))


def measure_pixels(pixels: np.ndarray, expected: Mapping[str, Any]) -> float:
    """Return by how many levels of 255 pixels [H, W, 3] differ: at a grid of places, or in the
    means of the colours; infinity for another size."""
    height, width = pixels.shape[:2]
    if [height, width] != list(expected["size"]):
        return math.inf
    rows = (2 * np.arange(_GRID) + 1) * height // (2 * _GRID)
    columns = (2 * np.arange(_GRID) + 1) * width // (2 * _GRID)
    grid = np.abs(pixels[rows][:, columns].astype(np.float64) - expected["grid"])
    means = np.abs(pixels.mean(axis=(0, 1), dtype=np.float64) - expected["means"])
    return float(max(grid.max(), means.max()))
