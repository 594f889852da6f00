"""The results for every image of a run's last evaluation, `validation.npz` in the run's folder, and
of its best one, `best-validation.npz`.

Each holds `step`, the `digest` of the index of the images, the `classes`, `labels`, and for each
kind of weights ("trained", "ema") the columns of `Scores` as `trained.losses` and so on. Row i is
sample i of the index, whichever rank evaluated it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.models.metrics import Scores
from lockstep.system.errors import CheckpointError
from lockstep.system.files import replacing
from lockstep.system.regular_files import RECORDS, open_regular

FILE = "validation.npz"
BEST_FILE = "best-validation.npz"
_COLUMNS = {
    "losses": np.float32,
    "ranks": np.int32,
    "predictions": np.int32,
    "confidences": np.float32,
}
DAMAGE = (ValueError, KeyError, TypeError)
"""Exceptions for files that are truncated, overwritten or of another program."""
_MOST_ARRAYS = 64


@dataclass(frozen=True)
class Results:
    """The scores of all validation images. Row i is sample i of the index."""

    step: int
    """Number of steps that were trained before the evaluation."""
    digest: str
    """Digest of the index of the images: `lockstep.data.index.Index.digest`."""
    scores: dict[str, Scores]
    """Scores of the "trained" weights, and of the "ema" weights if the run has them."""
    classes: tuple[str, ...] = ()
    """Names of the classes; empty in files of older versions."""


def write_results(folder: Path, results: Results, file_name: str = FILE) -> None:
    """Write the results into a run's folder. A reader never sees a partial file."""
    arrays = {}
    for weights, scores in results.scores.items():
        for name in _COLUMNS:
            arrays[f"{weights}.{name}"] = getattr(scores, name)
    labels = next(iter(results.scores.values())).labels
    with replacing(folder / file_name) as partial, partial.open("wb") as file:
        np.savez_compressed(
            file,
            step=results.step,
            digest=results.digest,
            classes=np.array(results.classes, str),
            labels=labels,
            **arrays,
        )


def read_records(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file of a run that has values for each image.

    Raises `OSError` or `ValueError` if it cannot be read or expands to more than the limit of
    records.
    """
    from lockstep.system.npz import NUMBERS, read_npz

    with open_regular(path, RECORDS) as file:
        most = RECORDS.most_bytes
        return read_npz(file, most_members=_MOST_ARRAYS, most_bytes=most, kinds=f"{NUMBERS}U")


def read_results(folder: Path, file_name: str = FILE) -> Results | None:
    """Return the results in a run's folder; None if it has none, for example because it was never
    evaluated.

    Raises `CheckpointError` if the file cannot be read.
    """
    path = folder / file_name
    try:
        arrays = read_records(path)
        labels = arrays["labels"]
        scores = {}
        for key in arrays:
            weights, _, column = key.partition(".")
            if column == "losses":
                columns = {name: arrays[f"{weights}.{name}"] for name in _COLUMNS}
                _check_column(labels, np.int32, labels.size)
                for name, kind in _COLUMNS.items():
                    _check_column(columns[name], kind, labels.size)
                likely = columns["confidences"]
                if (likely < 0).any() or (likely > 1.01).any():  # NaN is of a diverged run
                    raise ValueError("a confidence is not from 0 to 1")
                scores[weights] = Scores(labels=labels, **columns)
        step, digest = arrays["step"], arrays["digest"]
        names = arrays.get("classes", np.zeros(0, str))
        if (step.shape, digest.shape, names.ndim) != ((), (), 1) or step.dtype != np.int64:
            raise ValueError("step, digest or classes are of another shape or type")
        return Results(int(step), str(digest), scores, tuple(map(str, names.tolist())))
    except FileNotFoundError:
        return None
    except (OSError, *DAMAGE) as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); remove it to continue"
            " without it"
        ) from None


def _check_column(values: np.ndarray, kind: type, images: int) -> None:
    """Raise `ValueError` unless there is a number for each image, and no index is below 0."""
    if values.shape != (images,) or values.dtype != kind:
        raise ValueError(f"a column is not one {kind.__name__} for each label")
    if kind is np.int32 and values.min(initial=0) < 0:
        raise ValueError("an index is below 0")
