"""Grad-CAM over images: which parts of an image support its most likely class."""

import importlib
from typing import Any, Protocol, cast

import cv2
import numpy as np

from lockstep import backends
from lockstep.system.errors import BackendError
from lockstep.weights import Weights

_SHOWN = 0.6
"""The share of the colour in a pixel where the heat is largest; elsewhere proportional to the heat.
"""


class Explainer(Protocol):
    """Computes Grad-CAM with a framework."""

    def heat(self, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return float32 [N, height, width] of uint8 images [N, size, size, 3] and classes int64
        [N]; at least 0."""


def make_explainer(weights: Weights, backend: str, world: backends.World | None) -> Explainer:
    """Return an explainer for the predictions of weights, in the world of the backend's engine.

    Raises `BackendError` if the backend cannot, or without a world: another runtime predicts.
    """
    if world is None:
        raise BackendError("only a framework can compute Grad-CAM; leave out --runtime")
    if not backends.FRAMEWORKS[backend].explains:
        names = [name for name, framework in backends.FRAMEWORKS.items() if framework.explains]
        raise BackendError(
            f"the backend {backend} cannot compute Grad-CAM; use --backend {' or '.join(names)}"
        )
    module: Any = importlib.import_module(f"lockstep.backends.{backend}.grad_cam")
    return cast(Explainer, module.Explainer(weights.recipe, weights.tensors, world))


def overlay(images: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Return images with heat in colours over them: uint8 RGB [N, size, size, 3], as `images`.

    `heat` is float32 [N, height, width]. The largest heat of each image is bright yellow; where
    there is none, the image is as it was.
    """
    return np.stack([_overlay(*pair) for pair in zip(images, heat, strict=True)])


def _overlay(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    share = cv2.resize(heat / max(float(heat.max()), np.finfo(np.float32).tiny), image.shape[1::-1])
    colours = cv2.applyColorMap(np.rint(255 * share).astype(np.uint8), cv2.COLORMAP_INFERNO)[
        :, :, ::-1
    ]
    part = _SHOWN * share[:, :, None]
    return np.rint((1 - part) * image + part * colours).astype(np.uint8)
