"""Draw the loss curves of all backends in one plot, and how far they are from the reference's."""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import UserError
from lockstep.system.plots import over_steps, save


def check_path(path: Path) -> None:
    """Raise `UserError` if no drawing can be written there, before anything is computed for it."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise UserError(f"cannot draw {path}: expected a name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise UserError(f"cannot draw {path}: there is no folder {path.parent}")


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw a report of `lockstep.verify` into a file. Its suffix selects the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    losses = {name: np.array(values, np.float64) for name, values in report["losses"].items()}
    expected = losses.pop("reference")
    curves.plot(expected, color="0.75", linewidth=6, label="reference (NumPy, float64)")
    floor = np.finfo(np.float64).eps
    for name, values in losses.items():
        curves.plot(values, linewidth=1.5, label=name)
        differences.semilogy(
            np.maximum(np.abs(values / expected - 1), floor), linewidth=1.5, label=name
        )
    curves.set(title="loss", xlabel="step")
    differences.set(title="difference from the reference, relative", xlabel="step")
    over_steps((curves, differences))
    save(figure, path)
