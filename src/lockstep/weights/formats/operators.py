"""A graph of operators in ONNX's terms: `Graph`. `network_walk` finds the network in it."""

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
class Graph:
    """Operators and their constants."""

    nodes: Sequence[Any]
    """Each has an operator, `op_type`, and the names of its values: `input`, `output`."""
    inputs: Sequence[str]
    """Names of the inputs that are not constants."""
    outputs: Sequence[str]
    """Names of the values that the graph returns."""
    constants: Mapping[str, np.ndarray]
    places: Mapping[str, str]
    """The names under which a file stores constants, by their names in the graph."""
    channels_last: bool = False
    """Whether constants are added to images and features in the order NHWC."""
    takes_bytes: bool = False
    """Whether the images are integers from 0 to 255."""
    sizes: Sequence[int | None] = ()
    """The fixed sizes of the images: height, width and perhaps 3 for the colours."""
    users: dict[str, list[Any]] = field(init=False)
    """The nodes that use each value, in the order of the graph."""

    def __post_init__(self) -> None:
        self.users = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.input):
                self.users.setdefault(value, []).append(node)

    @property
    def image_size(self) -> int | None:
        """Height and width of the images; None if the graph does not fix them. Raises `ValueError`
        if they differ: Lockstep evaluates squares."""
        sides = sorted({size for size in self.sizes if size is not None and size > 0} - {3})
        if len(sides) > 1:
            raise ValueError(
                f"its images have sides of {sides[0]} and {sides[-1]} pixels, expected squares;"
                " export it for squares, or for any size"
            )
        return sides[0] if sides else None

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        """Return the value of a node's attribute."""
        return node.attributes.get(name, default)

    def constant(self, name: str) -> np.ndarray | None:
        """Return a constant; None if it is computed from images. Raises `ValueError`."""
        return self.constants.get(name)

    def floats(self, name: str, what: str) -> np.ndarray:
        """Return a constant of floats as a new float32 array. Raises `ValueError` if it is
        something else."""
        values = self.constant(name)
        if values is None or (values.dtype.kind != "f" and values.dtype.name != "bfloat16"):
            kind = "computed" if values is None else values.dtype
            raise ValueError(
                f"{what} ({name!r:.80}) is {kind}, expected constant floats; export the model"
                " without quantization"
            )
        return np.array(values, np.float32, order="C")

    def place(self, name: str) -> str | None:
        """Return the name under which a file stores a constant; None if it stores none."""
        return self.places.get(name)
