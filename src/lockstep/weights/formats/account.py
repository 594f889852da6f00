"""The account of a file: what a reader did with every node, layer and tensor of it.

A reader computes with a part, folds it into the network's own tensors or preprocessing, or knows
that it changes nothing in inference. The user may leave out others. A file with any other part is
refused, with the name of the part.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.system.errors import CheckpointError
from lockstep.system.text import list_first
from lockstep.weights.weights_choice import WeightsChoice

Treatment = Literal["folded", "without effect", "ignored"]


@dataclass(frozen=True)
class Part:
    """A node, a layer or a tensor of a file that no tensor of the network is made of alone."""

    name: str
    """Its name in the file, after its operator or class if it has one: `Gather 'y'`."""
    treatment: Treatment
    reason: str = ""
    """Into what it is folded, or why it has no effect: "into the classifier"."""


def split_ignored(
    shapes: Mapping[str, tuple[int, ...]], choice: WeightsChoice
) -> tuple[dict[str, tuple[int, ...]], tuple[Part, ...]]:
    """Return the tensors that a network may have, by name, and the account of those that the user
    leaves out."""
    kept = {name: shape for name, shape in shapes.items() if not choice.is_ignored(name)}
    return kept, tuple(Part(name, "ignored") for name in shapes if name not in kept)


def refuse_leftover(
    path: Path | str, network: str, names: Iterable[str], kind: str = "tensors"
) -> CheckpointError:
    """Return the error for a file that holds a network and others of this kind, with these names,
    of which nobody knows what they do."""
    names = [re.sub(r"[\x00-\x1f\x7f-\x9f\[']", "?", name) for name in names]  # as patterns
    options = "".join(f" --ignore '{name}'" for name in names[:3])
    more = " ..." if len(names) > 3 else ""
    return CheckpointError(
        f"{path} is {network} with {kind} that this network does not compute with:"
        f" {list_first(names, 1)}; they may change its results. If they have no effect on"
        f" inference, leave them out: lockstep convert {path} weights.safetensors{options}{more}"
    )


def check_outputs(path: Path | str, logits: int) -> None:
    """Raise `CheckpointError` if a network has one output, of which a softmax is always 1."""
    if logits == 1:
        raise CheckpointError(
            f"{path} has one output; expected at least 2, since a softmax of one output is always"
            " 100 %, and the file does not say whether its program takes the sigmoid or the number"
            " itself"
        )
