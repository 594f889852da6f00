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
    """Write one HTML page about one or several runs, and return its path. It needs no network and
    no other file.

    A run that is still training, or was stopped, is shown as far as it went. Several runs are drawn
    over each other. With `plots`, the figures are also written into that folder, each as PNG and
    SVG.

    With `explain`, the page also shows which parts of a mistaken image speak for the class that was
    predicted (Grad-CAM). This opens the checkpoints of the evaluations shown, in PyTorch.

    Raises `CheckpointError` if a folder holds no run, `UserError` if the page cannot be written.

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
