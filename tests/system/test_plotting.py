"""Figures do not depend on the current folder."""

import os
import subprocess
import sys
from pathlib import Path


def test_settings_of_matplotlib_in_the_current_folder_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "matplotlibrc")  # whoever opens it waits for ever
    command = "import lockstep.system.plots, matplotlib, os; print(os.getcwd())"
    result = subprocess.run(
        [sys.executable, "-P", "-c", command], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert (result.returncode, result.stdout.decode().strip()) == (0, str(tmp_path.resolve()))
