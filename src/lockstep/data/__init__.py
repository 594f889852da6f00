"""From images on disk to an index of all samples, and to batches as `order` plans them."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class LentImages(Protocol):
    """Images that a loader left where it decoded them, such as on a GPU, and lends by DLPack.

    Readers must keep this object until they have read them; then the memory is reused.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, size, size, 3]."""

    def __len__(self) -> int: ...

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        """Return a DLPack capsule of the images, which are there for work that is enqueued on
        `stream` from now on."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type of the device, and the device's number."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return a copy in main memory."""


@dataclass(frozen=True)
class Batch:
    """The images of one rank and step, as an engine receives them."""

    images: np.ndarray | LentImages
    """uint8 [N, size, size, 3], RGB."""
    labels: np.ndarray
    """int64 [N]. -1 marks padding, which does not count."""
    coefficients: np.ndarray | None = None
    """float32 [N]: MixUp's weight of the image itself, 1 where it is not mixed; None without MixUp
    and CutMix."""
    partners: np.ndarray | None = None
    """int64 [N]: MixUp's or CutMix's partner, an index into the image's accumulation part of the
    batch."""
    kept_features: np.ndarray | None = None
    """bool [N, features]: the features of each image that dropout leaves; None without dropout."""
    kept_blocks: np.ndarray | None = None
    """bool [N, blocks]: the blocks of each image that stochastic depth leaves; None without it."""
    target_coefficients: np.ndarray | None = None
    """float32 [N]: weight of the image's own label in its target; the partner's label has the rest.
    None: as `coefficients`."""
    boxes: np.ndarray | None = None
    """int32 [N, 4]: top, left, height and width of the box in which the image has its partner's
    pixels, for CutMix; 0 where there is none. None if no image has one. A batch has both
    this and `target_coefficients`, or neither."""
    is_held: bool = False
    """Whether every batch has the same array of images, so that an engine may keep it on its
    device."""

    @property
    def pixels(self) -> np.ndarray:
        """The images in main memory: the array itself, or a copy of images that are lent, for which
        the host waits."""
        return np.asarray(self.images)
