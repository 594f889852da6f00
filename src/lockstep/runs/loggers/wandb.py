"""Weights & Biases, through its own client. It is offline by default; WANDB_MODE changes that.

Offline, figures stay in the run's folder. `wandb sync RUN/wandb/offline-run-*` sends them.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.runs.loggers import Logger, Opening, Outcome, Picture


class WeightsAndBiases(Logger):
    """A resumed run keeps its id."""

    def __init__(self, opening: Opening) -> None:
        import wandb

        self._image = wandb.Image
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lockstep"),
            id=opening.key,
            resume="allow",
            name=opening.folder.resolve().name,
            dir=str(opening.folder),
            config=dict(opening.about),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        self.key = self._run.id

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """Log figures."""
        self._run.log(dict(values), step=step)

    def images(self, pictures: Sequence[Picture], step: int) -> None:
        """Log images with their captions."""
        images = {}
        for picture in pictures:
            images[picture.name] = self._image(picture.pixels, caption=picture.caption)
        self._run.log(images, step=step)

    def close(self, outcome: Outcome) -> None:
        """Write the remaining figures and record how the process ended."""
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


open_logger = WeightsAndBiases
