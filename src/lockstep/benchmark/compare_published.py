"""Measured speeds next to published ones: the cells of a benchmark report and
`recipes/published_speeds.yaml`."""

import re
from dataclasses import dataclass
from typing import Any

from lockstep.benchmark.cells import name_computer
from lockstep.benchmark.report_file import BenchmarkReport, find_environment
from lockstep.recipes import load_recipe
from lockstep.recipes.published_speeds import Measured, Row
from lockstep.system.errors import RecipeError


@dataclass(frozen=True)
class Beside:
    """A published row next to a measured cell."""

    row: Row
    ratio: float | None
    """Measured images per second divided by published ones; None unless hardware, batch and
    precision are the same."""


@dataclass(frozen=True)
class Comparison:
    """A cell of a benchmark report and the comparable published rows."""

    cell: dict[str, Any]
    hardware: str
    """The hardware of the cell."""
    image_size: int | None
    """Height and width of the measured images; None if the report does not give them. All published
    rows have 224."""
    published: tuple[Beside, ...]
    left_out: int
    """Number of rows of the same model and kind on other hardware, or with other batches or numbers
    of accelerators."""


def compare(
    report: BenchmarkReport, rows: tuple[Row, ...], *, everything: bool = False
) -> list[Comparison]:
    """Return every measured cell with published rows of its model and kind.

    The rows have the same number of accelerators of the same chip. If one of them has the cell's
    batch, only rows with that batch or an unknown batch are returned; otherwise rows of any batch.
    With `everything`, all rows are returned.
    """
    comparisons = []
    for cell in report["cells"]:
        if cell["status"] != "ok":
            continue
        ours = _describe_speed(report, cell)
        alike = [row for row in rows if ours.is_of_same_model(row)]
        shown = [row for row in alike if everything or ours.is_on_like_hardware(row)]
        if not everything and any(row.batch_images == cell["batch"] for row in shown):
            shown = [row for row in shown if row.batch_images in (None, cell["batch"])]
        beside = tuple(Beside(row, ours.ratio(row)) for row in shown)
        left_out = len(alike) - len(shown)
        comparisons.append(Comparison(cell, ours.hardware, ours.image_size, beside, left_out))
    return comparisons


def _find_image_size(report: BenchmarkReport, cell: dict[str, Any]) -> int | None:
    """Return height and width of a cell's images, from the report's recipe and its changes; None if
    that is unknown."""
    settings = report.get("settings", {})
    try:
        recipe = load_recipe(settings["recipe"]).replace(**settings["changes"])
    except (KeyError, RecipeError):  # the report names no recipe, or its file is gone
        return None
    return recipe.image_size if cell["what"] == "train" else recipe.eval_crop


def _describe_speed(report: BenchmarkReport, cell: dict[str, Any]) -> Measured:
    return Measured(
        model=cell["model"],
        kind=cell["what"],
        hardware=name_hardware(find_environment(report, name_computer(cell)), cell),
        accelerators=cell["ranks"],
        precision=cell["dtype"],
        batch_images=cell["batch"],
        image_size=_find_image_size(report, cell),
        images_per_sec=float(cell["images_per_sec"]),
    )


def name_hardware(environment: dict[str, Any], cell: dict[str, Any]) -> str:
    """Return what a cell was measured on: the GPU as its driver names it, else the processor.

    Some backends, such as MXNet, report a GPU only as a number. If all GPUs of the machine have the
    same name, that name is used. Otherwise it stays a number: CUDA orders GPUs by speed and
    visibility, the driver does not.
    """
    device = cell.get("device") or ""
    names = sorted({gpu["gpu"] for gpu in environment.get("gpus", [])})
    if device.startswith("CPU") or not (device or names):
        return str(environment.get("processor", "unknown hardware"))
    if device and not re.search(r"GPU[ :]\d+$", device):
        return str(device)
    if len(names) == 1:
        return str(names[0])
    return f"{device or 'a GPU'} of {', '.join(names) or 'unknown ones'}"
