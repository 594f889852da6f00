"""Shared helpers for figures drawn with matplotlib."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.system.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def over_steps(every: "Iterable[Axes]") -> None:
    """Finish plots over steps: whole numbers on the x axis, a legend, no top and right border."""
    from matplotlib.ticker import MaxNLocator

    for axes in every:
        axes.legend(frameon=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)


def plain(text: str) -> str:
    """Return a text with dollar signs escaped, so that matplotlib does not read parts of it as
    formulas."""
    return text.replace("$", r"\$")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure. The suffix selects the format (png, svg, pdf). Raises `UserError` if it
    cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot draw {path}: {error.strerror}") from None
