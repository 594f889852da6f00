"""`lockstep demo`, with a narrow model and few images. `make demo` runs it unchanged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import backends
from lockstep.recipes import load_recipe
from tests.cli.cases import read_report, set_fields
from tests.lines import check_lines

Run = Callable[..., tuple[int, str, str]]
NARROW = (
    "model={block: bottleneck, layers: [1, 1, 1, 1], stem_width: 8, widths: [8, 8, 16, 16], groups:"
    " 2, expansion: 2}"
)
SMALL = ("--images", 60, "--set", NARROW, *set_fields(epochs=1, image_size=32, loggers="[]"))
KINDS = ["checks", "dots", "rays", "rings", "stripes"]


def test_the_demo_draws_trains_and_predicts_by_name(answer: Run, tmp_path: Path) -> None:
    code, output, errors = answer("demo", "--out", tmp_path / "a demo", *SMALL)
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    images = "60 training and 10 validation images of 5 textures"
    assert lines[0] == f"{images} in {tmp_path / 'a demo' / 'data'}"
    report = read_report(tmp_path / "a demo" / "run")
    assert (report["final"]["trained"]["images"], report["classes"]) == (10, KINDS)
    predictions = [line.split() for line in lines if line.startswith("  val/")]
    assert [path for path, *_ in predictions] == [f"val/{kind}/00012.jpg" for kind in KINDS]
    assert {name for _, name, *_ in predictions} <= set(KINDS)
    run = f"'{tmp_path / 'a demo' / 'run'}'"
    picture = f"'{tmp_path / 'a demo' / 'data/val/checks/00012.jpg'}'"
    assert lines[-3:] == [
        f"next:   lockstep report {run}",
        f"        lockstep predict {run} {picture}",
        f"        lockstep serve {run}",
    ]


def test_the_demo_again_finds_itself_finished(
    answer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer("demo", "--out", tmp_path, *SMALL)[0] == 0
    # Another processor, on which a new run would use another precision.
    monkeypatch.setattr("lockstep.system.machine.fast_precision", lambda on_gpu: "fp32")
    code, output, errors = answer("demo", "--out", tmp_path, *SMALL)
    assert (code, errors) == (0, "")
    assert "precision bf16: the existing run was started with it" in output
    assert "this run is finished" in output
    assert "drawing images" not in output


def precision(run: Path) -> str:
    return load_recipe(run).precision


def test_the_demo_trains_in_bf16_where_it_is_in_hardware(answer: Run, tmp_path: Path) -> None:
    output = answer("demo", "--out", tmp_path, *SMALL)[1]
    assert "precision bf16: this processor multiplies it in hardware" in output
    assert precision(tmp_path / "run") == "bf16"


@pytest.mark.usefixtures("without_bf16")
def test_the_demo_trains_in_fp32_where_bf16_is_emulated(answer: Run, tmp_path: Path) -> None:
    output = answer("demo", "--out", tmp_path, *SMALL)[1]
    assert "precision fp32: bf16 is emulated on this processor" in output
    assert precision(tmp_path / "run") == "fp32"


def test_a_precision_that_is_set_takes_precedence(answer: Run, tmp_path: Path) -> None:
    output = answer("demo", "--out", tmp_path, *SMALL, "--set", "precision=fp32")[1]
    assert "precision fp32" not in output
    assert precision(tmp_path / "run") == "fp32"


def test_a_missing_framework_is_reported_before_anything_is_drawn(
    answer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = backends.Framework(("no-such-distribution",), "pip install it")
    monkeypatch.setitem(backends.FRAMEWORKS, "torch", missing)
    monkeypatch.setattr(backends, "find_interpreter", lambda name: None)
    code, output, errors = answer("demo", "--out", tmp_path / "demo")
    assert (code, output) == (2, "")
    check_lines(errors, "^lockstep: backend 'torch' needs no-such-distribution: pip install")
    assert not (tmp_path / "demo").exists()


def test_a_wrong_setting_is_reported_before_anything_is_drawn(answer: Run, tmp_path: Path) -> None:
    code, output, errors = answer("demo", "--out", tmp_path / "demo", "--set", "epochs=0")
    assert (code, output) == (2, "")
    assert "epochs" in errors
    assert not (tmp_path / "demo").exists()


def test_too_few_images_are_wrong_use(answer: Run, tmp_path: Path) -> None:
    code, _, errors = answer("demo", "--out", tmp_path / "demo", "--images", 24)
    assert code == 2
    assert "'--images'" in errors
    assert "25" in errors
