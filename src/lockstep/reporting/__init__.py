"""`lockstep report`: write one page about runs."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.system.errors import UserError, as_path
from lockstep.system.files import write_text


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    plots: str | Path | None = None,
    explain: bool = False,
) -> Path:
    """Write one HTML page about one or several runs, which needs no network and no other file.

    The page shows unfinished runs as far as they went, and draws several runs over each other.

    Args:
        runs: The folder of a run, or a list of them.
        out: The HTML file to write.
        plots: A folder for the figures, each as PNG and SVG; by default they are not written.
        explain: Whether to show which parts of misclassified images support the predicted class
            (Grad-CAM). This opens the checkpoints of the shown evaluations in PyTorch, or
            in JAX if only that is installed.

    Returns:
        The path of the page.

    Raises:
        CheckpointError: A folder holds no run.
        UserError: The page cannot be written.

    >>> import lockstep
    >>> lockstep.report("run", "page.html").name
    'page.html'
    """
    from lockstep.reporting.collect import open_runs
    from lockstep.reporting.page import render

    folders = [as_path(run, "runs") for run in (runs if isinstance(runs, list | tuple) else [runs])]
    if not folders:
        raise UserError("expected the folder of at least one run, found none")
    out = as_path(out, "target")
    opened = open_runs(folders)
    page = render(opened, explain=explain)
    try:
        write_text(out, page)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; choose another -o") from None
    if plots is not None:
        from lockstep.reporting.plots import draw

        draw(opened, Path(plots))
    return out
