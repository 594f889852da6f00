"""The certificate of a conversion: source and target compute the same images, each in its own
framework.

The framework of a format runs in a separate process if it is installed; otherwise the reference
engine computes. There it also reads the target with its own reader. What it gets must be what
Lockstep's reader gets, so that a mistake that Lockstep's writer and reader share is seen.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypedDict

import cv2
import numpy as np
from safetensors.numpy import save_file

from lockstep import backends
from lockstep.data.textures import PATTERNS, draw_texture
from lockstep.models.architectures import model_spec
from lockstep.system.errors import CheckpointError
from lockstep.system.version import version
from lockstep.system.workers import carry_out
from lockstep.weights.fingerprints import compute_fingerprints, hash_file, hash_files
from lockstep.weights.formats.common import Written
from lockstep.weights.opened_weights import Weights
from lockstep.weights.preprocessing import read_evaluation

BOUND = 1e-4
"""Logits may differ by this share of the largest logit. Engines in fp32 differ by less
(docs/numerics.md)."""
IMAGES = 8
REFERENCE = "reference"


class Certificate(TypedDict):
    """The contents of a certificate."""

    lockstep: str
    source: str
    source_sha256: dict[str, str]
    """SHA-256 by file name."""
    target: str
    target_sha256: dict[str, str]
    model: str
    images: int
    engines: dict[str, str]
    """The engine and its framework's version that computed the "source" and the "target"."""
    read_by: str | None
    """The engine and version whose framework read the target itself, and the result; None if it is
    not installed."""
    largest_difference: float
    """The largest difference of two logits, as a share of the largest logit of the source."""
    mean_difference: float
    """The mean difference, as a share of the same."""
    top1_agreement: float
    """Share of the images whose most likely class is the same."""
    bound: float
    holds: bool
    tensors_equal: int
    """Number of tensors that are equal to the last bit."""
    tensors: int
    preprocessing: dict[str, Any]
    """How images are prepared for the target: the fields
    `lockstep.weights.preprocessing.SETTABLE`."""
    changes: list[str]
    """What was dropped, folded, invented or could not be carried over, with the reason."""


Reader = Callable[[Path], Any]
"""Lockstep's reader of a file's arrays, as they are stored: dicts and lists of arrays and plain
values."""


def certify(
    source: Weights,
    target: Weights,
    written: Written,
    read: Reader,
    changes: Sequence[str],
    unsaid: Collection[str],
) -> Certificate:
    """Compare the logits of weights and of what was written from them, read back.

    `written` has the files as they are on disk. `read` reads those that hold arrays, for a
    comparison with the framework's own reader. `unsaid` are the fields of the recipe that the
    target's format cannot hold; the source's are used. Raises `CheckpointError` if an engine fails,
    if the framework reads the files otherwise, or if the source's logits are not finite.
    """
    recipe = target.recipe.replace(
        **{name: source.recipe.fields()[name] for name in ("eval_crop", "eval_resize", *unsaid)}
    )
    by_name = {"source": (source.recipe, source.tensors), "target": (recipe, target.tensors)}
    engines = {"source": own_engine(source.origin), "target": own_engine(target.origin)}
    with tempfile.TemporaryDirectory(prefix="lockstep-certificate-") as name:
        folder = Path(name)
        np.save(folder / "images.npy", images(source.recipe.eval_crop))
        for part, (used, tensors) in by_name.items():
            save_file(
                {key: np.ascontiguousarray(value, np.float32) for key, value in tensors.items()},
                folder / f"{part}.safetensors",
            )
            plain = used.replace(
                precision="fp32", quantisation="none", ema_decay=0.0, model=model_spec(used.model)
            )
            (folder / f"{part}.json").write_text(
                json.dumps(plain.fields(), allow_nan=False), encoding="utf-8"
            )
        if engines["target"] != REFERENCE:
            (folder / "target.files.json").write_text(
                json.dumps(_paths(written), allow_nan=False), encoding="utf-8"
            )
        versions = {
            engine: _run(folder, engine, [part for part, own in engines.items() if own == engine])
            for engine in dict.fromkeys(engines.values())
        }
        own = f"{engines['target']} {versions[engines['target']]}"
        read_by = _read_by(folder, own, written, read) if engines["target"] != REFERENCE else None
        logits = {part: np.load(folder / f"{part}.npy").astype(np.float64) for part in by_name}
    if not np.isfinite(logits["source"]).all():
        raise CheckpointError(
            f"{source.source} computes logits that are not finite, so there can be no certificate;"
            " lockstep convert --inspect shows which weights are odd, and --no-certificate"
            " converts them"
        )
    largest = float(np.abs(logits["source"]).max())
    differences = np.abs(logits["target"] - logits["source"]) / (largest or 1.0)
    found = float(differences.max())
    return {
        "lockstep": version(),
        "source": source.source.name,
        "source_sha256": (
            hash_files(source.source) | {file.name: hash_file(file) for file in source.others}
        ),
        "target": target.source.name,
        "target_sha256": {path.name: hash_file(path) for path in written.files},
        "model": str(source.recipe.fields()["model"]),
        "images": IMAGES,
        "engines": {part: f"{engine} {versions[engine]}" for part, engine in engines.items()},
        "read_by": read_by,
        "largest_difference": found,
        "mean_difference": float(differences.mean()),
        "top1_agreement": float((logits["source"].argmax(1) == logits["target"].argmax(1)).mean()),
        "bound": BOUND,
        "holds": bool(found <= BOUND),
        "tensors_equal": sum(
            _equal(value, target.tensors.get(key)) for key, value in source.tensors.items()
        ),
        "tensors": len(source.tensors),
        "preprocessing": read_evaluation(source.recipe.replace(mean=recipe.mean, std=recipe.std)),
        "changes": list(changes),
    }


def _paths(written: Written) -> list[str]:
    return [str(path.absolute()) for path in written.arrays]


def _read_by(folder: Path, own: str, written: Written, read: Reader) -> str | None:
    """Return which framework read the target's files as Lockstep does; None if this version of it
    does not read them.

    Raises `CheckpointError` if it got other names or values.
    """
    theirs: dict[str, dict[str, str] | None] = json.loads(
        (folder / "target.read.json").read_text(encoding="utf-8")
    )
    for place, found in theirs.items():
        if found is None:
            return None
        ours = compute_fingerprints(read(Path(place)))
        unlike = sorted(
            name for name in ours.keys() | found.keys() if ours.get(name) != found.get(name)
        )
        if unlike:
            raise CheckpointError(
                f"{own} reads {Path(place).name} otherwise than Lockstep: {len(unlike)} of"
                f" {len(ours)} values differ, such as {unlike[0]}; expected the same names and"
                " values. Nothing is written; --no-certificate writes it anyway"
            )
    return f"{own}: equal"


def _equal(value: np.ndarray, other: np.ndarray | None) -> bool:
    return other is not None and np.array_equal(value, other)


def images(size: int) -> np.ndarray:
    """Return the images that every certificate uses: uint8 [8, size, size, 3], textures and
    colours."""
    drawn = [draw_texture(kind, number) for number, kind in enumerate(list(PATTERNS)[:IMAGES])]
    return np.stack(
        [cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR) for image in drawn]
    )


def own_engine(origin: str) -> str:
    """Return the engine of the framework that weights of an origin belong to, if it is installed;
    else the reference."""
    for name, framework in backends.FRAMEWORKS.items():
        if origin in framework.origins and backends.find_interpreter(name) is not None:
            return name
    return REFERENCE


def _run(folder: Path, engine: str, parts: list[str]) -> str:
    """Compute the logits of some weights, and return the version of the engine's framework."""
    python = backends.find_interpreter(engine) or Path(sys.executable)
    command: list[str | Path] = [
        python,
        "-P",
        "-m",
        "lockstep.weights.logits_process",
        folder,
        engine,
        *parts,
    ]
    ended = carry_out(command, folder, lambda done, total: None)
    if ended.code:
        raise CheckpointError(
            f"{engine} cannot compute the certificate: {ended.said or 'it printed nothing'}. "
            "Without a certificate: --no-certificate"
        )
    return (folder / f"{engine}.txt").read_text(encoding="utf-8")
