"""Shared helpers for figures drawn with matplotlib."""

import contextlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.system.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

with contextlib.chdir(
    "/"
):  # matplotlib reads `matplotlibrc` in the current folder, which can be anyone's
    import matplotlib as _  # noqa: F401


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


def find_font(text: str) -> str:
    """Return the path of a font that has the letters of a text: DejaVu Sans, which comes with
    matplotlib, or else the first installed font that has most of them."""
    from matplotlib.font_manager import findfont, fontManager

    letters = {ord(letter) for letter in text if not letter.isspace()}
    usual = findfont("DejaVu Sans")
    if letters <= _read_letters(usual):
        return usual
    others = sorted({font.fname for font in fontManager.ttflist})
    return max([usual, *others], key=lambda path: len(letters & _read_letters(path)))


@cache
def _read_letters(path: str) -> frozenset[int]:
    """Return the letters of a font; none if it has only pictures or boxes."""
    from matplotlib.font_manager import get_font

    try:
        font = get_font(path)
        has_letters = font.scalable and not font.family_name.startswith("Last Resort")
        return frozenset(font.get_charmap()) if has_letters else frozenset()
    except (OSError, RuntimeError):  # a damaged font
        return frozenset()


def list_families(texts: Iterable[str]) -> list[str]:
    """Return the families of fonts that matplotlib needs for texts, DejaVu Sans first."""
    from matplotlib.font_manager import get_font

    names = [get_font(find_font(text)).family_name for text in texts]
    return list(dict.fromkeys(["DejaVu Sans", *names]))


def save(figure: "Figure", path: Path) -> None:
    """Write a figure. The suffix selects the format (png, svg, pdf). Raises `UserError` if it
    cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot draw {path}: {error.strerror}") from None
