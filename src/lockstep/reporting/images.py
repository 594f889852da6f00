"""The images of a report: images that a model got wrong are read again from the data set and put
into the page."""

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep import backends
from lockstep.data.images import Names, printable
from lockstep.data.index import Index
from lockstep.data.split import find_validation_index
from lockstep.inference.comparison import choose_backend
from lockstep.inference.grad_cam import make_explainer, overlay
from lockstep.recipes import Execution
from lockstep.runs.image_results import (
    DAMAGE,
    IMAGES_FILE,
    Results,
    load_evaluated_images,
    read_records,
)
from lockstep.runs.reading import Run
from lockstep.system.errors import DataError
from lockstep.system.html import data_address
from lockstep.weights import open_weights

LARGEST_PIXELS = 160
"""Longest side of an image on the page; larger images are reduced."""
_TOGETHER = 8
"""At most this many images are in memory as the model saw them."""


class ImagesGone(Exception):
    """The images a run was evaluated on cannot be shown; the message says why."""

    def __init__(self, why: object) -> None:
        super().__init__(f"The images are not shown: {printable(str(why))}")


def open_images(run: Run) -> Index:
    """Return the index of the images that a run was evaluated on. Raises `ImagesGone` if they are
    gone."""
    assert run.results is not None
    if run.environment.get("execution", {}).get("loader") == "synthetic":
        raise ImagesGone("the run was evaluated on noise (loader: synthetic).")
    data = run.environment.get("data")
    if data is None:
        raise ImagesGone("environment.json does not say where they are.")
    try:
        index = find_validation_index(Path(data), run.recipe.division, run.class_folders)
    except (DataError, OSError) as error:
        raise ImagesGone(error) from None
    if index is None:
        raise ImagesGone(f"{data} has changed since the run, or its index is missing.")
    if index.digest != run.results.digest:
        raise ImagesGone(f"{data} holds images other than those of the run's evaluation.")
    return index


def name_images(run: Run, samples: list[int]) -> dict[int, str]:
    """Return the names that validation images had when the run listed them; none if it did not."""
    names: dict[int, str] = {}
    with suppress(OSError, IndexError, *DAMAGE):
        arrays = read_records(run.folder / IMAGES_FILE)
        texts = Names(arrays["val.names"], arrays["val.name_ends"])
        assert run.results is not None
        labels = next(iter(run.results.scores.values())).labels
        if np.array_equal(arrays["val.labels"], labels):
            for sample in samples:
                names[sample] = printable(os.fsdecode(texts[sample]))
    return names


def encode_images(run: Run, index: Index, samples: list[int]) -> dict[int, str]:
    """Return images as the model saw them, as `data:` addresses. Raises `ImagesGone` if one was
    overwritten."""
    pictures: dict[int, str] = {}
    for part, images in _load_images(run, index, samples):
        pictures |= zip(part, map(_encode_image, images), strict=True)
    return pictures


def _load_images(
    run: Run, index: Index, samples: list[int]
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield images as `load_evaluated_images` returns them, with their samples, a few at a time: a
    recipe may have large ones."""
    for first in range(0, len(samples), _TOGETHER):
        part = samples[first : first + _TOGETHER]
        try:
            yield part, load_evaluated_images(index, run.recipe, np.array(part, np.int64))
        except DataError as error:
            raise ImagesGone(error) from None


def explain_images(
    run: Run, results: Results, weights: str, index: Index, samples: list[int]
) -> dict[int, str]:
    """Return images with the parts that support the predicted class marked (Grad-CAM), as `data:`
    addresses.

    `weights` of the results are the "trained" ones or the "ema". Raises `ImagesGone` if an image
    was overwritten, `CheckpointError` if the checkpoint that was evaluated is gone, and
    `BackendError` if no framework that computes Grad-CAM is installed.
    """
    opened = open_weights(run.folder, checkpoint=str(results.step), ema=weights == "ema")
    backend = choose_backend(None, quantises=False, explains=True)
    world = backends.load(backend).world(Execution(backend=backend))
    predictions = results.scores[weights].predictions.astype(np.int64)
    explanations: dict[int, str] = {}
    try:
        explainer = make_explainer(opened, backend, world)
        for part, images in _load_images(run, index, samples):
            pictures = overlay(images, explainer.heat(images, predictions[part]))
            explanations |= zip(part, map(_encode_image, pictures), strict=True)
    finally:
        world.close()
    return explanations


def _encode_image(pixels: np.ndarray) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((LARGEST_PIXELS, LARGEST_PIXELS))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return data_address("image/jpeg", file.getvalue())
