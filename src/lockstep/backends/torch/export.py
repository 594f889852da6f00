"""Programs of PyTorch: the recipe's preprocessing, the model and softmax in one TorchScript or `torch.export` archive."""

import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.backends.shared.resizing import samples_itself
from lockstep.backends.torch import load_module
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.files import lines, write_lines

CLASSES = "classes.txt"
"""The extra file of an archive that names the classes, one on each line. The same file is next to the archive."""


def export_torchscript(recipe: Recipe, tensors: dict[str, np.ndarray], classes: tuple[str, ...], folder: Path) -> None:
    """Write `model.pt`, a TorchScript program for `torch.jit.load` and libtorch.

    The program takes `images`, uint8 RGB [N, H, W, 3] of any size, and returns a dictionary: `classes`, int64 [N], and
    `probabilities`, float32 [N, logits]. Images of the evaluation's size are used unchanged. Others are resized and cropped
    as in evaluation. The names of the classes are in `classes.txt`, in the archive and next to it. Raises `CheckpointError`
    if the recipe computes in another precision than fp32, if the tensors do not fit, or if the program would have to filter
    in the geometry of an original (`lockstep.backends.shared.resizing`).
    """
    program = _Program(recipe, _model(recipe, tensors))
    example = torch.zeros(2, 3, recipe.eval_crop, recipe.eval_crop)
    with warnings.catch_warnings():
        # Tracing warns that SAME padding depends on the size of its input. That size is always the evaluation's.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        program.model = torch.jit.trace(program.model, example, check_trace=False)  # a check would trace it again
    folder.mkdir()
    extra = {CLASSES: lines(classes)} if classes else {}
    torch.jit.save(torch.jit.script(program), str(folder / "model.pt"), _extra_files=extra)
    write_lines(folder / CLASSES, classes)


def export_program(recipe: Recipe, tensors: dict[str, np.ndarray], classes: tuple[str, ...], folder: Path) -> None:
    """Write `model.pt2`, a program for `torch.export.load`.

    Inputs, outputs, `classes.txt` and errors are those of `export_torchscript`.
    """
    program = _Program(recipe, _model(recipe, tensors))
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


def answers(folder: Path, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return classes and probabilities of uint8 images, from the program in a folder, loaded by PyTorch's own loader."""
    script = folder / "model.pt"
    program = torch.jit.load(str(script)) if script.is_file() else torch.export.load(folder / "model.pt2").module()
    with torch.no_grad():
        found = program(torch.from_numpy(images))
    return found["classes"].numpy(), found["probabilities"].numpy()


def _model(recipe: Recipe, tensors: dict[str, np.ndarray]) -> nn.Module:
    if recipe.precision != "fp32":
        raise CheckpointError(f"a program for PyTorch is in fp32, not in {recipe.precision}; leave out precision")
    return load_module(recipe, tensors).requires_grad_(False)


class _Program(nn.Module):
    """Bytes of images to classes and probabilities.

    `forward` is compiled by TorchScript and traced by `torch.export`, with heights and widths as symbols. Therefore nothing
    branches on them: integer arithmetic decides.
    """

    mean: Tensor
    std: Tensor
    positions: Tensor

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.crop, self.shorter_side = recipe.eval_crop, recipe.eval_resize
        self.filter, self.antialias = recipe.interpolation, recipe.eval_antialias
        self.samples = samples_itself(recipe, "a program for PyTorch")
        self.side_rounding, self.offset_rounding = recipe.eval_side_rounding, recipe.eval_offset_rounding
        self.sampling = recipe.eval_sampling
        self.register_buffer("mean", torch.tensor(recipe.mean, dtype=torch.float32).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(recipe.std, dtype=torch.float32).view(3, 1, 1))
        self.register_buffer("positions", torch.arange(recipe.eval_crop))
        self.eval()

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return classes and probabilities. Raises `ValueError`, as the program runs without Lockstep."""
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[3] != 3:
            raise ValueError("images have another type or shape; expected uint8 RGB [N, height, width, 3]")
        pixels = images.permute(0, 3, 1, 2).to(torch.float32)
        squares = self._sampled(pixels) if self.samples else self._centre(pixels)
        logits = self.model((squares - self.mean) / self.std)
        return {"classes": logits.argmax(dim=1), "probabilities": logits.softmax(dim=1)}

    def _centre(self, images: Tensor) -> Tensor:
        """Return the centre squares [N, 3, crop, crop] as in `lockstep.recipes.order.centre_plan`, in whole numbers."""
        height, width = images.shape[2], images.shape[3]
        # 0 for images of the evaluation's size only. Their resize is to the same size and changes nothing.
        difference = max(height, self.crop) - min(height, self.crop) + max(width, self.crop) - min(width, self.crop)
        side = self.crop + (self.shorter_side - self.crop) * min(difference, 1)
        shorter = min(height, width)
        rows, columns = side * height // shorter, side * width // shorter
        if self.antialias:
            # Pillow resizes rows first and rounds them to bytes.
            images = _resized(images, height, columns, self.filter, antialias=True)
        images = _resized(images, rows, columns, self.filter, antialias=self.antialias)
        # A slice of all rows and columns would make the layout in memory depend on the size, which torch.export refuses.
        images = images.index_select(2, self.positions + _offset(rows - self.crop))
        return images.index_select(3, self.positions + _offset(columns - self.crop))

    def _sampled(self, images: Tensor) -> Tensor:
        """Return the centre squares in the geometry of the recipe, as `lockstep.data.decoding.sampling` does."""
        zero = self.positions[0]  # lengths become tensors, in which float32 rounds as in NumPy
        height, width = zero + images.shape[2], zero + images.shape[3]
        shorter = torch.minimum(height, width)
        is_square = (height == self.crop) & (width == self.crop)
        for axis, length in ((2, height), (3, width)):
            at = torch.where(is_square, self.positions.to(torch.float32), self._positions(length, shorter))
            lower = at.floor()
            share = (at - lower).view([-1, 1] if axis == 2 else [-1])
            first = torch.minimum(lower.to(torch.int64).clamp(min=0), length - 1)
            second = torch.minimum(lower.to(torch.int64).clamp(min=-1) + 1, length - 1)
            before, after = images.index_select(axis, first), images.index_select(axis, second)
            images = before + (after - before) * share
        return (images + 0.5).floor()

    def _positions(self, length: Tensor, shorter: Tensor) -> Tensor:
        """Return where the square samples along an axis: float32 [crop], 0 is the centre of the first pixel."""
        resized = self._side(length, shorter)
        surplus = resized - self.crop
        half = torch.div(surplus, 2, rounding_mode="floor")
        odd = surplus - 2 * half
        if self.offset_rounding == "even":
            odd = odd * (half - 2 * torch.div(half, 2, rounding_mode="floor"))
        offset = half if self.offset_rounding == "down" else half + odd
        step = length.to(torch.float32) / resized.to(torch.float32)
        start = torch.zeros_like(step)
        if self.sampling == "half_pixel_symmetric":
            step = shorter.to(torch.float32) / self._side(shorter, shorter).to(torch.float32)
            start = (length - resized * step) / 2
        elif self.sampling == "asymmetric":
            start = 0.5 - 0.5 * step
        return start + (offset + self.positions + 0.5) * step - 0.5

    def _side(self, length: Tensor, shorter: Tensor) -> Tensor:
        """Return the length of a side after the resize, int64 [], rounded as `eval_side_rounding` says."""
        if self.side_rounding == "nearest":
            return torch.div(2 * self.shorter_side * length + shorter, 2 * shorter, rounding_mode="floor")
        if self.side_rounding == "down":
            return torch.div(self.shorter_side * length, shorter, rounding_mode="floor")
        # A number divided by a tensor would be its reciprocal's product, which rounds twice.
        scale = torch.full_like(shorter, self.shorter_side).to(torch.float32) / shorter.to(torch.float32)
        return (length.to(torch.float32) * scale).to(torch.int64).clamp(min=self.crop)


def _resized(images: Tensor, rows: int, columns: int, mode: str, antialias: bool) -> Tensor:
    """Return images [N, 3, rows, columns] in whole numbers from 0 to 255."""
    resized = F.interpolate(images, size=[rows, columns], mode=mode, antialias=antialias)
    return (resized + 0.5).floor().clamp(0, 255)  # halves up, as Pillow and OpenCV round


def _offset(surplus: int) -> int:
    """Return half of the surplus; halves are rounded to the even number, as NumPy's `rint` does."""
    half = surplus // 2
    return half + surplus % 2 * (half % 2)
