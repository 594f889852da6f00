"""Open the runs that a page shows, each with a separate name."""

from itertools import chain
from pathlib import Path

from lockstep.runs.folds import describe_folds, list_runs, summarise_folds
from lockstep.runs.image_results import count_known
from lockstep.runs.reading import Run, read_run
from lockstep.system.errors import CheckpointError


def open_runs(folders: list[Path]) -> list[Run]:
    """Return the runs in some folders, each a run or a folder of runs such as those of folds.
    Raises `CheckpointError` if one holds no run, or if its content cannot be read."""
    folders = list(chain.from_iterable(list_runs(folder) or [folder] for folder in folders))
    return list(map(read_run, folders, _choose_names(folders)))


def describe_cross_validations(runs: list[Run]) -> list[str]:
    """Return a line for each cross-validation whose runs are all finished, and for each run
    whose accuracy is too optimistic."""
    groups: dict[Path, list[Run]] = {}
    for run in runs:
        if run.recipe.folds:
            groups.setdefault(run.folder.resolve().parent, []).append(run)
    lines = []
    for run in runs:
        known = count_known(run.folder)
        if known:
            lines.append(
                f"{run.name}, or the weights that it started from, was trained on {known} of its"
                " validation images (the bytes are the same), so its accuracy is too optimistic"
            )
    for group in groups.values():
        reports = [run.report for run in group if run.report is not None and run.report["best"]]
        if len(reports) == group[0].recipe.folds:
            lines.append(describe_folds(summarise_folds(reports, [run.folder for run in group])))
    return lines


def _choose_names(folders: list[Path]) -> list[str]:
    """Return the last parts of the paths, as many as make the names different."""
    whole = list(map(Path.resolve, folders))
    longest = max(len(path.parts) for path in whole)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    raise CheckpointError(
        f"the same run is named twice: {', '.join(map(str, folders))}; name each run once"
    )
