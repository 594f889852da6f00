"""Draw docs/images/architecture.svg: what a run is, and how data flows through the rooms.

    python docs/pictures/architecture.py

The drawing has a light panel with a frame, so it reads alike on light and dark pages.
"""

from html import escape
from pathlib import Path

PICTURE = Path(__file__).parent.parent / "images/architecture.svg"
WIDTH = 960
HEIGHT = 560
INK = "#1a2028"
FAINT = "#5b6673"
ACCENT = "#2459d6"
BOXES = {
    # name: (left, top, width, height, title, lines, colour)
    "images": (
        24,
        70,
        150,
        64,
        "images",
        ["a folder, RecordIO,", "TFRecord, tar, s3://"],
        "#e8f0ff",
    ),
    "recipe": (24, 170, 150, 64, "recipe", ["fields as YAML,", "and a seed"], "#e8f0ff"),
    "model": (24, 270, 150, 64, "model", ["an architecture", "as data"], "#e8f0ff"),
    "index": (
        230,
        70,
        170,
        64,
        "data.index",
        ["bytes, size and label", "of every image"],
        "#ffffff",
    ),
    "order": (
        230,
        170,
        170,
        64,
        "recipes",
        ["rates; order, crop, flip,", "MixUp of every step"],
        "#ffffff",
    ),
    "weights0": (
        230,
        270,
        170,
        64,
        "initial weights",
        ["the same for every", "backend, to the bit"],
        "#ffffff",
    ),
    "loader": (456, 120, 150, 64, "data.loading", ["reads, decodes,", "crops: batches"], "#ffffff"),
    "engine": (662, 120, 274, 114, "backends: the engine", [], "#fff4dc"),
    "loop": (456, 270, 150, 64, "runs.loop", ["intervals of steps,", "evaluations"], "#ffffff"),
    "checkpoint": (
        662,
        330,
        274,
        64,
        "weights.checkpoint",
        ["the whole state in one form that every", "backend reads: step-XXXXXXXX/"],
        "#ffffff",
    ),
    "log": (230, 370, 376, 46, "log.jsonl, report.json, console, loggers", [], "#ffffff"),
    "use": (
        24,
        462,
        912,
        64,
        "inference, verification, benchmark, reporting",
        [
            "predict, evaluate, export and serve from a checkpoint;"
            " compare backends with a reference in NumPy; one page about runs"
        ],
        "#e9f7ec",
    ),
}
ARROWS = [
    "174,102 230,102",
    "174,202 230,202",
    "174,302 230,302",
    "400,102 428,102 428,140 456,140",
    "400,202 428,202 428,164 456,164",
    "606,152 662,152",
    "400,302 428,302 428,252 634,252 634,200 662,200",
    "690,234 690,302 606,302",
    "799,234 799,330",
    "531,334 531,370",
    "799,394 799,462",
]
LABELS = [
    (24, 44, "What a run is"),
    (230, 44, "Computed before it runs"),
    (456, 44, "Executed"),
    (24, 448, "Used"),
]
ENGINES = ("torch", "tensorflow", "paddle", "mxnet", "jax", "reference")


def write_text(x: float, y: float, text: str, size: int, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{weight}>{escape(text)}</text>'


def draw_box(
    left: int, top: int, width: int, height: int, title: str, lines: list[str], fill: str
) -> list[str]:
    parts = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8" fill="{fill}"'
        f' stroke="{FAINT}"/>',
        write_text(left + 12, top + 22, title, 14, INK, bold=True),
    ]
    for number, line in enumerate(lines):
        parts.append(write_text(left + 12, top + 40 + number * 16, line, 12, FAINT))
    return parts


def draw_engines() -> list[str]:
    """Return the six backends inside the box of the engine."""
    left, top = BOXES["engine"][:2]
    parts = []
    for number, name in enumerate(ENGINES):
        x = left + 12 + number % 3 * 86
        y = top + 36 + number // 3 * 34
        parts.append(
            f'<rect x="{x}" y="{y}" width="78" height="26" rx="6" fill="#ffffff" stroke="{FAINT}"/>'
        )
        parts.append(write_text(x + 8, y + 17, name, 12, INK))
    return parts


def draw() -> str:
    """Return the drawing."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="system-ui, sans-serif" role="img"'
        ' aria-label="From images, recipe and model to an engine that trains">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"'
        f' markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="{ACCENT}"/></marker>'
        "</defs>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="#f6f7f9"'
        ' stroke="#8a94a0"/>',
    ]
    parts += [write_text(x, y, text, 15, ACCENT, bold=True) for x, y, text in LABELS]
    for box in BOXES.values():
        parts += draw_box(*box)
    parts += draw_engines()
    parts += [
        f'<polyline points="{points}" fill="none" stroke="{ACCENT}" stroke-width="1.6"'
        ' marker-end="url(#tip)"/>'
        for points in ARROWS
    ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
