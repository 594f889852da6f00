"""Open the runs that a page shows, each with a separate name."""

from itertools import chain, takewhile
from pathlib import Path

from lockstep.runs.folder import holds_run
from lockstep.runs.folds import MOST_FOLDS, describe_folds, fold_folder, summarise_folds
from lockstep.runs.reading import Run, read_run
from lockstep.system.errors import CheckpointError


def open_runs(folders: list[Path]) -> list[Run]:
    """Return the runs in some folders; a folder of cross-validation holds a run for each fold.
    Raises `CheckpointError` if one holds no run, or if its content cannot be read."""
    folders = list(chain.from_iterable(map(_list_folds, folders)))
    return list(map(read_run, folders, _choose_names(folders)))


def describe_cross_validations(runs: list[Run]) -> list[str]:
    """Return a line for each cross-validation of which all runs are finished."""
    groups: dict[Path, list[Run]] = {}
    for run in runs:
        if run.recipe.folds:
            groups.setdefault(run.folder.resolve().parent, []).append(run)
    lines = []
    for group in groups.values():
        reports = [run.report for run in group if run.report is not None and run.report["best"]]
        if len(reports) == group[0].recipe.folds:
            lines.append(describe_folds(summarise_folds(reports)))
    return lines


def _list_folds(folder: Path) -> list[Path]:
    """Return the folders of the folds' runs in a folder, or the folder itself."""
    if holds_run(folder):
        return [folder]
    folders = [fold_folder(folder, number) for number in range(1, MOST_FOLDS + 1)]
    folds = takewhile(holds_run, folders)
    return list(folds) or [folder]


def _choose_names(folders: list[Path]) -> list[str]:
    """Return the last parts of the paths, as many as make the names different."""
    whole = list(map(Path.resolve, folders))
    longest = max(len(path.parts) for path in whole)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    raise CheckpointError(
        f"the same run is given twice: {', '.join(map(str, folders))}; name each once"
    )
