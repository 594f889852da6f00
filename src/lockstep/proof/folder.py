"""Write a proof: probe photos, `proof.json` and `check.py` in a folder `proof` next to a model."""

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np

from lockstep import backends
from lockstep.backends import FRAMEWORKS, Engine, QuantisingEngine
from lockstep.proof import faults
from lockstep.proof.photos import PHOTOS, draw_photo
from lockstep.proof.record import take_log_softmax
from lockstep.proof.runtimes import check_program
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.files import write_text
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.system.strict_json import to_json
from lockstep.system.version import version

FOLDER = "proof"
FILE = "proof.json"
FORMAT = 1
REFERENCE = "reference"
_GRID = 8
_TELLING = 5
"""A mistake that all photos show is computed for this many of them, the first ones."""
_TELLING_OF_REFERENCE = 2
"""This many if the reference computes, which is slow."""
_BATCH = 16
_MOST_LOGITS = 1000
_COLUMNS = 300
"""Answers after a mistake have at most this many logits: a proof of 4000 classes is below 1 MB."""


@dataclass(frozen=True)
class Subject:
    """What a proof is about: a model and how it is deployed."""

    target: str
    """The name of its format."""
    precision: str
    recipe: Recipe
    tensors: Mapping[str, np.ndarray]
    classes: tuple[str, ...]
    takes: str
    """What it takes: "photos" of any size, or "squares"."""
    batch: int | None
    backend: str
    """The backend that computes the expected answers."""
    bound: float
    """Logits may differ by this share of the largest logit."""
    why: str
    """The reason of the bound, in words."""
    runtime: str | None = None
    """Name and version of the runtime that is installed here."""
    scales: Mapping[str, float] = field(default_factory=dict)
    run: Callable[[list[np.ndarray], np.ndarray], np.ndarray] | None = None
    """Returns the model's own logits, of photos and of the squares cut from them. If the model only
    resembles its weights, the proof expects them instead of the engine's."""

    @property
    def telling(self) -> int:
        """A mistake that all photos show is computed for this many of them, the first ones."""
        return _TELLING_OF_REFERENCE if self.backend == REFERENCE else _TELLING


def write_proof(folder: Path, subject: Subject) -> None:
    """Write the proof of a model into its folder, next to files that are complete."""
    target = folder / FOLDER
    (target / "photos").mkdir(parents=True)
    recipe = subject.recipe.replace(precision="fp32", ema_decay=0.0, dct_scaling=False)
    contents = []
    for number, photo in enumerate(PHOTOS):
        contents.append(draw_photo(number))
        (target / "photos" / photo.file).write_bytes(contents[number])
    decoded = [faults.decode(data, recipe) for data in contents]
    squares = np.stack([faults.cut(pixels, recipe) for pixels in decoded])
    probes = []
    for number, photo in enumerate(PHOTOS):
        probes.append(
            {
                "file": f"photos/{photo.file}",
                "what": photo.what,
                "sha256": hashlib.sha256(contents[number]).hexdigest(),
                "decoded": describe_pixels(decoded[number]),
                "seen": describe_pixels(squares[number])
                | _normalise_means(squares[number], recipe),
            }
        )
    expected, mistakes = _compute_answers(subject, recipe, contents, decoded, squares)
    record = {
        "format": FORMAT,
        "model": {
            "target": subject.target,
            "precision": subject.precision,
            "logits": recipe.logits,
            "classes": list(subject.classes),
            "files": hash_model(folder),
        },
        "versions": _list_versions(subject),
        "input": _describe_input(subject, recipe),
        "bounds": {"decoded": 2.0, "seen": 2.0, "logits": subject.bound, "why": subject.why},
        "probes": probes,
        "expected": _pack(expected, "float32"),
        "faults": _describe_faults(subject, expected, mistakes),
    }
    write_text(target / FILE, to_json(record) + "\n")
    write_text(target / "check.py", check_program(subject.target))


def hash_model(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a model, but not of its proof, by relative path."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != FOLDER:
            with open_regular(path, WEIGHTS) as file:
                digests[name.as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def describe_pixels(pixels: np.ndarray) -> dict[str, Any]:
    """Return the size of an image, a grid of 8 x 8 of its pixels, and the means of its colours."""
    height, width = pixels.shape[:2]
    places = (np.arange(_GRID) + 0.5) / _GRID
    rows = (places * height).astype(int)
    columns = (places * width).astype(int)
    return {
        "size": [height, width],
        "grid": pixels[np.ix_(rows, columns)].tolist(),
        "means": np.round(pixels.mean(axis=(0, 1)), 3).tolist(),
    }


def _normalise_means(square: np.ndarray, recipe: Recipe) -> dict[str, Any]:
    means = (square.mean(axis=(0, 1)) - np.array(recipe.mean)) / np.array(recipe.std)
    return {"normalised_means": np.round(means, 6).tolist()}


def _list_versions(subject: Subject) -> dict[str, str | None]:
    return {
        "lockstep": version(),
        "engine": f"{subject.backend} {FRAMEWORKS[subject.backend].version()}",
        "runtime": subject.runtime,
        "pillow": metadata.version("pillow"),
        "numpy": np.__version__,
    }


def _describe_input(subject: Subject, recipe: Recipe) -> dict[str, Any]:
    return {
        "takes": subject.takes,
        "side": recipe.eval_crop,
        "resize": recipe.eval_resize,
        "interpolation": recipe.interpolation,
        "antialias": recipe.eval_antialias,
        "mean": list(recipe.mean),
        "std": list(recipe.std),
        "exif": recipe.exif_orientation,
        "batch": subject.batch,
    }


def _pack(values: np.ndarray, dtype: str) -> dict[str, Any]:
    content = values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    return {"shape": list(values.shape), dtype: base64.b64encode(content).decode()}


Answers = dict[str, dict[int, np.ndarray]]
"""Logits after each mistake, by its name and the number of the probe."""


def _compute_answers(
    subject: Subject,
    recipe: Recipe,
    contents: list[bytes],
    decoded: list[np.ndarray],
    squares: np.ndarray,
) -> tuple[np.ndarray, Answers]:
    """Return the expected logits of all probes, and those after each mistake."""
    telling = squares[: subject.telling]
    changed = _change_squares(recipe, contents, decoded, squares, len(telling))
    shown = np.concatenate([squares, np.stack(list(changed.values()))])
    with _open_engine(subject, recipe) as engine:
        logits = _predict(engine, shown)
        expected = logits[: len(squares)]
        answers: Answers = {}
        for (name, number), row in zip(changed, logits[len(squares) :], strict=True):
            answers.setdefault(name, {})[number] = row
        for name, pixels in faults.list_scales(telling, recipe).items():
            answers[name] = dict(enumerate(_predict(engine, pixels)))
        if hasattr(engine, "predict_in_training"):
            with suppress(ValueError):  # a single pixel has no statistics
                rows = [engine.predict_in_training(square[None])[0] for square in telling]
                answers[faults.TRAINING] = dict(enumerate(rows))
    if subject.run is not None:
        own = subject.run(decoded, squares)
        shifts = own - expected
        expected = own
        for rows_of_fault in answers.values():
            for number, row in rows_of_fault.items():
                rows_of_fault[number] = row + shifts[number]
    for name, mistaken in faults.list_answers(expected, subject.classes).items():
        answers[name] = dict(enumerate(mistaken[: len(telling)]))
    return expected, answers


def _change_squares(
    recipe: Recipe,
    contents: list[bytes],
    decoded: list[np.ndarray],
    squares: np.ndarray,
    telling: int,
) -> dict[tuple[str, int], np.ndarray]:
    """Return the squares that differ after a mistake, by its name and the number of the probe."""
    changed = {}
    for number, (data, pixels) in enumerate(zip(contents, decoded, strict=True)):
        mistakes = {}
        for name, photo in faults.list_decodings(data, recipe).items():
            mistakes[name] = faults.cut(photo, recipe)
        if number < telling:
            mistakes |= faults.list_cuts(pixels, recipe)
        for name, square in mistakes.items():
            is_computed = number < telling or name in faults.OF_FEW
            if is_computed and not np.array_equal(square, squares[number]):
                changed[name, number] = square
    return changed


@contextmanager
def _open_engine(subject: Subject, recipe: Recipe) -> Iterator[Any]:
    """Yield the backend's engine in fp32, with the weights."""
    execution = Execution(backend=subject.backend, reference_dtype="float32", compile="off")
    backend = backends.load(subject.backend)
    with (
        closing(backend.world(execution)) as world,
        backend.engine(recipe, np.zeros(1), world, execution) as engine,
    ):
        engine.write(initial_state(recipe, dict(subject.tensors)))
        if subject.scales:
            cast(QuantisingEngine, engine).quantise(subject.scales)
        yield engine


def _predict(engine: Engine, squares: np.ndarray) -> np.ndarray:
    """Return the logits of squares, float64 [N, logits]."""
    batches = np.split(squares, range(_BATCH, len(squares), _BATCH))
    return np.concatenate(list(map(engine.predict, batches))).astype(np.float64)


def _differ(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of two answers' logarithms of probabilities."""
    return float(np.abs(take_log_softmax(a) - take_log_softmax(b)).max())


def _describe_faults(
    subject: Subject, expected: np.ndarray, mistakes: Answers
) -> list[dict[str, Any]]:
    """Return the mistakes that change answers by more than rounding does."""
    unit = subject.bound * max(float(np.abs(expected).max()), 0.1)
    kept: Answers = {}
    for name, answers in mistakes.items():
        rows = {}
        for number, row in answers.items():
            if not np.isfinite(row).all() or _differ(row, expected[number]) <= unit:
                continue
            rows[number] = row
        if rows:
            kept[name] = rows
    columns = np.arange(expected.shape[1])
    if len(columns) > _MOST_LOGITS:
        columns = np.sort(np.argsort(-expected.std(axis=0), kind="stable")[:_COLUMNS])
    described = []
    for name, rows in kept.items():
        numbers = sorted(rows)
        entry: dict[str, Any] = {
            "name": name,
            "advice": faults.ADVICE[name],
            "computed": len(expected) if name in faults.OF_FEW else subject.telling,
            "probes": numbers,
            "logits": _pack(np.stack([rows[n] for n in numbers])[:, columns], "float16"),
            "cannot_be_told_from": _find_doubles(name, kept, unit),
        }
        if len(columns) < expected.shape[1]:
            entry["columns"] = columns.tolist()
        described.append(entry)
    return described


def _find_doubles(name: str, mistakes: Answers, unit: float) -> list[str]:
    """Return the other mistakes that change the same probes in the same way."""
    doubles = []
    for other, rows in mistakes.items():
        if other != name and rows.keys() == mistakes[name].keys():
            differences = [_differ(rows[n], mistakes[name][n]) for n in rows]
            if max(differences) <= 2 * unit:
                doubles.append(other)
    return doubles
