"""Read a benchmark report (`lockstep benchmark train|inference -o FILE`)."""

from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from lockstep.inference.runtimes import NATIVE
from lockstep.system.errors import DataError
from lockstep.system.regular_files import TEXT, read_regular_text
from lockstep.system.strict_json import parsed

KIND = "lockstep-benchmark"
VERSION = 1


class BenchmarkReport(TypedDict):
    """The contents of a benchmark report."""

    kind: str
    version: int
    command: str
    settings: dict[str, Any]
    """What all cells of a report share: the fields of `Plan` and others."""
    environment: dict[str, Any]
    """Versions and devices by backend; see `find_environment`."""
    machine: dict[str, Any]
    """What the roofline is computed from: the machine's speed of matrix products and of copying."""
    cells: list[dict[str, Any]]
    """The measured cells, in the order in which they were measured: the fields of `Cell`, `status`,
    and the figures."""
    written_at: NotRequired[float]
    """When the file was written, in seconds since 1970. It is not in the file."""


def find_environment(report: BenchmarkReport, backend: str) -> dict[str, Any]:
    """Return the environment that a backend's cells were measured in; empty if none of them has
    figures.

    A backend can have a separate environment (MXNet's), with a different Python and NumPy. Older
    reports have one environment for all backends.
    """
    environment: dict[str, Any] = report["environment"]
    if "processor" in environment:
        return environment
    own: dict[str, Any] = environment.get(backend, {})
    return own


def read_benchmark(path: Path) -> BenchmarkReport:
    """Return a benchmark report. Raises `DataError` if the file is not a report, or has a different
    version."""
    try:
        report: Any = parsed(read_regular_text(path, TEXT))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(
            f"{path} is not a report of `lockstep benchmark`: {error}; use another file"
        ) from None
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise DataError(
            f"{path} is not a report of `lockstep benchmark`; give a file that `-o FILE` wrote"
        )
    if report.get("version") != VERSION:
        raise DataError(
            f"{path} is a report of `lockstep benchmark` of version {report.get('version')},"
            f" expected {VERSION}; measure again into another file"
        )
    for cell in report["cells"] if isinstance(report.get("cells"), list) else ():
        if isinstance(cell, dict) and "runtime" not in cell:  # an older report
            cell["runtime"] = cell.pop("engine", NATIVE)
    return cast(BenchmarkReport, report)
