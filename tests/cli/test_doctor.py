import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import backends
from lockstep.backends import Framework
from lockstep.cli import doctor
from lockstep.cli.doctor import describe_arithmetic, describe_runtime
from lockstep.data.decoding import jpeg
from lockstep.inference.runtimes import RUNTIMES
from lockstep.recipes import Recipe
from lockstep.runs.trust import remember
from lockstep.system import machine
from lockstep.system.machine import describe_gpu_arithmetic, parse_arithmetic
from lockstep.weights.run_identity import settle_identity
from tests.data import cases

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for no backend in another environment, which starts its Python."""
    monkeypatch.setattr(backends, "find_interpreter", lambda name: None)


def test_versions_cores_and_devices_are_shown(answer: Run) -> None:
    code, output, errors = answer("doctor")
    lines = output.splitlines()
    assert (code, errors) == (0, "")
    assert "\x1b" not in output
    versions = [importlib.metadata.version(name) for name in ("lockstep-vision", "numpy")]
    expected = f"lockstep   {versions[0]}, Python {platform.python_version()}, NumPy {versions[1]}"
    assert lines[0] == expected
    assert f", {len(os.sched_getaffinity(0))} cores, " in lines[1]
    assert lines[1].endswith(" GiB")
    assert lines[2].startswith("multiplies fp32")
    by_backend = {name: framework.version() for name, framework in backends.FRAMEWORKS.items()}
    assert by_backend["reference"] == versions[1]
    assert f"reference  {versions[1]}: CPU, NumPy on {platform.machine()}" in lines
    assert by_backend["mxnet"] is None, "it has a separate environment"
    for (name, version), line in zip(by_backend.items(), lines[3:], strict=False):
        assert line.startswith(f"{name:<10} {version or '1.9.1'}: ")
        assert "CPU, " in line
        assert line.endswith("/.venv-mxnet/bin/python)") == (version is None)
    assert [line.split()[0] for line in lines[3 + len(by_backend) : -3]] == list(RUNTIMES)


def test_runtimes_are_described_with_what_they_need() -> None:
    version = importlib.metadata.version("onnxruntime")
    result = describe_runtime(RUNTIMES["onnxruntime"])
    assert result == f"{version}, inference (cpu: fp32; cuda: fp32, tf32, fp16)"
    assert describe_runtime(RUNTIMES["tensorrt"]).startswith("missing; pip install tensorrt==")


@pytest.mark.usefixtures("one_environment")
def test_what_decodes_images_is_shown(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # This needs no framework to be loaded.
    monkeypatch.setattr(doctor, "describe_framework", lambda name: "")
    _, output, _ = answer("doctor")
    assert output.splitlines()[-3:] == [
        f"dali       {importlib.metadata.version('nvidia-dali-cuda120')}",
        "memory     lockstep find batch: the largest batch that fits",
        "jpeg       compiled: windows of baseline JPEGs",
    ]
    monkeypatch.setattr(jpeg, "_jpeg", None)
    _, output, _ = answer("doctor")
    assert output.splitlines()[-1].startswith("jpeg       missing; it needs GCC 12")


@pytest.mark.usefixtures("one_environment")
def test_a_missing_framework_has_its_command(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "pip install torch==2.13.0"
    assert backends.FRAMEWORKS["torch"].install == hint
    monkeypatch.setitem(backends.FRAMEWORKS, "torch", Framework(("no-such-distribution",), hint))
    code, output, _ = answer("doctor")
    assert code == 0
    assert f"torch      missing; {hint}\n" in output


@pytest.mark.usefixtures("one_environment")
def test_a_broken_framework_has_its_reason(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libfast.so: cannot open shared object file")

    monkeypatch.setattr(backends, "load", fail)
    code, output, _ = answer("doctor")
    assert code == 0
    assert " does not load: libfast.so: cannot open shared object file\n" in output


def test_any_of_a_frameworks_distributions_will_do() -> None:
    version = Framework(("no-such-distribution", "numpy"), "").version()
    assert version == importlib.metadata.version("numpy")


@pytest.mark.parametrize(
    ("flags", "limit", "line"),
    [
        ("fma avx2", "", "fp32 in hardware (AVX2); bf16, fp16 are emulated; train in fp32"),
        (
            "fma avx2 avx512_bf16",
            "",
            "fp32, bf16 in hardware (AVX2, AVX512-BF16); fp16 is emulated; train in bf16",
        ),
        (
            "fma avx2 avx512_bf16",
            "AVX2",
            (
                "fp32 in hardware (AVX2, limited by ONEDNN_MAX_CPU_ISA=AVX2); bf16, fp16 are"
                " emulated; train in fp32"
            ),
        ),
    ],
)
def test_what_the_processor_multiplies_is_shown(flags: str, limit: str, line: str) -> None:
    result = describe_arithmetic(parse_arithmetic(f"flags: {flags}", {"ONEDNN_MAX_CPU_ISA": limit}))
    assert result == line


@pytest.mark.usefixtures("one_environment")
def test_a_gpu_shows_what_it_multiplies(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: ("Tesla T4", describe_gpu_arithmetic((7, 5))))
    # This needs no framework to be loaded.
    monkeypatch.setattr(doctor, "describe_framework", lambda name: "")
    _, output, _ = answer("doctor")
    [line] = [line for line in output.splitlines() if line.startswith("gpu ")]
    fast = "fp32, fp16, int8 in hardware (compute capability 7.5)"
    assert line == f"gpu        Tesla T4: {fast}; bf16 is emulated; train in fp16"


def test_a_run_that_lost_images_is_named(answer: Run, tmp_path: Path, tiny_recipe: Recipe) -> None:
    names = [
        f"{split}/{label}/{i}.jpg" for split in ("train", "val") for label in "ab" for i in "01"
    ]
    data = cases.image_folder(tmp_path / "data", dict.fromkeys(names, cases.jpeg()))
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").touch()
    (run / "recipe.yaml").write_text(tiny_recipe.format_yaml())
    bad = {"file": "a/0.jpg", "reason": "Input/output error"}
    torn = {"file": "a/1.jpg", "reason": "Premature end of JPEG file"}
    environment = {
        "data": str(data),
        "train": {"images": 2, "quarantined": [bad, torn]},
        "val": {"images": 4, "quarantined": []},
    }
    (run / "environment.json").write_text(json.dumps(environment))
    settle_identity(run)
    remember(run, [f"data={data}"])
    code, output, errors = answer("doctor", str(run))
    assert (code, errors) == (1, "")
    assert output.splitlines()[1:] == ["  train: a/0.jpg was left out: Input/output error"]
    cases.image_folder(data, {"train/b/2.jpg": cases.jpeg()})
    code, output, errors = answer("doctor", str(run))
    assert "the data set has 1 image that the run did not have" in " ".join(output.split())
    environment["train"] = {"images": 5, "quarantined": []}
    (run / "environment.json").write_text(json.dumps(environment))
    assert answer("doctor", str(run)) == (0, f"{run}: no image was lost\n", "")
    code, _, errors = answer("doctor", str(tmp_path))
    assert code == 2
    assert "is not the folder of a run that has begun" in " ".join(errors.split())
