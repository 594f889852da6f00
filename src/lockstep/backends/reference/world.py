"""A single process on a CPU."""

import platform

from lockstep.backends import HostQuestions
from lockstep.recipes import Execution


class ReferenceWorld(HostQuestions):
    """A single process."""

    rank = 0
    ranks = 1
    on_gpu = False

    def __init__(self, execution: Execution) -> None:
        self.device = f"{devices()[0]}, {execution.reference_dtype}"

    def _largest(self, values: list[int]) -> list[int]:
        return values

    def close(self) -> None:
        """Do nothing."""


def devices() -> list[str]:
    """Return the processor."""
    return [f"CPU, NumPy on {platform.machine()}"]
