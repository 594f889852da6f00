"""Read a benchmark report (`lockstep benchmark train|inference -o FILE`)."""

import json
from pathlib import Path
from typing import Any

from lockstep.system.errors import DataError

KIND, VERSION = "lockstep-benchmark", 1


def environment_of(report: dict[str, Any], backend: str) -> dict[str, Any]:
    """Return the environment that a backend's cells were measured in; empty if none of them has figures.

    A backend can have a separate environment (MXNet's), with another Python and NumPy. Older reports have one environment
    for all backends.
    """
    environment: dict[str, Any] = report["environment"]
    own: dict[str, Any] = environment if "processor" in environment else environment.get(backend, {})
    return own


def read_benchmark(path: Path) -> dict[str, Any]:
    """Return a benchmark report. Raises `DataError` if the file is not a report, or has another version."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is not a report of `lockstep benchmark`: {error}; use another file") from None
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise DataError(f"{path} is not a report of `lockstep benchmark`, which `-o FILE` writes; use another file")
    if report.get("version") != VERSION:
        raise DataError(
            f"{path} is a report of `lockstep benchmark` of version {report.get('version')}, expected {VERSION}; "
            "measure again into another file"
        )
    return report
