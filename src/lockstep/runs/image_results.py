"""What the last evaluation of a run found for every image: `validation.npz` in the run's folder.

`step`, and `digest` of the index of the images; `labels`; and for each evaluated weights ("trained", "ema") the columns of
`Scores` as `trained.losses` and so on. Row i is sample i of the index, whichever rank looked at it.
"""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.models.metrics import Scores
from lockstep.system.errors import CheckpointError
from lockstep.system.files import replacing

FILE = "validation.npz"
_COLUMNS = ("losses", "ranks", "predictions", "confidences")
_DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What NumPy and zipfile raise for files that are cut off or overwritten."""


@dataclass(frozen=True)
class Results:
    """The scores of all validation images, row i being sample i of the index."""

    step: int
    """Steps trained before."""
    digest: str
    """Of the index of the images: `lockstep.data.index.Index.digest`."""
    scores: dict[str, Scores]
    """By weights: "trained", and "ema" if the run has them."""


def write_results(folder: Path, results: Results) -> None:
    """Write the results into a run's folder so that they are never seen half-written."""
    arrays = {f"{weights}.{name}": getattr(scores, name) for weights, scores in results.scores.items() for name in _COLUMNS}
    labels = next(iter(results.scores.values())).labels
    with replacing(folder / FILE) as partial, partial.open("wb") as file:
        np.savez_compressed(file, step=results.step, digest=results.digest, labels=labels, **arrays)


def read_results(folder: Path) -> Results | None:
    """Return the results in a run's folder; None if it has none, as of a run that is not finished.

    Raises `CheckpointError` if the file cannot be read.
    """
    path = folder / FILE
    try:
        # Opened here: NumPy leaves a file open that it cannot read.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            labels = arrays["labels"]
            found = [name.removesuffix(".losses") for name in arrays.files if name.endswith(".losses")]
            scores = {
                weights: Scores(labels=labels, **{name: arrays[f"{weights}.{name}"] for name in _COLUMNS})
                for weights in found
            }
            return Results(int(arrays["step"]), str(arrays["digest"]), scores)
    except FileNotFoundError:
        return None
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); remove it to do without it"
        ) from None
