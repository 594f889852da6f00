"""Find images whose label is probably wrong, with runs that did not train on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.data.contact_sheet import draw_sheet, wrap_lines
from lockstep.data.images import printable
from lockstep.data.index import Index
from lockstep.data.split import Sets, open_sets, same_images
from lockstep.inference.comparison import choose_backend
from lockstep.inference.images import read_square
from lockstep.inference.session import SessionOptions, open_session
from lockstep.models.label_errors import find_label_errors
from lockstep.recipes import Execution, Recipe
from lockstep.runs.evaluate import watch_images
from lockstep.runs.events import Listener
from lockstep.runs.folder import suggest_folds
from lockstep.runs.folds import list_runs
from lockstep.runs.image_results import find_trained
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import CheckpointError, DataError
from lockstep.system.ranks import is_leading
from lockstep.weights import Weights, open_weights
from lockstep.weights.calibration import collect_logits, compute_probabilities
from lockstep.weights.checkpoint import read_data_digest

TRUSTED_SHARE = 0.9
"""Runs that predict a smaller share of the labels doubt many that are right."""
ODDS = 5.0
"""How many times as likely as the label a suggestion of such runs must be."""
_SMALLEST_CELL = 160
"""Pixels of a side of an image in a sheet, so that people can judge it."""


@dataclass(frozen=True)
class Suspect:
    """An image whose label is probably wrong."""

    place: str
    """Its file, below the data set's folder; within a file of many images also its name."""
    label: str
    suggestion: str
    """The class that it probably belongs to."""
    label_probability: float
    suggestion_probability: float
    source: tuple[Index, int]
    """The index that has it, and its number there."""

    def describe(self) -> dict[str, Any]:
        """Return the suspect as JSON has it."""
        return {
            "image": self.place,
            "label": self.label,
            "suggestion": self.suggestion,
            "label_probability": round(self.label_probability, 6),
            "suggestion_probability": round(self.suggestion_probability, 6),
        }


@dataclass(frozen=True)
class LabelCheck:
    """The result of checking labels."""

    suspects: list[Suspect]
    """The most certain first."""
    judged: int
    """Images that some run predicted without having trained on them."""
    right: int
    """Of these, the images for which the label is the most likely class."""
    trained: int
    """Images that were not judged, because the weights of all their judges were trained on them."""
    images: int
    """All training and validation images."""
    odds: float
    """The suggestion for a suspect is at least this many times as likely as its label."""
    recipe: Recipe
    """How the images are prepared."""


@dataclass
class _Judgement:
    """What runs predict for an image."""

    index: Index
    sample: int
    total: np.ndarray
    """Sum of the probabilities, float64 [classes]."""
    runs: int = 0

    @property
    def label(self) -> int:
        return int(self.index.rows["label"][self.sample])


def check_labels(
    data: Path,
    runs: Sequence[str | Path],
    *,
    execution: Execution | None = None,
    listener: Listener | None = None,
) -> LabelCheck:
    """Find label errors of a data set with runs that were trained on it.

    Each run judges its validation images, without those that its first weights were trained on; its
    best checkpoint was chosen on them. A folder of runs, such as those of `train --folds`, stands
    for its runs; together they judge all images. Probabilities of several runs are averaged.

    Raises `DataError` if a run was trained on other images, or the weights of all on all images,
    and `CheckpointError` if there is no run.
    """
    recorder = Recorder(listener if is_leading() else None)
    judgements: dict[str, _Judgement] = {}
    trained: set[str] = set()
    images = 0
    recipe = Recipe()
    for run in _list_folders(runs):
        weights = open_weights(run)
        recipe = weights.recipe
        backend = choose_backend(None, quantises=bool(weights.scales))
        how = execution or Execution(backend=backend)
        own = weights.classes
        sets = open_sets(data, recipe.division, recorder.progress, own_classes=own)
        _check_images(weights, sets, data, run)
        images = len(sets.training) + len(sets.validation)
        probabilities = _predict(weights, sets.validation, how, listener)
        known = find_trained(weights.checkpoint_file, sets.validation)
        for sample, row in enumerate(probabilities):
            place = _name_place(sets.validation, sample)
            if known[sample]:
                trained.add(place)
                continue
            empty = np.zeros(len(row))
            judgement = judgements.setdefault(place, _Judgement(sets.validation, sample, empty))
            judgement.total += row
            judgement.runs += 1
    if trained and not judgements:
        raise DataError(
            "the runs started from weights that were trained on all of these images; expected"
            f" weights that have not seen them:\n  {suggest_folds(Path(runs[0]), data)}"
        )
    right = sum(int(one.total.argmax()) == one.label for one in judgements.values())
    odds = ODDS if right < TRUSTED_SHARE * len(judgements) else 1.0
    suspects = _find_suspects(judgements, odds)
    unjudged = len(trained - judgements.keys())
    return LabelCheck(suspects, len(judgements), right, unjudged, images, odds, recipe)


def _list_folders(sources: Sequence[str | Path]) -> list[Path]:
    """Return the folders of runs. Raises `CheckpointError` if a source has none."""
    runs: list[Path] = []
    for source in map(Path, sources):
        folders = list_runs(source)
        if not folders:
            raise CheckpointError(
                f"{source} is not a run and contains none; expected the --out of lockstep train"
            )
        runs += folders
    return runs


def _check_images(weights: Weights, sets: Sets, data: Path, run: Path) -> None:
    """Raise `DataError` unless a run was trained on these images."""
    assert weights.checkpoint_file is not None
    digest = read_data_digest(weights.checkpoint_file.parent)
    if not same_images(digest, sets.digest):
        raise DataError(
            f"{run} was trained on images other than those in {data}, or with other labels; train"
            f" on these images:\n  {suggest_folds(run, data)}"
        )


def _predict(
    weights: Weights, index: Index, execution: Execution, listener: Listener | None
) -> np.ndarray:
    """Return the probabilities of the classes, without other outputs: float64 [N, classes]."""
    options = SessionOptions(execution=execution, listener=listener)
    with open_session(weights, options) as session:
        about = (index, session.weights.recipe, execution, options.batch)
        images = watch_images(session.recorder, "judging", *about)
        logits, _ = collect_logits(session.predict, images)
    known = logits[:, : len(index.classes)]
    return compute_probabilities(known, weights.calibration.temperature)


def _name_place(index: Index, sample: int) -> str:
    """Return what an image is called: its file, and within a file of many images its name."""
    place = index.place(sample)
    name = index.name(sample)
    where = f"{index.root.name}/{place}"
    return printable(where if name in ("", place) else f"{where} ({name})")


def _find_suspects(judgements: dict[str, _Judgement], odds: float) -> list[Suspect]:
    """Return the images whose label is probably wrong, the most certain first."""
    if not judgements:
        return []
    places = list(judgements)
    rows = [judgement.total / judgement.runs for judgement in judgements.values()]
    labels = [judgement.label for judgement in judgements.values()]
    errors = find_label_errors(np.stack(rows), np.array(labels), odds)
    suspects = []
    for number, guess in zip(errors.suspects.tolist(), errors.suggestions.tolist(), strict=True):
        judgement = judgements[places[number]]
        classes = judgement.index.classes
        suspects.append(
            Suspect(
                places[number],
                printable(classes[labels[number]]),
                printable(classes[guess]),
                float(rows[number][labels[number]]),
                float(rows[number][guess]),
                (judgement.index, judgement.sample),
            )
        )
    return suspects


def draw_suspects(check: LabelCheck, most: int) -> Image.Image:
    """Return a contact sheet of the first `most` suspects, each with its file, its label and its
    suggested class. Images are as evaluation crops them, and large enough for people."""
    recipe = check.recipe
    scale = -(-_SMALLEST_CELL // recipe.eval_crop)
    size = scale * recipe.eval_crop
    recipe = recipe.replace(eval_resize=scale * recipe.eval_resize, eval_crop=size)
    pictures = []
    captions = []
    for suspect in check.suspects[:most]:
        index, sample = suspect.source
        picture = np.empty((size, size, 3), np.uint8)
        read_square(index.read(sample), recipe, picture)
        pictures.append(picture)
        label = f"{suspect.label} {100 * suspect.label_probability:.0f} %"
        suggestion = f"{suspect.suggestion} {100 * suspect.suggestion_probability:.0f} %"
        captions.append(wrap_lines((suspect.place, f"label: {label}", f"or: {suggestion}"), size))
    return draw_sheet(pictures, captions)
