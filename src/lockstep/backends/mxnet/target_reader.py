"""Weights files as MXNet itself reads them, for the certificate of a conversion."""

from pathlib import Path

import numpy as np

from lockstep.backends.mxnet.framework_import import mx
from lockstep.recipes import Recipe


def read(path: Path, recipe: Recipe) -> dict[str, np.ndarray]:
    """Return the arrays of a `.params` by name, of any shape and dtype. `recipe` is not needed.
    Raises what MXNet raises."""
    return {name: value.asnumpy() for name, value in mx.nd.load(str(path)).items()}
