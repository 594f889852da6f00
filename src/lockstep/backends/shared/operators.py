"""Values of a graph that is being built, with Python's operators."""

from abc import ABC, abstractmethod
from typing import Any, Self


class Operand(ABC):
    """A value. Its operators + - * / // add nodes to the graph; the other operand is a value or a
    plain number."""

    @abstractmethod
    def combine(self, operation: str, other: Any) -> Self:
        """Return the result of "add", "subtract", "multiply" or "divide" with another operand, of
        the type of this one.

        Integers are divided rounding down. Only integers that are not negative are divided.
        """

    def __add__(self, other: Any) -> Self:
        return self.combine("add", other)

    def __sub__(self, other: Any) -> Self:
        return self.combine("subtract", other)

    def __mul__(self, other: Any) -> Self:
        return self.combine("multiply", other)

    def __rmul__(self, other: Any) -> Self:
        return self.combine("multiply", other)

    def __truediv__(self, other: Any) -> Self:
        return self.combine("divide", other)

    def __floordiv__(self, other: Any) -> Self:
        return self.combine("divide", other)

    def __neg__(self) -> Self:
        return self.combine("multiply", -1)
