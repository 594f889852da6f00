"""Open the runs that a page shows, each with a separate name."""

from pathlib import Path

from lockstep.runs.reading import Run, read_run
from lockstep.system.errors import CheckpointError


def open_runs(folders: list[Path]) -> list[Run]:
    """Return the runs in some folders. Raises `CheckpointError` if one holds no run, or if its
    content cannot be read."""
    return list(map(read_run, folders, _choose_names(folders)))


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
