"""A contact sheet: images of a data set as the model sees them, after the recipe's cropping,
flipping, resizing and MixUp."""

import html
import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lockstep.data import Batch
from lockstep.data.images import printable
from lockstep.data.index import Index
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.mixing import weigh_pixels
from lockstep.recipes.order import BatchPlan, evaluation_plans, steps_per_epoch
from lockstep.system.errors import DataError
from lockstep.system.files import write_text
from lockstep.system.html import colours, data_address
from lockstep.system.plots import find_font

_MARGIN = 8
_LINE = 16
_LETTERS = 11
"""Height of the letters in pixels."""
_MOST_LINES = 4
"""Lines of a text in a caption that wraps."""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{colours}
body {{ margin: 0; padding: 20px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }}
img {{ max-width: 100%; image-rendering: pixelated; background: #fff; }}
</style>
</head>
<body>
<p>{title}</p>
<img src="{picture}" alt="{title}">
</body>
</html>
"""


def contact_sheet(
    index: Index,
    recipe: Recipe,
    images: int,
    *,
    evaluation: bool = False,
    epoch: int = 0,
    step: int = 0,
) -> Image.Image:
    """Return `images` images of a run in a grid, or all if there are fewer, each with its class
    below. Names are cut off if they are too long.

    They are the first ones of a training step and of those that follow it, as one rank sees them:
    `step` counts from the beginning of `epoch`, and both from 0. In an `evaluation`, they are the
    first ones of all. There are fewer where the size of training images changes. Raises
    `DataError` if the run has no such step.
    """
    images = min(images, len(index))
    sizes = index.sizes_for(recipe)
    if evaluation:
        plans = evaluation_plans(recipe, sizes, images)
    else:
        batch = min(recipe.global_batch_images, len(index))
        plans = _plan_training(index, recipe.replace(global_batch_images=batch), epoch, step)
    pictures: list[np.ndarray] = []
    captions: list[list[str]] = []
    with make_loader(index, recipe, Execution(), evaluation=evaluation) as loader:
        _, plans_of_a_size = next(groupby(plans, key=lambda plan: plan.size))
        for loaded in loader.batches(plans_of_a_size):
            pictures += list(_mix_pixels(loaded))
            captions += list(_name_labels(loaded, index.classes))
            if len(pictures) >= images:
                break
    return draw_sheet(pictures[:images], captions[:images])


def _plan_training(index: Index, recipe: Recipe, epoch: int, step: int) -> Iterator[BatchPlan]:
    """Return the plans of a step and of those after it. Raises `DataError` if there is none."""
    per_epoch = steps_per_epoch(recipe, len(index))
    if not (0 <= epoch < recipe.epochs and 0 <= step < per_epoch):
        raise DataError(
            f"there is no step {step + 1} of epoch {epoch + 1}: the recipe has {recipe.epochs}"
            f" epochs of {per_epoch} steps with these images"
        )
    first = epoch * per_epoch + step
    return plan_training(index, recipe, first)


def _mix_pixels(batch: Batch) -> np.ndarray:
    """Return the images of a batch after MixUp or CutMix, uint8 [N, S, S, 3]. The mean and the
    standard deviation do not change what is mixed."""
    pixels = batch.pixels
    if batch.coefficients is None or batch.partners is None:
        return pixels
    own = weigh_pixels(batch.coefficients, batch.boxes, *pixels.shape[1:3])[..., None]
    mixed: np.ndarray = np.rint(own * pixels + (1 - own) * pixels[batch.partners])
    return mixed.astype(np.uint8)


def _name_labels(batch: Batch, classes: Sequence[str]) -> Iterator[list[str]]:
    """Yield the lines on the labels of each image of a batch: its class, or shares of two."""
    names = [classes[label] for label in batch.labels.tolist()]
    if batch.coefficients is None or batch.partners is None:
        yield from ([name] for name in names)
        return
    shares = batch.coefficients if batch.target_coefficients is None else batch.target_coefficients
    pairs = zip(names, shares.tolist(), batch.partners.tolist(), strict=True)
    for name, own, partner in pairs:
        other = names[partner]
        if other == name or own == 1:
            yield [name]
        else:
            yield [f"{100 * own:.0f} % {name}", f"{100 - 100 * own:.0f} % {other}"]


def draw_sheet(pictures: Sequence[np.ndarray], captions: Sequence[Sequence[str]]) -> Image.Image:
    """Return pictures of one size, uint8 [S, S, 3], in a grid, each with the lines of its caption
    below."""
    count = len(pictures)
    size = len(pictures[0])
    columns = min(int(np.ceil(np.sqrt(count * 1.6))), count)
    step = size + _MARGIN
    row = step + _LINE * max(map(len, captions))
    sheet = Image.new(
        "RGB", (columns * step + _MARGIN, -(-count // columns) * row + _MARGIN), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for i, (pixels, lines) in enumerate(zip(pictures, captions, strict=True)):
        left = _MARGIN + i % columns * step
        top = _MARGIN + i // columns * row
        sheet.paste(Image.fromarray(pixels), (left, top))
        for number, line in enumerate(lines):
            _write_line(draw, (left, top + size + 1 + number * _LINE), line, size)
    return sheet


def wrap_lines(texts: Sequence[str], width: int) -> list[str]:
    """Return the lines of a caption in which each text has at most `_MOST_LINES` lines of `width`
    pixels; the rest of a text is cut off."""
    lines = []
    for text in texts:
        rest = printable(text).replace("\n", " ")
        font = ImageFont.truetype(find_font(rest), _LETTERS)
        for _ in range(_MOST_LINES):
            line = rest
            while font.getlength(line) > width:
                line = line[:-1]
            space = line.rfind(" ")
            if len(line) < len(rest) and space > 0:
                line = line[: space + 1]
            lines.append(line)
            rest = rest[len(line) :]
            if not rest:
                break
    return lines


def _write_line(draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str, width: int) -> None:
    text = printable(text).replace("\n", " ")
    font = ImageFont.truetype(find_font(text), _LETTERS)
    while text and draw.textlength(text, font=font) > width:
        text = text[:-1]
    draw.text(place, text, fill="black", font=font)


def write_sheet(sheet: Image.Image, path: Path, caption: str) -> None:
    """Write a sheet as PNG; as a page of HTML with a caption if the path ends with ".html"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".html":
        sheet.save(path, "PNG")
        return
    file = io.BytesIO()
    sheet.save(file, "PNG")
    picture = data_address("image/png", file.getvalue())
    title = html.escape(printable(caption))
    write_text(path, _PAGE.format(colours=colours(), title=title, picture=picture))
