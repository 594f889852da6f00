"""What is recorded about the machine."""

import json
import os
import re
from pathlib import Path

import pytest

from lockstep import backends
from lockstep.benchmark.fingerprint import fingerprint, query_gpus
from lockstep.recipes import Execution


def test_cores_clocks_threads_and_versions_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = fingerprint("reference")
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["threads"]["OMP_NUM_THREADS"] == "3"
    assert {
        "lockstep",
        "numpy",
        "processor",
        "processor_mhz",
        "processor_mhz_max",
        "governor",
        "gpus",
    } <= set(facts)


HERE = [name for name, framework in backends.FRAMEWORKS.items() if framework.version() is not None]


@pytest.mark.parametrize("name", HERE)
def test_threads_and_libraries_are_those_that_the_framework_tells(name: str) -> None:
    facts = fingerprint(name)
    world = backends.load(name).world(Execution.of({"backend": name, "device": "cpu"}))
    try:
        assert world.device.startswith("CPU")
        assert re.findall(r"(\d+) threads?", world.device) in ([str(facts["threads"]["used"])], [])
    finally:
        world.close()
    assert {"cuda", "cudnn", "onednn"} <= set(facts)
    json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize(("chosen", "used"), [("3", 3), ("4,2", 4), ("many", None)])
def test_threads_are_the_first_number_that_was_chosen(
    chosen: str, used: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", chosen)
    assert fingerprint("reference")["threads"]["used"] == used


def test_pytorchs_own_onednn_is_noted() -> None:
    torch = pytest.importorskip("torch")
    assert f"v{fingerprint('torch')['onednn']} " in torch.__config__.show()


def test_gpus_are_what_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_gpus() == [], "without the driver"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'No devices were found'\n")
    tool.chmod(0o755)
    assert query_gpus() == []
    known = "NVIDIA A100-SXM4-40GB, 535.54.03, 40960 MiB, 1410 MHz, 1410 MHz, 400.00 W"
    tool.write_text(f"#!/bin/sh\necho '{known}'\n")
    (gpu,) = query_gpus()
    about = (gpu["gpu"], gpu["driver"], gpu["gpu_clock"])
    assert about == ("NVIDIA A100-SXM4-40GB", "535.54.03", "1410 MHz")
