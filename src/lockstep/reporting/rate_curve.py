"""The picture of a range test of the learning rate."""

import math
from pathlib import Path

from lockstep.recipes.rate_range import DIVERGED, RateRange
from lockstep.system.plots import save


def draw_curve(result: RateRange, path: Path) -> None:
    """Draw the losses over the rates. Raises `UserError` if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogx(result.rates, result.losses, ".", color="0.75", label="loss of a step")
    axes.semilogx(result.rates, result.smoothed, label="smoothed")
    if result.suggested is not None:
        axes.axvline(result.suggested, linestyle="--", color="C2", label="suggested")
    finite = [value for value in result.smoothed if math.isfinite(value)]
    if finite:
        top = min(max(finite), DIVERGED * min(finite))
        axes.set_ylim(0, 1.1 * top)
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
