"""What processes load: no framework before it is used. Tests of a framework that cannot be loaded
fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.backends import FRAMEWORKS
from tests.processes import PATIENT_SEC

FOREIGN = [row.module for row in FRAMEWORKS.values() if row.module is not None]
"""Frameworks that the core never imports."""

REPORT = f"""
loaded = [name for name in {FOREIGN} if name in sys.modules]
assert not loaded, loaded
"""

IMPORT_THE_CORE = (
    f"""
import importlib, importlib.util, sys
from pathlib import Path
import lockstep
packages = ("starlette", "uvicorn", "prometheus_client", "python_multipart")
serves = all(map(importlib.util.find_spec, packages))
root = Path(lockstep.__file__).parent
for file in root.rglob("*.py"):
    parts = file.relative_to(root.parent).with_suffix("").parts
    if parts[1:3] in {{("inference", "serving"), ("inference", "decoding")}} and not serves:
        continue  # without the packages of the extra
    if parts[-1] != "__main__" and parts[1:3] not in {[("backends", name) for name in FRAMEWORKS]}:
        importlib.import_module(".".join(part for part in parts if part != "__init__"))
assert "lockstep.runs.train" in sys.modules
assert "lockstep.backends.shared.host_memory" in sys.modules
"""
    + REPORT
)


@pytest.mark.parametrize(
    "code",
    [
        "import sys, lockstep" + REPORT,
        "import sys, lockstep.runs.train" + REPORT,
        "import sys; from lockstep.backends import FRAMEWORKS; FRAMEWORKS['torch'].version()"
        + REPORT,
        IMPORT_THE_CORE,
    ],
    ids=["lockstep", "training", "version", "every module of the core"],
)
def test_no_framework_is_loaded_before_it_is_used(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENT_SEC
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["no_such_engine", "torch"])
def test_a_named_engine_that_cannot_be_imported_fails(
    name: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    # A module with the framework's name that cannot be loaded is found before the real one.
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "functions_of_the_protocol",
        Path(__file__).with_name("test_protocol.py"),
    ]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"LOCKSTEP_BACKENDS": name, "PYTHONPATH": path}
    done = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENT_SEC,
    )
    assert done.returncode == 1
    assert "1 error" in done.stdout
