"""Measure one part in this process: `python -m benchmarks.gpu.part_process ORDER`, a JSON object.

Rows go to a file, one JSON object a line, at once. The exit code is 0 if the part is done.
"""

import importlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.timing import Ground
from lockstep.system.strict_json import to_json


def main(order: Mapping[str, Any]) -> None:
    """Measure the part of an order."""
    ground = Ground(
        device=order["device"],
        tiny=order["tiny"],
        deadline=time.monotonic() + order["seconds"],
        out=order["out"],
        photos=order["photos"],
    )
    with Path(order["rows"]).open("a", encoding="utf-8") as file:

        def say(row: Mapping[str, Any]) -> None:
            file.write(to_json(dict(row)) + "\n")
            file.flush()

        importlib.import_module(order["module"]).measure(ground, say, **order["settings"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
