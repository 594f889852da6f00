"""Run the notebooks of the documentation, cell by cell, in a new folder.

    python -m tests.docs.run_notebooks

Jupyter is not needed. Cells are plain Python, without `!` and `%`, and share one namespace. What a
cell draws is not looked at.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


def read_cells(path: Path) -> list[str]:
    """Return the code of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, code in enumerate(read_cells(path), start=1):
        begin = time.monotonic()
        exec(compile(code, f"{path.name}, cell {number}", "exec"), names)
        print(f"[cell {number}: {time.monotonic() - begin:.0f} s]", flush=True)


def main() -> None:
    os.environ["MPLBACKEND"] = "Agg"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            run_notebook(path)
            os.chdir(ROOT)


if __name__ == "__main__":
    main()
