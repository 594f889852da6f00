"""Run the notebooks of the documentation, cell by cell, and keep copies with their outputs.

    python -m tests.docs.run_notebooks

Jupyter is not needed. Cells are plain Python, without `!` and `%`, and share one namespace. Each
notebook has a new folder in build/notebooks. What its cells print and draw is stored there, in a
copy of the notebook, and each picture also as a PNG.
"""

import base64
import io
import json
import os
import shutil
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs").glob("*/*.ipynb"))
WORK = ROOT / "build/notebooks"


def run_notebook(path: Path, folder: Path) -> None:
    """Run the cells of a notebook in the current folder, and write its copy into `folder`."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
        begin = time.monotonic()
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, names)
        print(printed.getvalue(), end="")
        print(f"[cell {number}: {time.monotonic() - begin:.0f} s]", flush=True)
        cell["execution_count"] = number
        cell["outputs"] = [*show_text(printed.getvalue()), *keep_pictures(folder, number)]
    copy = folder / path.name
    copy.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def show_text(text: str) -> list[dict[str, Any]]:
    """Return the output of a cell that printed a text."""
    lines = text.splitlines(keepends=True)
    return [{"output_type": "stream", "name": "stdout", "text": lines}] if text else []


def keep_pictures(folder: Path, cell: int) -> list[dict[str, Any]]:
    """Store and close the figures that a cell drew. Return them as outputs of the cell."""
    import matplotlib.pyplot as plt

    outputs = []
    for number in plt.get_fignums():
        path = folder / f"cell-{cell}-{number}.png"
        plt.figure(number).savefig(path)
        picture = base64.b64encode(path.read_bytes()).decode()
        data = {"image/png": picture}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


def main() -> None:
    os.environ["MPLBACKEND"] = "Agg"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for path in NOTEBOOKS:
        folder = WORK / path.stem
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        os.chdir(folder)
        begin = time.monotonic()
        run_notebook(path, folder)
        print(f"{folder.relative_to(ROOT)}: {time.monotonic() - begin:.0f} s")
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
