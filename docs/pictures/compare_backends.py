"""Draw the pictures of docs/tutorial/compare-backends.md from what its commands wrote.

    make docs-run PAGES=docs/tutorial/compare-backends.md
    python docs/pictures/compare_backends.py build/docs-run/docs/tutorial/compare-backends/five

It needs Chromium and playwright (`make browser`). The roofline can be drawn alone, without them,
from any report of `lockstep benchmark train`:

    python docs/pictures/compare_backends.py five/engines.json five/roofline.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from PIL import Image
from shared import chromium, keep_picture, picture_part

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

RECORD = Path(__file__).parents[2] / "benchmarks/results/grid_engines.json"
"""The figures of the page, measured while no other program ran."""
COLOURS = {"fp32": "#2459d6", "tf32": "#7a4fd6", "bf16": "#d6722b", "fp16": "#2b8a3e"}


def main() -> None:
    source = Path(sys.argv[1]).resolve()
    if source.is_file():
        draw_roofline(source, Path(sys.argv[2]))
        return
    roofline = source / "roofline.png"
    draw_roofline(RECORD, roofline)
    keep_picture(Image.open(roofline), "compare-backends-roofline.png")
    keep_picture(Image.open(source / "curves.png"), "compare-backends-verify.png")
    with chromium() as browser:
        curves = picture_part(browser, source / "report.html", "#curves", 690)
    keep_picture(curves, "compare-backends-curves.png")


def draw_roofline(report: Path, picture: Path) -> None:
    """Draw operations a second over operations a byte: the limits of the machine, and the cells."""
    content = json.loads(report.read_text(encoding="utf-8"))
    machine = content["machine"]
    products = {dtype: rate for dtype, rate in machine["gemm_gflops"].items() if rate}
    copies = machine["copy_gb_per_sec"]
    cells = [
        cell for cell in content["cells"] if cell.get("roofline") and cell["dtype"] in products
    ]
    if not cells or not copies:
        raise SystemExit(f"{report} has no cell with a roofline; expected a report of training")
    figure, axis = plt.subplots(figsize=(7.5, 4.2), dpi=120)
    reached = [count_operations_per_byte(cell) for cell in cells]
    intensities = np.geomspace(min(reached) / 12, max(reached) * 6, 200)
    for dtype, rate in products.items():
        roof = np.minimum(rate, copies * intensities)
        axis.plot(intensities, roof, color=COLOURS[dtype], label=f"limit of the machine in {dtype}")
    label_above = {}
    for cell in sorted(cells, key=lambda cell: -count_operations(cell)):
        intensity = count_operations_per_byte(cell)
        rate = count_operations(cell)
        axis.plot(intensity, rate, "o", color=COLOURS[cell["dtype"]])
        height = min(rate, label_above.get(intensity, 1e9) / 1.09)
        label_above[intensity] = height
        limit = min(products[cell["dtype"]], copies * intensity)
        share = rate / limit
        text = f"{cell['backend']}: {share:.0%} of the limit"
        beside = 1.06 if cell["dtype"] == "bf16" else 1 / 1.06
        side = "left" if cell["dtype"] == "bf16" else "right"
        axis.annotate(text, (intensity * beside, height), fontsize=8, va="center", ha=side)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(min(map(count_operations, cells)) / 1.4, 2.4 * max(products.values()))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_xlabel("operations for each byte that is moved")
    axis.set_ylabel("billion operations a second")
    axis.grid(True, which="both", color="#e6e9ed", linewidth=0.6)
    axis.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


def count_operations(cell: dict[str, Any]) -> float:
    """Return the billion operations that a cell does in a second."""
    return cell["images_per_sec"] * cell["roofline"]["gflop_per_image"]


def count_operations_per_byte(cell: dict[str, Any]) -> float:
    roofline = cell["roofline"]
    return 1e9 * roofline["gflop_per_image"] / roofline["bytes_per_image"]


if __name__ == "__main__":
    main()
