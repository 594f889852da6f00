"""TensorBoard's event files in `tensorboard/`, through tensorboardX."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.runs.loggers import Logger, Opening, Outcome, Picture

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


class TensorBoard(Logger):
    """`purge_step` makes TensorBoard discard figures
    that are sent again."""

    key = "tensorboard"

    def __init__(self, opening: Opening) -> None:
        # File names hold the second of opening. The suffix keeps files that are opened in the same
        # second apart.
        self._events = _writer()(
            str(opening.folder / "tensorboard"),
            purge_step=opening.step + 1,
            flush_secs=10,
            filename_suffix=f".{opening.step:08d}",
        )

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars."""
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def images(self, pictures: Sequence[Picture], step: int) -> None:
        """Add images."""
        for picture in pictures:
            self._events.add_image(picture.full_name, picture.pixels, step, dataformats="HWC")

    def close(self, outcome: Outcome) -> None:
        """Close the file."""
        self._events.close()


open_logger = TensorBoard


def _writer() -> "type[SummaryWriter]":
    # tensorboardX imports PyTorch if it is installed, but works without it. A process must load
    # only its own framework.
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if absent:
            del sys.modules["torch"]
    return SummaryWriter
