"""The linear probe: the classifier of a run from weights that do not tell its classes apart.

The features of the training images are computed once, and the best classifier on them is found in
seconds (`lockstep.models.logistic_regression`). The run starts from it (LP-FT, arXiv:2202.10054):
training does not first distort the features for a random one.

Features are kept next to the index of the images, in a file for each set of weights, preprocessing
and images. A file appears complete or not at all, and the newest few are kept.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep import backends
from lockstep.backends import FRAMEWORKS, Engine
from lockstep.data.index import Index, find_cache_folder, subset
from lockstep.models.logistic_regression import fit_classifier
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.runs.context import RunContext, stop_before_training
from lockstep.runs.evaluate import watch_images
from lockstep.runs.starting_weights import Start
from lockstep.runs.step_plan import MOST_PROBE_IMAGES
from lockstep.system import heartbeat
from lockstep.system.errors import CheckpointError
from lockstep.system.files import replacing
from lockstep.system.regular_files import ANY_SIZE, open_regular
from lockstep.system.text import make_printable_names
from lockstep.weights import checkpoint

_PENALTY = 0.005
"""Penalty of the regression, divided by the number of classes: 0.001 for five. Between a third and
three times this value, accuracy stays within its interval (benchmarks/notes/fine-tuning.md)."""
_FOLDS = 5
_MOST_LOGITS = 1_000_000
"""With more logits than this, fits are slow, and one fold decides whether classes are kept."""
_BATCH_IMAGES = 32
"""Images that pass through the model together. It is the same for every number of ranks, so that
features are, too."""
_FILES = 3
"""The newest files that are kept for a set of images."""
Classifier = tuple[np.ndarray, np.ndarray]
"""Weight, float64 [classes, features], and bias."""
_NETWORK = ("model", "padding", "bn_epsilon", "precision", "image_size", "dct_scaling")


def start_from_probe(run: RunContext) -> None:
    """Replace the classifier of the weights that a new run starts from, if the recipe has a linear
    probe and they do not tell the run's classes apart. Every rank calls it; rank 0 computes.

    Raises `Interrupted` if a stop is requested meanwhile.
    """
    is_due = run.leads and run.start is not None and _is_due(run, run.start)
    if not run.world.any(is_due):
        return
    began = time.perf_counter()
    backend = backends.load(run.execution.backend)
    recipe = _make_feature_recipe(run.recipe)
    with backend.engine(recipe, np.zeros(1), run.world, run.execution) as engine:
        if run.leads and run.start is not None:
            run.start = _fit(run, engine, run.start)
            if run.start.is_probe:
                run.probe_began = began
        run.world.wait()


def _is_due(run: RunContext, start: Start) -> bool:
    if not run.recipe.linear_probe or start.resumed is not None:
        return False
    has_begun = bool(checkpoint.steps(run.checkpoints))
    classes = make_printable_names(run.sets.training.classes)
    return not has_begun and not start.knows(classes)


def _fit(run: RunContext, engine: Engine, start: Start) -> Start:
    """Return the weights with a classifier of the run's classes. Raises `CheckpointError` if their
    features are not finite."""
    images = choose_images(run.sets.training)
    features = _load_features(run, engine, start.tensors, images)
    if not np.isfinite(features).all():
        raise CheckpointError(
            f"the weights {start.name} give features of the training images that are not finite, so"
            " they cannot be trained: use other weights, or check their preprocessing"
        )
    probe = _Probe(run, features, images.labels(np.arange(len(images))))
    classes = make_printable_names(run.sets.training.classes)
    if start.classes == ():  # the file does not name its classes
        own = features @ start.tensors["fc.weight"].T + start.tensors["fc.bias"]
        hits = probe.count_hits(own, np.arange(len(images)))
        if probe.is_counted.any() and probe.count_left_out_hits(None, hits) <= hits:
            return start
    first, notes = _find_first(probe, start, classes)
    weight, bias = probe.fit(np.arange(len(images)), "fitting the linear probe", first)
    note = f"the classifier starts from a linear probe of {len(images):,} training images"
    if first is not None:
        note += ", which begins at the kept outputs"
    classifier = {"fc.weight": weight.astype(np.float32), "fc.bias": bias.astype(np.float32)}
    return replace(
        start,
        tensors=start.tensors | classifier,
        notes=(*start.notes, *notes),
        details=(*start.details, note),
        classes=classes,
        is_probe=True,
    )


def _find_first(
    probe: "_Probe", start: Start, classes: Sequence[str]
) -> tuple[Classifier | None, list[str]]:
    """Return the classifier that a probe begins at, with the rows of classes that the weights know
    by name; None if there are none, or if a probe without them is better. And notes."""
    named = start.named
    if named is None:
        return None, []
    places = named.match(classes)
    if not (places >= 0).any():
        return None, []
    notes = [named.describe(classes, places)]
    logits = probe.run.recipe.logits
    first = named.begin_probe(places, logits)
    folds = _FOLDS
    if len(probe.labels) * logits > _MOST_LOGITS:
        folds = 1
    hits = probe.count_left_out_hits(first, len(probe.labels), folds)
    if probe.count_left_out_hits(None, hits, folds) <= hits:
        return first, notes
    notes.append("the linear probe starts without the kept outputs: it is right more often")
    return None, notes


@dataclass(frozen=True)
class _Probe:
    """Linear probes of the training images."""

    run: RunContext
    features: np.ndarray
    labels: np.ndarray

    @property
    def is_counted(self) -> np.ndarray:
        """Whether a probe without an image has seen its class."""
        return np.bincount(self.labels)[self.labels] > 1

    def fit(self, some: np.ndarray, what: str, first: Classifier | None) -> Classifier:
        """Return the probe of some images, whose search begins at `first`."""
        progress = self.run.recorder.progress(what)

        def begin_step(done: float) -> None:
            stop_before_training(self.run.stop, what)
            heartbeat.note("evaluating", moved=True)
            progress(int(100 * done), 100)

        logits = self.run.recipe.logits
        return fit_classifier(
            self.features[some],
            self.labels[some],
            logits,
            _PENALTY / logits,
            start=first,
            begin_step=begin_step,
        )

    def count_hits(self, logits: np.ndarray, samples: np.ndarray) -> int:
        """Return how many of these images, if they are counted, are classified correctly."""
        is_hit = logits.argmax(axis=1) == self.labels[samples]
        return int((is_hit & self.is_counted[samples]).sum())

    def count_left_out_hits(
        self, first: Classifier | None, enough: int, tried: int = _FOLDS
    ) -> int:
        """Return how many images of the `tried` folds are classified correctly by probes of the
        other folds, beginning at `first`. Once more than `enough` are, the rest is not tried."""
        folds = np.empty(len(self.labels), np.int64)
        folds[np.argsort(self.labels, kind="stable")] = np.arange(len(self.labels)) % _FOLDS
        hits = 0
        for fold in range(tried):
            left_out = np.flatnonzero(folds == fold)
            others = np.flatnonzero(folds != fold)
            if hits <= enough and len(left_out) and len(others):
                what = f"trying linear probe {fold + 1} of {_FOLDS}"
                weight, bias = self.fit(others, what, first)
                hits += self.count_hits(self.features[left_out] @ weight.T + bias, left_out)
        return hits


def choose_images(training: Index) -> Index:
    """Return the images to fit on: all, or `MOST_PROBE_IMAGES` at equal distances in their order by
    class, and one more of each class that is too small for these."""
    if len(training) <= MOST_PROBE_IMAGES:
        return training
    labels = training.rows["label"]
    order = np.argsort(labels, kind="stable")
    places = np.arange(MOST_PROBE_IMAGES) * len(training) // MOST_PROBE_IMAGES
    classes, firsts = np.unique(labels[order], return_index=True)
    places = np.union1d(places, firsts[~np.isin(classes, labels[order[places]])])
    return subset(training, np.sort(order[places]))


def _make_feature_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of a model whose logits are the features of a recipe's model, with the same
    preprocessing."""
    fields = recipe.evaluation_recipe().fields()
    network = {name: fields[name] for name in _NETWORK}
    count = recipe.spec.features
    return Recipe.of(recipe.preprocessing() | network | {"logits": count})


def _load_features(
    run: RunContext, engine: Engine, tensors: dict[str, np.ndarray], images: Index
) -> np.ndarray:
    """Return the features of images as evaluation prepares them, without augmentation: float32
    [images, features].

    `engine` has the recipe of `_make_feature_recipe`, `tensors` are the run's weights. Features are
    read from the cache, or computed and written there. Raises `Interrupted` if a stop is requested
    meanwhile.
    """
    recipe = _make_feature_recipe(run.recipe)
    backbone = {name: value for name, value in tensors.items() if not name.startswith("fc.")}
    shape = (len(images), recipe.logits)
    file = find_cache_folder(images.source) / f"features-{_hash_inputs(run, backbone, images)}.npy"
    cached = read_features(file, shape)
    if cached is not None:
        return cached
    # With this classifier, a model returns its features.
    classifier = {
        "fc.weight": np.eye(recipe.logits, dtype=np.float32),
        "fc.bias": np.zeros(recipe.logits, np.float32),
    }
    engine.write(initial_state(recipe, backbone | classifier))
    computed = np.concatenate(list(_compute_features(run, engine, recipe, images)))
    write_features(file, computed)
    return computed


def _compute_features(
    run: RunContext, engine: Engine, recipe: Recipe, images: Index
) -> Iterator[np.ndarray]:
    """Yield the features of the images, batch by batch."""
    what = "computing features"
    for batch in watch_images(run.recorder, what, images, recipe, run.execution, _BATCH_IMAGES):
        stop_before_training(run.stop, what)
        yield engine.predict(batch.pixels)[batch.labels >= 0]


def _hash_inputs(run: RunContext, backbone: dict[str, np.ndarray], images: Index) -> str:
    """Return a text that identifies the features: a hash of weights, recipe, images and the
    software that computes them."""
    fields = ("backend", "loader", "compile", "fused", "layout", "deterministic")
    about = {
        "recipe": _make_feature_recipe(run.recipe).fields(),
        "execution": {name: getattr(run.execution, name) for name in fields},
        "framework": FRAMEWORKS[run.execution.backend].version(),
        "device": run.world.device,
        "images": [images.digest, images.states],
    }
    sha = hashlib.sha256(json.dumps(about, sort_keys=True, allow_nan=False).encode())
    bytes_or_times = images.checksums if len(images.checksums) else images.times
    sha.update(bytes_or_times.tobytes() + images.names.text.tobytes())
    for name, value in sorted(backbone.items()):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(value).data)
    return sha.hexdigest()[:32]


def read_features(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """Return the features in a file; None if there are none of this shape.

    The header is checked before numpy allocates the array that it describes.
    """
    try:
        with open_regular(file, ANY_SIZE) as opened:
            if np.lib.format.read_magic(opened) != (1, 0):
                return None
            header = np.lib.format.read_array_header_1_0(opened)
            if header != (shape, False, np.dtype(np.float32)):
                return None
            opened.seek(0)
            values: np.ndarray = np.lib.format.read_array(opened, allow_pickle=False)
    except (OSError, ValueError):
        return None
    return values


def write_features(file: Path, values: np.ndarray) -> None:
    """Write features, and remove the oldest files of the folder. A full disk leaves no file."""
    try:
        with replacing(file) as partial, partial.open("wb") as opened:
            np.lib.format.write_array(opened, values, allow_pickle=False)
        files = sorted(file.parent.glob("features-*.npy"), key=lambda path: path.stat().st_mtime)
        for path in files[:-_FILES]:
            path.unlink(missing_ok=True)
    except OSError:
        return  # they are computed again when they are needed
