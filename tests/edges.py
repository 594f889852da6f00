"""What stands where a reader may overlook it: parts inserted into files of other programs.

Each reader's `insertions_<format>.py` inserts parts at four places. `make edges` tries all of them;
other tests take a sample.
"""

import os
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

EDGES = "LOCKSTEP_EDGES" in os.environ

Case = TypeVar("Case")
Place = Literal["before the stem", "between blocks", "before the classifier", "after it"]
PLACES: tuple[Place, ...] = (
    "before the stem",
    "between blocks",
    "before the classifier",
    "after it",
)


def sample(cases: Sequence[Case], every: int) -> Sequence[Case]:
    """Return one case of `every`, or all for `make edges`."""
    return cases if EDGES else cases[::every]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities [N, classes] of logits."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def is_same_answer(output: np.ndarray, logits: np.ndarray, *, bound: float = 1e-4) -> bool:
    """Return whether a program's own output [N, outputs] says what softmax of Lockstep's logits
    says: as probabilities, as logits, or as one sigmoid."""
    probabilities = softmax(logits.astype(np.float64))
    output = output.reshape(len(output), -1).astype(np.float64)
    if output.shape[1] == 1:
        return bool(np.abs(output[:, 0] - probabilities[:, 1]).max() <= bound)
    if output.shape != probabilities.shape:
        return False
    is_probabilities = output.min() >= 0 and np.abs(output.sum(1) - 1).max() <= 1e-3
    theirs = output if is_probabilities else softmax(output)
    return bool(np.abs(theirs - probabilities).max() <= bound)
