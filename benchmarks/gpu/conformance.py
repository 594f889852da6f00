"""Part: the conformance suite of the engines (`tests/backends`) on the device."""

import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.timing import Ground, Say

ROOT = Path(__file__).resolve().parents[2]
TINY = "loss_scale_adapts and (first or good)"
MOST_PROCESSES = 8


def measure(ground: Ground, say: Say) -> None:
    """Write a row with the counts of tests, and a row for every test that failed."""
    # Tests are collected by several processes, which must find them in the same order.
    environment = os.environ | {
        "LOCKSTEP_BACKENDS": "torch",
        "LOCKSTEP_TEST_DEVICE": ground.device,
        "PYTHONHASHSEED": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        printed = Path(folder) / "printed"
        with printed.open("wb") as file:
            process = subprocess.Popen(
                command(ground, report),
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            is_whole = _ended(process, ground.left_sec)
        text = printed.read_text(encoding="utf-8", errors="replace")
        print(text[-20_000:])
        if not report.is_file():
            raise RuntimeError(
                f"pytest ended with code {process.returncode} and wrote no report; the log has what"
                " it said"
            )
        for row in rows_of(report):
            say(row | {"device": ground.device} | ({} if is_whole else {"interrupted": True}))
    for operator in without_determinism(text):
        say({"what": "not deterministic", "operator": operator})


def command(ground: Ground, report: Path) -> list[str]:
    """Return the command line of pytest.

    Warnings are no failures here: they may come from another version of PyTorch, or from an
    operator that has no deterministic kernel on a GPU.
    """
    words = [
        sys.executable,
        "-m",
        "pytest",
        "tests/backends",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    words += ["-W", "default", "--continue-on-collection-errors"]
    words += ["-m", "not slow", "-k", TINY if ground.tiny else "torch or kernels"]
    if not ground.tiny and find_spec("xdist") is not None:
        words += ["-n", str(min(MOST_PROCESSES, os.cpu_count() or 1))]
    return words


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for pytest; return whether it ended in time. If not, it is interrupted as by Ctrl-C, and
    writes its report."""
    try:
        process.wait(timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
        return False


def rows_of(report: Path) -> list[dict[str, Any]]:
    """Return a row with the counts of a JUnit report, and a row for every test that failed."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {
        key: sum(int(suite.get(key, "0")) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    seconds = sum(float(suite.get("time", "0")) for suite in suites)
    rows: list[dict[str, Any]] = [{"what": "conformance", "seconds": seconds} | counts]
    for case in (case for suite in suites for case in suite.iter("testcase")):
        for fault in (*case.iter("failure"), *case.iter("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            rows.append(
                {"what": "failure", "test": name, "message": (fault.get("message") or "")[:600]}
            )
    return rows


def without_determinism(output: str) -> list[str]:
    """Return the operators of which PyTorch warns that they have no deterministic kernel.

    >>> without_determinism("UserWarning: x_cuda does not have a deterministic implementation, but ...")
    ['x_cuda']
    """
    ends = [
        text.split() for text in output.split(" does not have a deterministic implementation")[:-1]
    ]
    return sorted({words[-1] for words in ends if words})
