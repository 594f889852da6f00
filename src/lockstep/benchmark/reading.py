"""Reading a benchmark report (`lockstep benchmark train|inference -o FILE`)."""

import json
from pathlib import Path
from typing import Any

from lockstep.errors import DataError

KIND, VERSION = "lockstep-benchmark", 1


def read_benchmark(path: Path) -> dict[str, Any]:
    """Return a benchmark report and when it was written (`written_at`, seconds since 1970).

    Raises `DataError` if the file is none, or one of another version.
    """
    try:
        report, written_at = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise DataError(f"{path} is no benchmark report; `lockstep benchmark train -o FILE` writes one")
    if report.get("version") != VERSION:
        raise DataError(f"{path} is a report of version {report.get('version')}, expected {VERSION}; measure again")
    return report | {"written_at": written_at}
