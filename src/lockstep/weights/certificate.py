"""The certificate of a conversion: source and target compute the same images, each in its own
framework.

The framework of a format runs in a separate process if it is installed; otherwise the reference
backend computes. The framework also reads the target with its own reader and must get what
Lockstep's reader gets: this finds mistakes that Lockstep's writer and reader share.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import cv2
import numpy as np
from safetensors.numpy import save_file

from lockstep import backends
from lockstep.data.decoding.augment import prepare_square
from lockstep.data.decoding.orientation import UPRIGHT
from lockstep.data.textures import PATTERNS, draw_texture
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.files import write_json
from lockstep.system.version import version
from lockstep.system.workers import carry_out
from lockstep.weights.calibration import compute_probabilities
from lockstep.weights.fingerprints import compute_fingerprints, hash_file, hash_files
from lockstep.weights.formats.common import Written
from lockstep.weights.opened_weights import LOCKSTEP, Weights
from lockstep.weights.original import compute_original, find_missing, rebuild_module
from lockstep.weights.preprocessing import read_evaluation
from lockstep.weights.target_formats import Target

BOUND = 1e-4
"""Logits may differ by this share of the largest logit. Backends in fp32 differ by less
(docs/explanation/numerics.md)."""
ROUNDING_BOUND = 0.2
"""Probabilities may differ by this much from those of a file that rounds, to half precision or to
integers. Intact models that ONNX Runtime quantised differed by 0.06."""
IMAGES = 8
REFERENCE = "reference"


class Comparison(TypedDict):
    """Two answers to the same photos."""

    by: str
    """What computed the other answer."""
    top1_agreement: float
    """Share of the photos whose most likely class is the same."""
    largest_difference: float
    """The largest difference of two probabilities."""


class Certificate(TypedDict):
    """The contents of a certificate."""

    compared: str
    """Whether the source was compared with the program that wrote it, in words."""
    lockstep: str
    source: str
    source_sha256: dict[str, str]
    """SHA-256 by file name."""
    target: str
    target_sha256: dict[str, str]
    model: str
    images: int
    engines: dict[str, str]
    """The backend and its framework's version that computed the "source" and the "target"."""
    original: Comparison | None
    """The source as Lockstep computes it and as the program that wrote it does; None if that was
    not compared."""
    read_by: str | None
    """The backend and version whose framework read the target itself, and the result; None if it is
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
    preprocessing_from: dict[str, str]
    """Where each field of the preprocessing comes from: "file", "certificate", "user" or
    "assumed"."""
    through_target: Comparison | None
    """The source and the target, each with its own preprocessing, if the target's program has
    one."""
    changes: list[str]
    """What was dropped, folded, invented or could not be carried over, with the reason."""


def certify(
    source: Weights,
    target: Weights,
    written: Written,
    format: Target,
    changes: Sequence[str],
    folder: Path,
) -> Certificate:
    """Compare weights and what was written from them, read back, on photos of several sizes; and
    the weights with what the program that wrote them computes.

    `written` has the files as they are on disk, and `folder` gets temporary ones. The source's
    preprocessing is used where the target's format cannot hold it. Raises `CheckpointError` if a
    backend fails, if the framework reads other arrays from the files than Lockstep, if the source's
    logits are not finite, or if the program that wrote the source computes something else.
    """
    recipes = _choose_recipes(source, target, format)
    with tempfile.TemporaryDirectory(prefix="certificate-", dir=folder.absolute()) as name:
        measured = _measure(source, target, written, format, recipes, Path(name))
    digests = {file.name: hash_file(file) for file in source.others}
    colours = {name: getattr(recipes["target"], name) for name in ("mean", "std")}
    record: Any = {
        "compared": measured.pop("compared"),
        "lockstep": version(),
        "source": source.source.name,
        "source_sha256": hash_files(source.source) | digests,
        "target": target.source.name,
        "target_sha256": {path.name: hash_file(path) for path in written.files},
        "model": str(source.recipe.fields()["model"]),
        "images": IMAGES,
        **measured,
        "tensors_equal": _count_equal(source.tensors, target.tensors),
        "tensors": len(source.tensors),
        "preprocessing": read_evaluation(source.recipe.replace(**colours)),
        "preprocessing_from": dict(source.preprocessing_from),
        "changes": list(changes),
    }
    return record


def _measure(
    source: Weights,
    target: Weights,
    written: Written,
    format: Target,
    recipes: Mapping[str, Recipe],
    folder: Path,
) -> Any:
    """Compute all parts and compare them; return the entries of the certificate about that."""
    own = {"source": find_backend(source.origin), "target": find_backend(target.origin)}
    if "through" in recipes:
        own["through"] = own["target"]
    photos = draw_photos(source.recipe)
    squares = read_squares(photos, source.recipe)
    for part, recipe in recipes.items():
        weights = source if part == "source" else target
        _write_part(folder, part, recipe, weights.tensors)
        shown = read_squares(photos, recipe) if part == "through" else squares
        np.save(folder / f"{part}.images.npy", shown)
    if own["target"] != REFERENCE:
        paths = [str(path.absolute()) for path in written.arrays]
        write_json(folder / "target.files.json", paths)
    versions = _compute_parts(folder, own)
    read_by = None
    if own["target"] != REFERENCE:
        read_by = _compare_readings(folder, versions["target"], format)
    logits = np.load(folder / "source.npy").astype(np.float64)
    others = np.load(folder / "target.npy").astype(np.float64)
    if not np.isfinite(logits).all():
        raise CheckpointError(
            f"{source.source} computes logits that are not finite, so a certificate is impossible;"
            " --inspect, in place of the target, shows the odd weights; --no-certificate converts"
            " them"
        )
    through = None
    if "through" in recipes:
        theirs = compute_probabilities(np.load(folder / "through.npy"))
        through = _compare(f"Lockstep's copy of {format.prepares}", logits, theirs)
    compared, original = _compare_with_original(source, squares, logits, folder / "original")
    differences = np.abs(others - logits) / (float(np.abs(logits).max()) or 1.0)
    return {
        "compared": compared,
        "engines": {part: versions[part] for part in ("source", "target")},
        "original": original,
        "read_by": read_by,
        "largest_difference": float(differences.max()),
        "mean_difference": float(differences.mean()),
        "top1_agreement": float((logits.argmax(1) == others.argmax(1)).mean()),
        "bound": BOUND,
        "holds": bool(differences.max() <= BOUND),
        "through_target": through,
    }


def _choose_recipes(source: Weights, target: Weights, format: Target) -> dict[str, Recipe]:
    """Return the recipe by which each part computes. That of the target has the source's
    preprocessing where its format cannot hold it; that of "through" has what the program that
    reads the target sets."""
    fields = source.recipe.fields()
    needed = ("eval_crop", "eval_resize", *format.missing_fields)
    recipes = {
        "source": source.recipe,
        "target": target.recipe.replace(**{name: fields[name] for name in needed}),
    }
    if format.prepares:
        changes = {name: getattr(target.recipe, name) for name in format.prepared_fields}
        recipes["through"] = source.recipe.replace(**changes)
    return recipes


def _compute_parts(folder: Path, own: Mapping[str, str]) -> dict[str, str]:
    """Compute the logits of all parts, given their backends; return who computed each."""
    versions: dict[str, str] = {}
    for backend in dict.fromkeys(own.values()):
        parts = [part for part, name in own.items() if name == backend]
        versions |= dict.fromkeys(parts, f"{backend} {_compute_logits(folder, backend, parts)}")
    return versions


def _compare(by: str, logits: np.ndarray, others: np.ndarray) -> Comparison:
    """Compare logits of the source with probabilities of another program."""
    own = compute_probabilities(logits)
    return {
        "by": by,
        "top1_agreement": float((own.argmax(1) == others.argmax(1)).mean()),
        "largest_difference": float(np.abs(own - others).max()),
    }


def _compare_with_original(
    source: Weights, squares: np.ndarray, logits: np.ndarray, folder: Path
) -> tuple[str, Comparison | None]:
    """Return in words how the source compares with what its program computes, and the comparison.
    Raises `CheckpointError` if they are not the same."""
    original = source.original or rebuild_module(source.origin, source.recipe, source.tensors)
    missing = "no program installed here can compute it"
    if source.origin == LOCKSTEP:
        return "Lockstep itself wrote the source", None
    if original is not None:
        missing = find_missing(original)
    if original is None or missing:
        return f"not compared with the program that wrote it: {missing}", None
    try:
        program, theirs = compute_original(original, squares, source.recipe, folder)
    except ValueError as error:
        return f"not compared with the program that wrote it: {error}", None
    comparison = _compare(program, logits, theirs)
    largest = comparison["largest_difference"]
    about = (
        f"{program} computes the source: {comparison['top1_agreement']:.0%} of {len(squares)} top-1"
        f" classes are equal, and probabilities differ by at most {largest:.1e}"
    )
    bound = BOUND
    if original.rounds:
        bound = ROUNDING_BOUND
        about += "; the file rounds numbers, and Lockstep computes in float32"
    if largest > bound:
        raise CheckpointError(
            f"{about}; expected at most {bound:g}: Lockstep does not compute {source.source} as the"
            " program that wrote it does. Nothing is written; --no-certificate writes it anyway"
        )
    return about, comparison


def _write_part(folder: Path, part: str, recipe: Recipe, tensors: Mapping[str, np.ndarray]) -> None:
    """Write weights and their recipe as `logits_process` reads them."""
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
    save_file(arrays, folder / f"{part}.safetensors")
    plain = recipe.replace(precision="fp32", quantisation="none", ema_decay=0.0, model=recipe.spec)
    write_json(folder / f"{part}.json", plain.fields())


def _compare_readings(folder: Path, backend: str, format: Target) -> str | None:
    """Return which framework read the target's files as Lockstep does; None if this version of it
    does not read them.

    Raises `CheckpointError` if it got other names or values.
    """
    readings: dict[str, dict[str, str] | None] = json.loads(
        (folder / "target.read.json").read_text(encoding="utf-8")
    )
    for place, theirs in readings.items():
        if theirs is None:
            return None
        ours = compute_fingerprints(format.read_arrays(Path(place)))
        names = sorted(ours.keys() | theirs.keys())
        unlike = [name for name in names if ours.get(name) != theirs.get(name)]
        if unlike:
            raise CheckpointError(
                f"{backend} reads {Path(place).name} differently from Lockstep: {len(unlike)} of"
                f" {len(ours)} values differ, such as {unlike[0]}; expected the same names and"
                " values. Nothing is written; --no-certificate writes it anyway"
            )
    return f"{backend}: equal"


def _count_equal(tensors: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> int:
    """Return the number of tensors that are equal to the last bit."""
    return sum(
        name in others and np.array_equal(value, others[name]) for name, value in tensors.items()
    )


def draw_images(size: int) -> np.ndarray:
    """Return the images that every certificate uses: uint8 [8, size, size, 3], textures and
    colours."""
    images = []
    for number, pattern in enumerate(list(PATTERNS)[:IMAGES]):
        image = draw_texture(pattern, number)
        images.append(cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR))
    return np.stack(images)


def draw_photos(recipe: Recipe) -> list[np.ndarray]:
    """Return photos, uint8 [H, W, 3]: of the crop's size, smaller, up to four times as large, wide
    and tall."""
    crop = recipe.eval_crop
    resize = recipe.eval_resize
    sizes = (
        (crop, crop),
        (resize, resize),
        (crop // 2 + 1, crop * 2 // 3),
        (4 * crop + 3, 3 * crop + 1),
        (resize + 7, 2 * resize + 1),
        (3 * crop, crop),
        (crop - 1, 2 * crop),
        (2 * resize + 5, resize + 9),
    )
    photos = []
    for number, (pattern, (height, width)) in enumerate(zip(PATTERNS, sizes, strict=False)):
        texture = draw_texture(pattern, number)
        # Repeated, a texture keeps details that a resize has to filter.
        times = (-(-height // texture.shape[0]), -(-width // texture.shape[1]), 1)
        photos.append(np.ascontiguousarray(np.tile(texture, times)[:height, :width]))
    return photos


def read_squares(photos: Sequence[np.ndarray], recipe: Recipe) -> np.ndarray:
    """Return what evaluation sees of photos: uint8 [N, S, S, 3]."""
    side = recipe.eval_crop
    squares = np.empty((len(photos), side, side, 3), np.uint8)
    for photo, square in zip(photos, squares, strict=True):
        prepare_square(photo, UPRIGHT, recipe, square)
    return squares


def find_backend(origin: str) -> str:
    """Return the backend of the framework that weights of an origin belong to, if it is installed;
    else the reference."""
    for name, framework in backends.FRAMEWORKS.items():
        if origin in framework.origins and backends.find_interpreter(name) is not None:
            return name
    return REFERENCE


def _compute_logits(folder: Path, backend: str, parts: list[str]) -> str:
    """Compute the logits of some weights, and return the version of the backend's framework."""
    python = backends.find_interpreter(backend) or Path(sys.executable)
    module = ("-P", "-m", "lockstep.weights.logits_process")
    command: list[str | Path] = [python, *module, folder, backend, *parts]
    ended = carry_out(command, folder, lambda done, total: None)
    if ended.code:
        raise CheckpointError(
            f"{backend} cannot compute the certificate: {ended.errors or 'it printed nothing'}. "
            "Without a certificate: --no-certificate"
        )
    return (folder / f"{backend}.txt").read_text(encoding="utf-8")
