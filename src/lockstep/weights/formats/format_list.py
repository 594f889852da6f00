"""All formats of weights. A new one is a module with these four names, and a line here."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lockstep.system.registry import make_table

if TYPE_CHECKING:
    from lockstep.weights.opened_weights import Weights
    from lockstep.weights.weights_choice import WeightsChoice


class Format(Protocol):
    """A format of weights."""

    NAME: str

    def matches(self, head: bytes, path: Path) -> bool:
        """Return whether a file is in this format by its content, whatever its name is.

        `head` is the beginning of the file: its first `HEAD_BYTES`, or all of it.
        """

    def find(self, path: Path) -> Path | None:
        """Return the file or prefix to read if the name of a path is one of this format; None
        otherwise. The path may be a file, a folder, or a prefix of several files."""

    def read(self, path: Path, *, momentum: bool, choice: "WeightsChoice") -> "Weights":
        """Return the weights of a file or prefix, with velocities and moving average if `momentum`
        is true and the format has them. Of `choice` a reader uses `model` and `ignore`."""


HEAD_BYTES = 4096
FORMATS = make_table(
    "lockstep.weights.formats",
    "lockstep_files",
    "timm_folder",
    "transformers_folder",
    "torch_models",
    "foreign_safetensors",
    "keras_file",
    "flax_file",
    "onnx_weights",
    "tensorflow_weights",
    "nvidia_mxnet",
    "nvidia_paddle",
    "nvidia_tensorflow",
)
"""In the order in which they are tried."""


def load_formats() -> Iterator[Format]:
    """Yield all formats in their order, each imported when it is reached."""
    for row in FORMATS.values():
        yield row.load()
