"""Images on disk -> an index of every sample -> batches as `order` plans them."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """One rank's images of a step, as they cross into an engine."""

    images: np.ndarray
    """uint8 [N, size, size, 3], RGB."""
    labels: np.ndarray
    """int64 [N]; -1 marks padding, which does not count."""
    coefficients: np.ndarray | None = None
    """float32 [N]: MixUp's weight of the image itself; None without MixUp."""
    partners: np.ndarray | None = None
    """int64 [N]: MixUp's partner, an index into the image's accumulation part of the batch."""
    is_held: bool = False
    """Whether the images are one array, the same in every batch: an engine may keep them on its device."""
