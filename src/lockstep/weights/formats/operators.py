"""A graph of operators in ONNX's terms, as readers of layers build one: what `network.Graph` is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Operator:
    """A node in ONNX's terms."""

    op_type: str
    """An operator of ONNX; or a name of another program, which is refused."""
    input: list[str]
    output: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class OperatorGraph:
    """Operators and their constants."""

    nodes: Sequence[Operator]
    inputs: Sequence[str]
    outputs: Sequence[str]
    constants: Mapping[str, np.ndarray]
    places: Mapping[str, str]
    """The names under which a file stores constants, by their names in the graph."""
    channels_last: bool = False
    takes_bytes: bool = False
    image_size: int | None = None
    users: dict[str, list[Operator]] = field(init=False)

    def __post_init__(self) -> None:
        self.users = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.input):
                self.users.setdefault(value, []).append(node)

    def attribute(self, node: Operator, name: str, default: Any) -> Any:
        """Return the value of an operator's attribute."""
        return node.attributes.get(name, default)

    def constant(self, name: str) -> np.ndarray | None:
        """Return a constant; None if it is computed from images."""
        return self.constants.get(name)

    def floats(self, name: str, what: str) -> np.ndarray:
        """Return a constant of floats as a new float32 array. Raises `ValueError` if it is
        something else."""
        values = self.constants.get(name)
        if values is None or values.dtype.kind != "f":
            kind = "computed" if values is None else values.dtype
            raise ValueError(f"{what} ({name!r:.80}) is {kind}, expected constant floats")
        return np.array(values, np.float32, order="C")

    def place(self, name: str) -> str | None:
        """Return the name under which a file stores a constant; None if it stores none."""
        return self.places.get(name)
