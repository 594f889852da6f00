"""Features of a run's training images, computed once by weights that do not change.

They are kept next to the index of the images, in a file for each set of weights, preprocessing and
images. A file appears complete or not at all, and the newest few are kept.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lockstep.backends import FRAMEWORKS, Engine
from lockstep.data.index import Index, find_cache_folder
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.runs.context import RunContext, stop_before_training
from lockstep.runs.evaluation_images import watch_images
from lockstep.system.files import replacing
from lockstep.system.regular_files import ANY_SIZE, open_regular

BATCH_IMAGES = 32
"""Images that pass through the model together. It is the same for every number of ranks, so that
features are, too."""
_FILES = 3
"""The newest files that are kept for a set of images."""
_NETWORK = ("model", "padding", "bn_epsilon", "precision", "image_size", "dct_scaling")


def feature_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of a model whose logits are the features of a recipe's model, with the same
    preprocessing."""
    fields = recipe.evaluation_recipe().fields()
    network = {name: fields[name] for name in _NETWORK}
    count = recipe.spec.features
    return Recipe.of(recipe.preprocessing() | network | {"logits": count})


def load_features(
    run: RunContext, engine: Engine, tensors: dict[str, np.ndarray], images: Index
) -> np.ndarray:
    """Return the features of images as evaluation prepares them, without augmentation: float32
    [images, features].

    `engine` is one of `feature_recipe`, `tensors` are the run's weights. Features are read from
    the cache, or computed and written there. Raises `Interrupted` if a stop is requested meanwhile.
    """
    recipe = feature_recipe(run.recipe)
    backbone = {name: value for name, value in tensors.items() if not name.startswith("fc.")}
    shape = (len(images), recipe.logits)
    file = find_cache_folder(images.source) / f"features-{_hash_inputs(run, backbone, images)}.npy"
    cached = _read(file, shape)
    if cached is not None:
        return cached
    # With this classifier, a model returns its features.
    classifier = {
        "fc.weight": np.eye(recipe.logits, dtype=np.float32),
        "fc.bias": np.zeros(recipe.logits, np.float32),
    }
    engine.write(initial_state(recipe, backbone | classifier))
    computed = np.concatenate(list(_compute(run, engine, recipe, images)))
    _write(file, computed)
    return computed


def _compute(
    run: RunContext, engine: Engine, recipe: Recipe, images: Index
) -> Iterator[np.ndarray]:
    """Yield the features of the images, batch by batch."""
    what = "computing features"
    for batch in watch_images(run.recorder, what, images, recipe, run.execution, BATCH_IMAGES):
        stop_before_training(run.stop, what)
        yield engine.predict(batch.pixels)[batch.labels >= 0]


def _hash_inputs(run: RunContext, backbone: dict[str, np.ndarray], images: Index) -> str:
    """Return a text that is another one for other features: a hash of weights, recipe, images and
    what computes."""
    fields = ("backend", "loader", "compile", "fused", "layout", "deterministic")
    about = {
        "recipe": feature_recipe(run.recipe).fields(),
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


def _read(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
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


def _write(file: Path, values: np.ndarray) -> None:
    """Write features, and remove the oldest files of the folder. A full disk leaves no file."""
    try:
        with replacing(file) as partial, partial.open("wb") as opened:
            np.lib.format.write_array(opened, values, allow_pickle=False)
        files = sorted(file.parent.glob("features-*.npy"), key=lambda path: path.stat().st_mtime)
        for path in files[:-_FILES]:
            path.unlink(missing_ok=True)
    except OSError:
        return  # they are computed again when they are needed
