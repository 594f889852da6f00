"""What the program that wrote a file computes with it, for the certificate of a conversion.

The program gets only what the reader of the file has accounted for, rebuilt from what was parsed:
known operators, built-in layers and arrays. It never opens the file itself. It computes in a
separate process, whose memory and time are limited.
"""

import importlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import save_file

from lockstep import backends
from lockstep.recipes import Recipe
from lockstep.system.files import write_json
from lockstep.system.workers import carry_out, end_with_parent
from lockstep.weights.calibration import compute_probabilities

Takes = Literal["bytes", "unit", "normalised", "bgr", "bgr bytes", "bgr unit"]
"""What values a network takes: those from 0 to 255, from 0 to 1, or normalised by the recipe, and
perhaps in the order blue, green, red."""
Kind = Literal["logits", "probabilities", "log_probabilities", "sigmoid"]
_SECONDS = 1200
_MOST_BYTES = 16 * 2**30
"""What the process may allocate. ResNet-152 takes 2 GiB in the largest framework."""


@dataclass(frozen=True)
class Program:
    """A program that computes what other programs' files hold."""

    module: str
    """The module with `compute(folder, images)`, which returns the outputs, [N, outputs], and the
    program's version. That of a backend runs in the backend's Python."""
    packages: tuple[str, ...] = ()
    """The packages that it needs in this Python instead; one of them is enough."""

    @property
    def backend(self) -> str:
        """The backend whose Python has it; "" for this Python."""
        return "" if self.packages else self.module.split(".")[2]


PROGRAMS = {
    "ONNX Runtime": Program("lockstep.weights.formats.onnx_original", ("onnxruntime",)),
    "TensorFlow": Program("lockstep.backends.tensorflow.certificate"),
    "Keras": Program("lockstep.backends.tensorflow.certificate"),
    "MXNet": Program("lockstep.backends.mxnet.certificate"),
    "Paddle": Program("lockstep.backends.paddle.certificate"),
    "transformers": Program("lockstep.backends.torch.certificate", ("transformers",)),
    "torchvision or timm": Program("lockstep.backends.torch.certificate", ("timm", "torchvision")),
}


@dataclass(frozen=True)
class Original:
    """A file's network, as its program computes it."""

    program: str
    """A name in `PROGRAMS`."""
    write: Callable[[Path], None]
    """Writes what `Program.module` reads into a folder. Raises `ValueError` if the network cannot
    be rebuilt."""
    takes: Takes = "normalised"
    channels_last: bool = False
    kind: Kind = "logits"
    """What the network returns."""
    rounds: bool = False
    """Whether it rounds where Lockstep does not: in half precision, or to integers."""


MODULES = dict.fromkeys(("timm", "torchvision", "PyTorch"), "torchvision or timm")
MODULES["paddle.vision"] = "Paddle"
"""The programs whose own networks take tensors by name, by the origin of weights."""


def rebuild_module(
    origin: str, recipe: Recipe, tensors: Mapping[str, np.ndarray]
) -> Original | None:
    """Return the network of a program that has it by name; None if no program is known."""
    if origin not in MODULES or not isinstance(recipe.model, str):
        return None

    def write(folder: Path) -> None:
        arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
        save_file(arrays, folder / "module.safetensors")
        write_json(folder / "module.json", {"model": recipe.model, "logits": recipe.logits})

    return Original(MODULES[origin], write)


def find_missing(original: Original) -> str:
    """Return why the program of an original cannot compute here; "" if it can."""
    program = PROGRAMS[original.program]
    if program.backend:
        is_there = backends.find_interpreter(program.backend) is not None
    else:
        is_there = any(map(importlib.util.find_spec, program.packages))
    return "" if is_there else f"{original.program} is not installed"


def compute_original(
    original: Original, squares: np.ndarray, recipe: Recipe, folder: Path
) -> tuple[str, np.ndarray]:
    """Return the program's name and version, and the probabilities, float64 [N, classes], that it
    computes for images, uint8 [N, size, size, 3] in RGB. `folder` gets its files.

    Raises `ValueError` if the network cannot be rebuilt, or the program fails or takes too much
    memory or time.
    """
    program = PROGRAMS[original.program]
    folder.mkdir()
    original.write(folder)
    np.save(folder / "images.npy", _prepare(original, squares, recipe))
    python = Path(sys.executable)
    if program.backend:
        python = backends.find_interpreter(program.backend) or python
    module = ("-P", "-m", "lockstep.weights.original")
    command: list[str | Path] = [python, *module, folder, program.module]
    ended = carry_out(command, folder, lambda done, total: None)
    if ended.code:
        last = ended.errors.rpartition("\n")[2] or f"exit code {ended.code}"
        raise ValueError(f"{original.program} cannot compute it here: {last:.300}")
    outputs = np.load(folder / "outputs.npy").astype(np.float64)
    version = (folder / "version.txt").read_text(encoding="utf-8")
    return version, _read_probabilities(outputs, original.kind)


def _prepare(original: Original, squares: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return images as the network takes them, float32."""
    images: np.ndarray = squares.astype(np.float32)
    if original.takes.endswith("unit"):
        images = images / np.float32(255)
    elif not original.takes.endswith("bytes"):
        images = (images - np.array(recipe.mean, np.float32)) / np.array(recipe.std, np.float32)
    if original.takes.startswith("bgr"):
        images = images[..., ::-1]
    if not original.channels_last:
        images = images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images)


def _read_probabilities(outputs: np.ndarray, kind: Kind) -> np.ndarray:
    """Return probabilities [N, classes] of a network's outputs. Raises `ValueError` if they have
    more axes than one for images and one for classes."""
    if len([size for size in outputs.shape[1:] if size != 1]) > 1:
        raise ValueError(f"it returns {list(outputs.shape)}, expected one number for each class")
    outputs = outputs.reshape(len(outputs), -1)
    if kind == "sigmoid":
        return np.concatenate([1 - outputs, outputs], axis=1)
    if kind == "probabilities":
        return outputs
    return compute_probabilities(outputs)


def main(folder: Path, module: str) -> None:
    """Compute the images in a folder, with limits."""
    import resource  # Windows does not have it

    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    signal.alarm(_SECONDS)
    outputs, version = importlib.import_module(module).compute(
        folder, np.load(folder / "images.npy")
    )
    np.save(folder / "outputs.npy", outputs)
    (folder / "version.txt").write_text(version, encoding="utf-8")


if __name__ == "__main__":
    end_with_parent()
    main(Path(sys.argv[1]), sys.argv[2])
