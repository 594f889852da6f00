"""Images that a loader lends by DLPack: copied on the device, without main memory."""

from collections import deque

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lockstep.data import LentImages

_CPU = 1
_CUDA = 2
"""DLPack's types of these devices."""


class Borrower:
    """Copies lent images to an engine's device. From a GPU to the same GPU, the host does not wait
    for the copy."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._lent: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        """Images that are being copied, with what is done afterwards. They keep the loader's
        memory."""

    def copy(self, images: LentImages) -> Tensor:
        """Return a copy of images on the device, for work that is enqueued on this stream."""
        if images.__dlpack_device__()[0] != (_CPU if self._stream is None else _CUDA):
            return torch.from_numpy(np.array(images)).to(self._device)
        if self._stream is None:
            return from_dlpack(images).clone()
        while self._lent and self._lent[0][0].query():
            self._lent.popleft()
        with torch.cuda.stream(self._stream):
            lent = from_dlpack(images)  # this stream then waits for the loader's
            copy = lent.clone()
            self._lent.append((self._stream.record_event(), lent))
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        copy.record_stream(current)  # its memory is not used again before this stream has read it
        return copy
