"""Weights files as Paddle itself reads them, for the certificate of a conversion."""

from pathlib import Path
from typing import Any

from lockstep.backends.paddle.framework_import import paddle
from lockstep.recipes import Recipe


def read(path: Path, recipe: Recipe) -> Any:
    """Return the arrays of a `.pdparams` or `.pdopt` by name, of any shape and dtype. `recipe` is
    not needed.

    Paddle unpickles the file, so it must be one that Lockstep has just written. Raises what Paddle
    raises.
    """
    return paddle.load(str(path), return_numpy=True)
