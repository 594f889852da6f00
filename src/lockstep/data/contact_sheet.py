"""A contact sheet: images of a data set as the model sees them, after the recipe's cropping,
flipping and resizing."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lockstep.data.images import printable
from lockstep.data.index import Index
from lockstep.data.loading.loaders import make_loader
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import BatchPlan, evaluation_plans, training_plans
from lockstep.system.plotting import find_font

_MARGIN = 8
_LINE = 16
_LETTERS = 11
"""Height of the letters in pixels."""


def first_plan(index: Index, recipe: Recipe, images: int, *, evaluation: bool) -> BatchPlan:
    """Return the plan of the first images of a run or an evaluation: `images` of them, or all if
    there are fewer."""
    images = min(images, len(index))
    sizes = index.sizes_for(recipe)
    if evaluation:
        return next(evaluation_plans(recipe, sizes, images))
    recipe = recipe.replace(global_batch_images=images)
    return next(training_plans(recipe, sizes, 0, labels=index.rows["label"]))


def contact_sheet(
    index: Index, recipe: Recipe, images: int, *, evaluation: bool = False
) -> Image.Image:
    """Return the first `images` images of a run in a grid, each with its class name below, cut off
    if it is too long."""
    plan = first_plan(index, recipe, images, evaluation=evaluation)
    size = recipe.eval_crop if evaluation else recipe.image_size
    with make_loader(index, recipe, Execution(), size=size, evaluation=evaluation) as loader:
        batch = next(iter(loader.batches([plan])))
    count = len(batch.pixels)
    columns = min(int(np.ceil(np.sqrt(count * 1.6))), count)
    step = size + _MARGIN
    sheet = Image.new(
        "RGB", (columns * step + _MARGIN, -(-count // columns) * (step + _LINE) + _MARGIN), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for i, (pixels, label) in enumerate(zip(batch.pixels, batch.labels.tolist(), strict=True)):
        left = _MARGIN + i % columns * step
        top = _MARGIN + i // columns * (step + _LINE)
        sheet.paste(Image.fromarray(pixels), (left, top))
        name = printable(index.classes[label]).replace("\n", " ")
        font = ImageFont.truetype(find_font(name), _LETTERS)
        draw.text((left, top + size + 1), _shorten(name, size, draw, font), fill="black", font=font)
    return sheet


def _shorten(text: str, width: int, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont) -> str:
    while text and draw.textlength(text, font=font) > width:
        text = text[:-1]
    return text


def write_sheet(sheet: Image.Image, path: Path) -> None:
    """Write a sheet as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, "PNG")
