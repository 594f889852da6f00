"""Names that one release still accepts, and the names that replace them."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def accept_old_names(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: the function also accepts arguments under old names, with a warning.

    `names` has the new name of every old one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{new} is given twice: {old} is its old name")
                warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
