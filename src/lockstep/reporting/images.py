"""The images of a report: images that a model got wrong are read again from the data set and put
into the page."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep import backends
from lockstep.data.images import printable
from lockstep.data.index import Index
from lockstep.data.split import find_validation_index
from lockstep.inference.grad_cam import make_explainer, overlay
from lockstep.recipes import Execution
from lockstep.runs.image_results import Results
from lockstep.runs.reading import Run
from lockstep.runs.worst_mistakes import load_evaluated_images
from lockstep.system.errors import DataError
from lockstep.system.html import data_address
from lockstep.weights import open_weights

LARGEST_PIXELS = 160
"""Longest side of an image on the page; larger images are reduced."""


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
        raise ImagesGone(f"{data} holds other images than the run was evaluated on.")
    return index


def encode_images(run: Run, index: Index, samples: list[int]) -> dict[int, str]:
    """Return images as the model saw them, as `data:` addresses. Raises `ImagesGone` if one was
    overwritten."""
    try:
        images = load_evaluated_images(index, run.recipe, np.array(samples, np.int64))
    except DataError as error:
        raise ImagesGone(error) from None
    return dict(zip(samples, map(_encode_image, images), strict=True))


def explain_images(
    run: Run, results: Results, weights: str, index: Index, samples: list[int]
) -> dict[int, str]:
    """Return images with what speaks for the predicted class over them (Grad-CAM), as `data:`
    addresses.

    `weights` of the results are the "trained" ones or the "ema". Raises `ImagesGone` if an image
    was overwritten, `CheckpointError` if the checkpoint that was evaluated is gone, and
    `BackendError` if no framework that computes Grad-CAM is installed.
    """
    opened = open_weights(run.folder, checkpoint=str(results.step), ema=weights == "ema")
    backend = next(name for name, framework in backends.FRAMEWORKS.items() if framework.explains)
    world = backends.load(backend).world(Execution(backend=backend))
    try:
        images = load_evaluated_images(index, run.recipe, np.array(samples, np.int64))
        classes = results.scores[weights].predictions[samples].astype(np.int64)
        pictures = overlay(images, make_explainer(opened, backend, world).heat(images, classes))
    except DataError as error:
        raise ImagesGone(error) from None
    finally:
        world.close()
    return dict(zip(samples, map(_encode_image, pictures), strict=True))


def _encode_image(pixels: np.ndarray) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((LARGEST_PIXELS, LARGEST_PIXELS))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=88)
    return data_address("image/jpeg", file.getvalue())
