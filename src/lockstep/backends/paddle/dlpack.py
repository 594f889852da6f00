"""Images that a loader lends by DLPack: copied on the device, without main memory."""

from collections import deque
from typing import Any

import numpy as np
import paddle

from lockstep.backends.paddle.world import Tensor
from lockstep.data import LentImages

_CPU = 1
_CUDA = 2
"""DLPack's types of these devices."""


class Borrower:
    """Copies lent images to an engine's device. On a GPU the host does not wait for the copy."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._lent: deque[tuple[Any, Tensor]] = deque()
        """Images that are being copied, with the event that follows the copy. They keep the
        loader's memory."""

    def copy(self, images: LentImages) -> Tensor:
        """Return a copy of images on the device."""
        if images.__dlpack_device__()[0] != (_CUDA if self._on_gpu else _CPU):
            return paddle.to_tensor(np.asarray(images))
        while self._lent and self._lent[0][0].query():
            self._lent.popleft()
        lent = paddle.utils.dlpack.from_dlpack(images.__dlpack__())
        copy = lent.clone()
        if self._on_gpu:
            done = paddle.device.cuda.Event()
            done.record(paddle.device.cuda.current_stream())
            self._lent.append((done, lent))
        return copy
