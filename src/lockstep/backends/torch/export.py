"""Programs of PyTorch: the recipe's preprocessing, the model and softmax in one TorchScript or
`torch.export` archive."""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.backends.shared.resize import Operations, crop_centre, read_geometry
from lockstep.backends.torch import load_module
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.files import lines, write_lines

CLASSES = "classes.txt"
"""The extra file of an archive that names the classes, one on each line. The same file is next to
the archive."""


def export_torchscript(
    recipe: Recipe, tensors: dict[str, np.ndarray], classes: tuple[str, ...], folder: Path
) -> None:
    """Write `model.pt`, a TorchScript program for `torch.jit.load` and libtorch.

    The program takes `images`, uint8 RGB [N, H, W, 3] of any size, and returns a dictionary:
    `classes`, int64 [N], and `probabilities`, float32 [N, logits]. Images are resized and cropped
    as in evaluation (`lockstep.backends.shared.resize`). The names of the classes are in
    `classes.txt`, in the archive and next to it. Raises `CheckpointError` if the recipe computes in
    another precision than fp32, or if the tensors do not fit.
    """
    program = PhotoProgram(recipe, tensors)
    example = torch.zeros(2, recipe.eval_resize + 1, recipe.eval_resize + 14, 3, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Tracing warns that SAME padding depends on the size of its input. That size is always the
        # evaluation's.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        # A check would trace it again. Without "strict", a dictionary may be returned.
        traced = torch.jit.trace(program, example, check_trace=False, strict=False)
    folder.mkdir()
    extra = {CLASSES: lines(classes)} if classes else {}
    torch.jit.save(torch.jit.script(_Checked(traced)), str(folder / "model.pt"), _extra_files=extra)
    write_lines(folder / CLASSES, classes)


def export_program(
    recipe: Recipe, tensors: dict[str, np.ndarray], classes: tuple[str, ...], folder: Path
) -> None:
    """Write `model.pt2`, a program for `torch.export.load`.

    Inputs, outputs, `classes.txt` and errors are those of `export_torchscript`.
    """
    program = PhotoProgram(recipe, tensors)
    # Lengths of 0 and 1 would become constants of the program, and so would lengths that are equal.
    example = torch.zeros(2, recipe.eval_resize + 1, recipe.eval_resize + 14, 3, dtype=torch.uint8)
    dynamic = dict.fromkeys((0, 1, 2), torch.export.Dim.DYNAMIC)
    exported = torch.export.export(program, (example,), dynamic_shapes={"images": dynamic})
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names the folder that Lockstep is installed in
    folder.mkdir()
    extra = {CLASSES: lines(classes)} if classes else {}
    torch.export.save(exported, folder / "model.pt2", extra_files=extra)
    write_lines(folder / CLASSES, classes)


def open_program(folder: Path) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the program in a folder, loaded by PyTorch's own loader: from uint8 images to classes
    and probabilities."""
    script = folder / "model.pt"
    program = (
        torch.jit.load(str(script))
        if script.is_file()
        else torch.export.load(folder / "model.pt2").module()
    )

    def answer(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            answers = program(torch.tensor(images))
        return answers["classes"].numpy(), answers["probabilities"].numpy()

    return answer


class PhotoProgram(nn.Module):
    """Photos to classes and probabilities: `forward` takes uint8 RGB [N, H, W, 3].

    Raises `CheckpointError` if the recipe computes in another precision than fp32, or if the
    tensors do not fit.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, recipe: Recipe, tensors: dict[str, np.ndarray]) -> None:
        super().__init__()
        if recipe.precision != "fp32":
            raise CheckpointError(
                f"a program for PyTorch is in fp32, not in {recipe.precision}; leave out precision"
            )
        self.model = load_module(recipe, tensors).requires_grad_(False)
        self.geometry = read_geometry(recipe)
        self.register_buffer("mean", torch.tensor(recipe.mean, dtype=torch.float32).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(recipe.std, dtype=torch.float32).view(3, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return classes, int64 [N], and probabilities, float32 [N, logits]."""
        logits = self.model((self.crop(images) - self.mean) / self.std)
        return {"classes": logits.argmax(dim=1), "probabilities": logits.softmax(dim=1)}

    def crop(self, images: Tensor) -> Tensor:
        """Return what the model sees of photos, before it is normalised: float32 [N, 3, S, S]."""
        squares: Tensor = crop_centre(images, self.geometry, _Operations())
        return squares


class SquareProgram(PhotoProgram):
    """The same for squares: uint8 RGB [N, S, S, 3]."""

    def crop(self, images: Tensor) -> Tensor:
        """Return the squares in the model's layout: float32 [N, 3, S, S]."""
        return images.to(torch.float32).permute(0, 3, 1, 2)


class _Checked(nn.Module):
    """A program that refuses images of the wrong type or shape. TorchScript compiles it; tracing
    would lose the check."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return what the program returns. Raises `ValueError`, as it runs without Lockstep."""
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[3] != 3:
            raise ValueError(
                "images have the wrong type or shape; expected uint8 RGB [N, height, width, 3]"
            )
        answers: dict[str, Tensor] = self.program(images)
        return answers


class _Operations(Operations):
    """`lockstep.backends.shared.resize.Operations` of PyTorch."""

    module = torch

    def length(self, images: Tensor, axis: int) -> int:
        return images.shape[axis]

    def integer(self, length: int) -> Tensor:
        return torch.zeros((), dtype=torch.int64) + length

    def count(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end).to(torch.float64)

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        return value.to(getattr(torch, dtype))

    def clip(self, value: Tensor, low: float, high: float) -> Tensor:
        return value.clamp(low, high)

    def total(self, value: Tensor, axis: int) -> Tensor:
        return value.sum(dim=axis, keepdim=True)

    def take(self, pixels: Tensor, index: Tensor, axis: int) -> Tensor:
        return pixels.index_select(axis, index)

    def transpose(self, value: Tensor, axes: tuple[int, ...]) -> Tensor:
        return value.permute(axes)
