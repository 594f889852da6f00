"""Features before the classifier: weights whose logits include them, and the file that `lockstep
predict` writes."""

import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from lockstep.models.state import State
from lockstep.system.files import replacing
from lockstep.weights import Weights

_AT_ONCE = 2**22
"""Bytes that are copied at once."""
_NAMES_AT_ONCE = 2**12


def add_features(weights: Weights) -> Weights:
    """Return weights with more logits: first the features before the classifier, then the logits of
    the given weights.

    With an identity matrix above the classifier's own rows, every runtime returns the features as
    its classifier receives them, with the rounding of the precision or quantisation, in the same
    computation as the logits.
    """
    count = weights.recipe.spec.features
    tensors = dict(weights.tensors)
    tensors["fc.weight"] = np.concatenate([np.eye(count, dtype=np.float32), tensors["fc.weight"]])
    tensors["fc.bias"] = np.concatenate([np.zeros(count, np.float32), tensors["fc.bias"]])
    logits = count + weights.recipe.logits
    recipe = weights.recipe.replace(logits=logits, class_weights="none")
    return replace(weights, recipe=recipe, state=State(weights.state.step, tensors, {}), classes=())


class Embeddings:
    """Features and paths of images, kept on disk until `write`: they need not fit in memory."""

    def __init__(self, features: int, rows: IO[bytes], names: IO[bytes]) -> None:
        self._features = features
        self._rows = rows
        self._names = names
        self._images = 0
        self._longest = 0

    def add(self, path: str, row: np.ndarray) -> None:
        """Add the features of an image, float32 [features]."""
        self._rows.write(np.ascontiguousarray(row, "<f4").data)
        self._names.write(os.fsencode(path) + b"\0")
        self._images += 1
        self._longest = max(self._longest, len(path))

    def write(self, path: Path) -> None:
        """Write a file of `numpy.load`: `features`, float32 [images, features], and `paths`, text
        [images]."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            with archive.open("features.npy", "w", force_zip64=True) as member:
                _write_header(member, "<f4", (self._images, self._features))
                self._rows.seek(0)
                while piece := self._rows.read(_AT_ONCE):
                    member.write(piece)
            about = zipfile.ZipInfo("paths.npy")
            # NumPy makes all texts as long as the longest one.
            about.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(about, "w", force_zip64=True) as member:
                text = f"<U{max(self._longest, 1)}"
                _write_header(member, text, (self._images,))
                for names in self._read_names():
                    member.write(np.array(names, text).tobytes())

    def _read_names(self) -> Iterator[list[str]]:
        """Yield the paths, some at a time."""
        self._names.seek(0)
        rest = b""
        while piece := self._names.read(_AT_ONCE):
            *names, rest = (rest + piece).split(b"\0")
            for first in range(0, len(names), _NAMES_AT_ONCE):
                yield [os.fsdecode(name) for name in names[first : first + _NAMES_AT_ONCE]]


def _write_header(file: IO[bytes], dtype: str, shape: tuple[int, ...]) -> None:
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype, "fortran_order": False, "shape": shape}
    )


@contextmanager
def write_embeddings(path: Path, features: int) -> Iterator[Embeddings]:
    """Yield a collector of features. When the block ends, the file `path` appears complete; after
    an error it does not appear.

    Until then, hidden files in the same folder hold them. They take as much room as the file.
    Raises `OSError`.
    """
    with (
        replacing(path) as partial,
        tempfile.TemporaryFile(dir=path.parent) as rows,
        tempfile.TemporaryFile(dir=path.parent) as names,
    ):
        embeddings = Embeddings(features, rows, names)
        yield embeddings
        embeddings.write(partial)
