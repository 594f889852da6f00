"""The account of a file: what a reader did with every node, layer and tensor of it.

A reader computes with a part, folds it into the network's own tensors or preprocessing, or knows
that it changes nothing in inference. The user may leave out others. A file with any other part is
refused, with the name of the part.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal, TypeVar

from lockstep.system.errors import CheckpointError
from lockstep.system.text import list_first
from lockstep.weights.weights_choice import WeightsChoice

Value = TypeVar("Value")
Treatment = Literal["folded", "without effect", "ignored"]
UNUSED = "no output is computed from it"
_SPELLED = dict.fromkeys((*range(32), *range(127, 160), *map(ord, "['")), "?")
"""What a pattern in quotation marks cannot hold, as a character that fits it."""


@dataclass(frozen=True)
class Part:
    """A node, layer or tensor of a file that is not by itself a tensor of the network."""

    name: str
    """Its name in the file, after its operator or class if it has one: `Gather 'y'`."""
    treatment: Treatment
    reason: str = ""
    """Into what it is folded, or why it has no effect: "into the classifier"."""


def describe_key(key: Any) -> str:
    """Return the key of a dict for a message."""
    return key if isinstance(key, str) else f"a {type(key).__name__}"


def split_ignored(
    values: Mapping[Any, Value], choice: WeightsChoice
) -> tuple[dict[Any, Value], tuple[Part, ...]]:
    """Return the values of a file, such as tensors by name, that the user does not leave out, and
    the account of the others."""
    kept = {key: value for key, value in values.items() if not choice.is_ignored(describe_key(key))}
    return kept, tuple(Part(describe_key(key), "ignored") for key in values if key not in kept)


def refuse_leftover(
    path: Path | str,
    network: str,
    names: Iterable[str],
    problem: str = "also has tensors that Lockstep would ignore",
    effect: str = "they may change its results",
    used: Collection[str] | None = None,
) -> CheckpointError:
    """Return the error for a file with parts that its network does not compute with: `problem` says
    what they are. The error names them, their effect and the command that leaves them out, in few
    patterns that fit none of the names `used`, if these are known."""
    names = list(names)
    patterns: dict[str, None] = {}
    for name in names:
        starts = [name[: dot.end()] for dot in re.finditer(r"[./]", name)]
        if used is None:
            starts = starts[-1:]
        free = [start for start in starts if not any(one.startswith(start) for one in used or ())]
        patterns[f"{free[0]}*" if free and len(names) > 3 else name] = None
    first = list_first(names, 1).translate(_SPELLED)
    options = "".join(f" --ignore '{pattern.translate(_SPELLED)}'" for pattern in patterns)
    return CheckpointError(
        f"{path} looks like {network}, but {problem}: {first}; {effect}. If they have no effect on"
        f" inference, leave them out: lockstep convert {quote(str(path))} weights.safetensors"
        f"{options}"
    )


def account_for_constants(
    names: Iterable[str], used: Collection[str], users: Mapping[str, str]
) -> Iterator[Part]:
    """Yield the account of the constants that no tensor is made of. `users` are what computes with
    them."""
    for name in names:
        if name in used:
            continue
        if name in users:
            yield Part(name, "folded", f"into {users[name]}")
        else:
            yield Part(name, "without effect", UNUSED)


def check_outputs(path: Path | str, logits: int) -> None:
    """Raise `CheckpointError` if a network has one output, whose softmax is always 1."""
    if logits == 1:
        raise CheckpointError(
            f"{path} has one output; expected at least 2, since a softmax of one output is always"
            " 100 %. If its program computes a sigmoid, which the file does not say, export the"
            " model with the sigmoid to ONNX, and name that file"
        )
