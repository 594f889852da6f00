"""What others published: accuracies by recipe, speeds by document."""

from itertools import groupby
from typing import Any

from lockstep.recipes.published import RECIPES
from lockstep.recipes.published_accuracies import read_accuracies
from lockstep.recipes.published_speeds import Row, read_speeds

ACCURACY_COLUMNS = ("recipe", "top-1 %", "precision", "GPUs", "epochs", "hours", "notes")
SPEED_COLUMNS = {
    "system": "system",
    "accelerator": "accelerator",
    "accelerators": "number",
    "precision": "precision",
    "variant": "variant",
    "batch_images": "batch of one",
    "images_per_sec": "images/s",
    "mean_ms": "mean ms",
    "p50_ms": "p50 ms",
    "p90_ms": "p90 ms",
    "p95_ms": "p95 ms",
    "p99_ms": "p99 ms",
    "p100_ms": "p100 ms",
    "minutes_to_target": "minutes to 75.9 %",
    "printed_speedup": "printed speed-up",
    "printed_weak_scaling": "printed weak scaling",
    "remark": "remark",
}
"""The heading of each column, by the field of a row. Columns that a table does not have are left
out."""
MODELS = {"resnet50": "ResNet-50 v1.5", "resnext101-32x4d": "ResNeXt101-32x4d"}


def describe_accuracies() -> str:
    """Return a section for each publisher."""
    parts = []
    for origin, rows in groupby(read_accuracies(), key=lambda row: RECIPES[row.recipe].origin):
        cells = [
            (
                f"`{row.recipe}`",
                row.figure(),
                row.precision,
                f"{row.accelerators} x {row.accelerator}" if row.accelerator else "",
                row.epochs,
                row.hours,
                row.variant,
            )
            for row in rows
        ]
        parts += [f"## {origin}", make_table(ACCURACY_COLUMNS, cells)]
    return "\n\n".join(parts)


def describe_speeds() -> str:
    """Return a section for each document, with its tables."""
    parts = []
    for document, rows in groupby(read_speeds(), key=lambda row: row.document):
        parts.append(f"## {document}")
        for (kind, model, table), own in groupby(
            rows, key=lambda row: (row.kind, row.model, row.table)
        ):
            parts.append(describe_table(f"{kind}, {MODELS[model]}: {table}", list(own)))
    return "\n\n".join(parts)


def describe_table(title: str, rows: list[Row]) -> str:
    """Return a table of a document under its title."""
    names = [name for name in SPEED_COLUMNS if any(getattr(row, name) for row in rows)]
    cells = [[getattr(row, name) for name in names] for row in rows]
    methods = list(dict.fromkeys(row.method for row in rows if row.method))
    about = f"Method: {'; '.join(methods)}." if methods else ""
    headings = [SPEED_COLUMNS[name] for name in names]
    return "\n\n".join(filter(None, [f"**{title}**", about, make_table(headings, cells)]))


def make_table(headings: Any, rows: Any) -> str:
    """Return a table in Markdown. A value that is missing is an empty cell."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        texts = ["" if value is None else format_number(value) for value in row]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def format_number(value: object) -> str:
    """Return a value as it was printed: whole numbers without a point."""
    return f"{value:.10g}" if isinstance(value, float) else str(value).replace("|", "\\|")
