"""From images on disk to an index of all samples, and to batches as `order` plans them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """The images of one rank and step, as an engine receives them."""

    images: np.ndarray
    """uint8 [N, size, size, 3], RGB."""
    labels: np.ndarray
    """int64 [N]. -1 marks padding, which does not count."""
    coefficients: np.ndarray | None = None
    """float32 [N]: MixUp's weight of the image itself; None without MixUp."""
    partners: np.ndarray | None = None
    """int64 [N]: MixUp's partner, an index into the image's accumulation part of the batch."""
    is_held: bool = False
    """Whether every batch has the same array of images, so that an engine may keep it on its device."""
