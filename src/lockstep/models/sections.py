"""The sections of a model (stem, residual blocks, classifier), and prefixes of tensor names.

A prefix is one or more whole parts of a name: "layer1" and "layer1.0.bn1" are prefixes of
"layer1.0.bn1.weight", "layer" is not. The prefix `BACKBONE` stands for all but the classifier.
"""

import difflib
from collections.abc import Iterable

from lockstep.models.architectures import ModelSpec
from lockstep.system.errors import nearest

BACKBONE = "backbone"
STEM = "stem"
CLASSIFIER = "fc"


def sections(spec: ModelSpec) -> list[str]:
    """Return the sections of a model from the classifier down.

    >>> from lockstep.models.architectures import MODELS
    >>> sections(MODELS["resnet18"])[:3], sections(MODELS["resnet18"])[-2:]
    (['fc', 'layer4.1', 'layer4.0'], ['layer1.0', 'stem'])
    """
    names = [block.name for block in spec.list_blocks()]
    return [CLASSIFIER, *reversed(names), STEM]


def find_section(name: str) -> str:
    """Return the section that a tensor belongs to.

    >>> find_section("layer1.0.bn1.weight"), find_section("bn1.bias"), find_section("fc.weight")
    ('layer1.0', 'stem', 'fc')
    """
    first, second, *_ = name.split(".")
    if first == CLASSIFIER:
        return CLASSIFIER
    return f"{first}.{second}" if first.startswith("layer") else STEM


def has_prefix(name: str, prefix: str) -> bool:
    """Return whether the name of a tensor begins with a prefix.

    >>> has_prefix("layer1.10.bn1.bias", "layer1"), has_prefix("layer1.10.bn1.bias", "layer1.1")
    (True, False)
    """
    if prefix == BACKBONE:
        return find_section(name) != CLASSIFIER
    return f"{name}.".startswith(f"{prefix}.")


def count_parts(prefix: str) -> int:
    """Return the length of a prefix in parts of a name. It is 0 for `BACKBONE`."""
    return 0 if prefix == BACKBONE else prefix.count(".") + 1


def check_prefixes(field: str, prefixes: Iterable[str], names: Iterable[str]) -> None:
    """Raise `ValueError` for a prefix that none of the names of tensors has."""
    prefixes = list(prefixes)
    if not prefixes:
        return
    known = {BACKBONE: None}
    for name in names:
        parts = name.split(".")
        known |= {".".join(parts[:count]): None for count in range(1, len(parts) + 1)}
    for prefix in prefixes:
        if prefix not in known:
            near = difflib.get_close_matches(prefix, known)
            short = [name for name in known if "." not in name]
            raise ValueError(
                f"{field}: no trained tensor of the model begins with {prefix!r}."
                f" {nearest(prefix, near or short)}"
            )
