"""What is noted of the machine."""

import os
import stat
from pathlib import Path

import pytest

from lockstep.benchmark.fingerprint import fingerprint, gpus


def test_cores_clocks_threads_and_versions_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = fingerprint("reference")
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["threads"]["OMP_NUM_THREADS"] == "3"
    assert {"lockstep", "numpy", "processor", "processor_mhz", "processor_mhz_max", "governor", "gpus"} <= set(found)


def test_nvidias_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-40GB, 535.54.03, 40960 MiB, 1410 MHz, 1410 MHz, 400.00 W'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (gpu,) = gpus()
    assert (gpu["gpu"], gpu["driver"], gpu["gpu_clock"]) == ("NVIDIA A100-SXM4-40GB", "535.54.03", "1410 MHz")


def test_without_the_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
