"""What a run's folder keeps for every image.

- `images.npz`: the images of the run; a run that cannot resume says which ones differ. For `train`
  and `val`, it holds the `classes`, and for each image its name, label, length, and the checksum of
  its bytes: `train.labels` and so on. Validation images that were not read are missing. `seen` has
  lengths and checksums of all images that the weights it started from were trained on.
- `validation.npz`: the results of the last evaluation, and `best-validation.npz`: those of the best
  one. Each holds `step`, the `digest` of the index of the images, the `classes`, `labels`, and for
  each kind of weights ("trained", "ema") the columns of `Scores` as `trained.losses` and so on. Row
  i is sample i of the index, whichever rank evaluated it. `lockstep.runs.calibrated_results` adds
  confidences at the temperature of the checkpoint.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.images import Names, printable
from lockstep.data.index import Index
from lockstep.data.loading.loaders import make_loader
from lockstep.data.sources import shorten_list
from lockstep.data.split import Sets
from lockstep.models.metrics import Scores
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import centre_plan
from lockstep.runs.loggers import Picture
from lockstep.system.errors import CheckpointError
from lockstep.system.files import replacing
from lockstep.system.regular_files import RECORDS, open_regular
from lockstep.system.text import format_count

IMAGES_FILE = "images.npz"
_NAMED = 5
_CHECKED = 64
Arrays = dict[str, np.ndarray]
Places = dict[tuple[str, str], tuple[Any, ...]]
"""The class, length and checksum of images by set and name."""
FILE = "validation.npz"
BEST_FILE = "best-validation.npz"
_BYTES = ("lengths", "checksums")
_NONE = np.zeros(0, np.uint32)
_COLUMNS: dict[str, type] = {"losses": np.float32, "ranks": np.int32, "predictions": np.int32}
_COLUMNS["confidences"] = np.float32
DAMAGE = (ValueError, KeyError, TypeError)
"""Exceptions for files that are truncated, overwritten or written by another program."""
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
    arrays = {
        "step": np.array(results.step),
        "digest": np.array(results.digest),
        "classes": np.array(results.classes, str),
        "labels": next(iter(results.scores.values())).labels,
    }
    for weights, scores in results.scores.items():
        for name in _COLUMNS:
            arrays[f"{weights}.{name}"] = getattr(scores, name)
    write_arrays(folder / file_name, arrays)


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays into a file. A reader never sees a partial one."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_records(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file of a run that has values for each image. Raises `OSError` or
    `ValueError` if it cannot be read or expands to more than the limit of records."""
    from lockstep.system.npz import NUMBERS, read_npz

    with open_regular(path, RECORDS) as file:
        most = RECORDS.most_bytes
        return read_npz(file, most_members=_MOST_ARRAYS, most_bytes=most, kinds=f"{NUMBERS}U")


def read_results(folder: Path, file_name: str = FILE) -> Results | None:
    """Return the results in a run's folder; None if it was never evaluated. Raises
    `CheckpointError` if the file cannot be read."""
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
                    raise ValueError("a confidence is outside 0 to 1")
                scores[weights] = Scores(labels=labels, **columns)
        step, digest = arrays["step"], arrays["digest"]
        names = arrays.get("classes", np.zeros(0, str))
        if (step.shape, digest.shape, names.ndim) != ((), (), 1) or step.dtype != np.int64:
            raise ValueError("step, digest or classes have the wrong shape or type")
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
        raise ValueError(f"a column does not have one {kind.__name__} per label")
    if kind is np.int32 and values.min(initial=0) < 0:
        raise ValueError("an index is below 0")


def find_worst(scores: Scores, count: int) -> np.ndarray:
    """Return the rows of the wrong predictions with the highest losses, the worst first: int64 [at
    most count]."""
    wrong = np.flatnonzero(scores.ranks > 0)
    return wrong[np.argsort(-scores.losses[wrong], kind="stable")][:count]


def load_evaluated_images(index: Index, recipe: Recipe, samples: np.ndarray) -> np.ndarray:
    """Return images as an evaluation crops them: uint8 [samples, size, size, 3]. Raises `DataError`
    if one is unreadable."""
    plan = centre_plan(recipe, samples, index.sizes_for(recipe)[samples])
    with make_loader(index, recipe, Execution(), evaluation=True) as loader:
        return next(iter(loader.batches([plan]))).pixels


def load_worst_mistakes(
    index: Index, recipe: Recipe, scores: Scores, count: int = 16
) -> list[Picture]:
    """Return the worst mistakes as the model gets them, with class names. Row i of the scores is
    sample i."""
    samples = find_worst(scores, count)
    if not len(samples):
        return []
    images = load_evaluated_images(index, recipe, samples)
    names = dict(enumerate(index.classes))
    pictures = []
    for number, (sample, pixels) in enumerate(zip(samples, images, strict=True), start=1):
        label = int(scores.labels[sample])
        prediction = int(scores.predictions[sample])
        caption = f"{names[label]} predicted as {names.get(prediction, str(prediction))}"
        pictures.append(Picture(f"mistakes/{number:02d}", caption, pixels))
    return pictures


def list_images(out: Path, sets: Sets, *, is_new: bool) -> None:
    """List the images in a run's folder that are not listed yet; all of them if the run is new."""
    before = {} if is_new else _read_images(out)
    now: Arrays = {}
    for name, index in _name_sets(sets):
        is_listed = f"{name}.labels" in before
        if len(before.get(f"{name}.checksums", ())) < len(index.checksums) or not is_listed:
            now |= _make_columns(name, index)
    if now:
        write_arrays(out / IMAGES_FILE, before | now)


def compare_images(out: Path, sets: Sets) -> str:
    """Return which images differ from those in a run's folder; "" if none does, as far as known."""
    before = _read_images(out)
    now: Arrays = {}
    for name, index in _name_sets(sets):
        if f"{name}.labels" in before:
            now |= _make_columns(name, index)
    try:
        changes = _compare(before, now)
    except (IndexError, TypeError, *DAMAGE):
        return ""
    bad = len(sets.training.quarantined) + len(sets.validation.quarantined)
    if changes and bad:
        left_out = format_count(bad, "image")
        changes.append(f"{left_out} of these may be left out as unreadable or by quarantine.json")
    return "; ".join(changes)


def list_validation_images(out: Path) -> dict[tuple[str, int, int], int]:
    """Return the numbers of a run's validation images by class, length and checksum, if known."""
    arrays = _read_images(out)
    numbers = {}
    try:
        classes = arrays["val.classes"].tolist()
        columns = [arrays[f"val.{name}"].tolist() for name in ("labels", "lengths", "checksums")]
        for number, (label, *others) in enumerate(zip(*columns, strict=True)):
            numbers[str(classes[label]), *others] = number
    except (IndexError, *DAMAGE):
        return {}
    return numbers


def list_seen(out: Path, checkpoint: Path | None) -> None:
    """List in the folder of a new run the images that the weights it starts from were trained on:
    those of the run of a checkpoint, and of all runs before that one."""
    seen = _key_trained(checkpoint)
    if len(seen):
        columns = {
            "seen.lengths": (seen >> np.uint64(32)).astype(np.uint32),
            "seen.checksums": seen.astype(np.uint32),  # of its lower bits
        }
        write_arrays(out / IMAGES_FILE, columns)


def find_trained(checkpoint: Path | None, index: Index) -> np.ndarray:
    """Return which images have the same bytes as a training image of a checkpoint's run or of its
    starting weights, whatever the names and labels; none if that is unknown.

    `checkpoint` is a file of the checkpoint; None: the weights are of no run.
    """
    return np.resize(np.isin(_key_index(index), _key_trained(checkpoint)), len(index))


def count_known(out: Path) -> int:
    """Return how many validation images, by their bytes, are known to be training images of a run
    or of its starting weights."""
    arrays = _read_images(out)
    return int(np.isin(_key_columns(arrays, "val"), _key_columns(arrays, "train", "seen")).sum())


def count_copies(sets: Sets) -> int:
    """Return how many validation images are known to have the bytes of a training image."""
    return int(np.isin(_key_index(sets.validation), _key_index(sets.training)).sum())


def _key_trained(checkpoint: Path | None) -> np.ndarray:
    """Return the keys of the images that a checkpoint's weights are known to be trained on."""
    folder = Path() if checkpoint is None else checkpoint.resolve().parent.parent
    arrays = _read_images(folder.parent) if folder.name == "checkpoints" else {}
    return np.unique(_key_columns(arrays, "train", "seen"))


def _key_columns(arrays: Arrays, *names: str) -> np.ndarray:
    """Return the keys of the images of sets in a run's file."""
    columns = [[arrays.get(f"{name}.{column}", _NONE) for column in _BYTES] for name in names]
    return np.concatenate([_key_bytes(*column) for column in columns])


def _key_index(index: Index) -> np.ndarray:
    """Return the keys of the images of an index."""
    return _key_bytes(index.rows["length"], index.checksums)


def _key_bytes(lengths: np.ndarray, checksums: np.ndarray) -> np.ndarray:
    """Return a number for the length and checksum of each image, if they are known: uint64."""
    try:
        high, low = (column.astype(np.uint64).ravel() for column in (lengths, checksums))
        return high << np.uint64(32) | low  # with no checksums, shapes do not match
    except DAMAGE:
        return np.zeros(0, np.uint64)


def read_sample(index: Index, turn: int) -> None:
    """Read images spread over an index, different ones at each `turn`. Raises `DataError` if one of
    them changed since it was indexed."""
    count = min(len(index), _CHECKED)
    if not index.is_stored and len(index.checksums):
        for i in range(count):
            index.read((i * len(index) // count + turn) % len(index))


def _name_sets(sets: Sets) -> Iterator[tuple[str, Index]]:
    """Yield the indexes of a run that have images, with their names."""
    for name, index in (("train", sets.training), ("val", sets.validation)):
        if len(index):
            yield name, index


def _make_columns(name: str, index: Index) -> Arrays:
    columns = {
        "classes": np.array(index.classes, str),
        "labels": index.rows["label"],
        "lengths": index.rows["length"],
        "checksums": index.checksums,
        "names": index.names.text,
        "name_ends": index.names.ends,
    }
    return {f"{name}.{column}": values for column, values in columns.items()}


def _compare(before: Arrays, now: Arrays) -> list[str]:
    """Return how images differ: a few of each kind, and how many. Images that moved are
    recognised by their bytes, and a renamed class by all of its images."""
    names = [name for name in ("train", "val") if f"{name}.labels" in now]
    columns = ["labels", "lengths", "checksums"]
    has_bytes = all(len(before[f"{n}.checksums"]) and len(now[f"{n}.checksums"]) for n in names)
    if not has_bytes:
        columns.pop()
    keys = [f"{name}.{column}" for name in names for column in ("classes", *columns)]
    if all(np.array_equal(before[key], now[key]) for key in keys):
        return []
    then = _key_images(names, columns, before)
    here = _key_images(names, columns, now)
    moved = _find_moved(then, here) if has_bytes else {}
    gone = {about[0] for about in then.values()}
    added = {about[0] for about in here.values()} - gone
    gone -= {about[0] for about in here.values()}
    renamed: dict[str, set[str]] = {name: set() for name in gone}
    lists: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, (name, *about) in then.items():
        place = moved.get(key)
        if name in gone:
            renamed[name].add("" if place is None else here[place][0])
        elif place is not None:
            lists["", "image with a different name or label"].append(f"{key[1]}, now {place[1]}")
        elif key not in here:
            lists[key[0], "image missing"].append(key[1])
        elif here[key] != (name, *about):
            lists[key[0], "image changed"].append(key[1])
    arrived = set(moved.values())
    for key, (name, *_) in here.items():
        if key not in then and name not in added and key not in arrived:
            lists[key[0], "image new"].append(key[1])
    parts = []
    for name, targets in sorted(renamed.items()):
        if len(targets) == 1 and targets <= added:
            parts.append(f"class {printable(name)} was renamed {printable(*targets)}")
            gone.remove(name)
            added -= targets
    lists["", "class missing"] += gone
    lists["", "class new"] += added
    for (part, what), images in sorted(lists.items()):
        noun, _, change = what.partition(" ")
        shown = shorten_list(list(map(printable, sorted(images))), _NAMED)
        line = f"{part}: {format_count(len(images), noun)} {change} ({shown})"
        if images:
            parts.append(line.removeprefix(": "))
    return parts


def _find_moved(then: Places, here: Places) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the new places of images that moved, found by their bytes."""
    places = {here[key][1:]: key for key in here.keys() - then.keys()}
    left = {key: places.get(about[1:]) for key, about in then.items() if key not in here}
    return {key: place for key, place in left.items() if place is not None}


def _key_images(names: Sequence[str], columns: list[str], arrays: Arrays) -> Places:
    """Return the class and other columns of each image by its set and its name or number."""
    images = {}
    for name in names:
        classes = arrays[f"{name}.classes"].tolist()
        labels, *others = (arrays[f"{name}.{column}"].tolist() for column in columns)
        own = Names(arrays[f"{name}.names"], arrays[f"{name}.name_ends"])
        for i, image in enumerate(own):
            about = (classes[labels[i]], *(values[i] for values in others))
            images[name, os.fsdecode(image) or f"number {i}"] = about
    return images


def _read_images(out: Path) -> Arrays:
    """Return the arrays of the file in a folder; none if it is missing or damaged."""
    try:
        return read_records(out / IMAGES_FILE)
    except (OSError, *DAMAGE):
        return {}
