"""`lockstep benchmark train|inference|all`, with made-up cells in place of measurements."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.benchmark import grid as grids
from lockstep.benchmark.iteration_times import format_rate
from lockstep.system.files import write_json
from lockstep.system.workers import Ended
from tests.benchmark.cases import rank, timeline
from tests.lines import check_lines
from tests.processes import call, running, wait_until
from tests.soak import SOAK, in_a_soak

Answer = Callable[..., tuple[int, str, str]]
SECONDS = {"fp32": 4.0, "bf16": 1.3}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the list of tasks. Cells are done at once: in fp32 a batch of 4 takes 4 s, twice the
    images twice the time."""
    tasks: list[dict[str, Any]] = []

    def work(command: list[object], folder: Path, progress: object) -> Ended:
        task = json.loads((folder / "cell.json").read_text())
        tasks.append(task)
        cell = task["cell"]
        plan = task["plan"]
        seconds = SECONDS[cell["dtype"]] * cell["batch"] / 4 * cell["ranks"] ** 0.5
        ends = [seconds * (i + 1) for i in range(plan["iterations"] * plan["epochs"])]
        for number in range(cell["ranks"]):
            write_json(
                folder / f"rank-{number}.json",
                rank(timeline(*ends)) | {"environment": {"torch": "2"}},
            )
        return Ended(0, "")

    monkeypatch.setattr(grids, "carry_out", work)
    return tasks


def kinds(tasks: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    cells = [task["cell"] for task in tasks]
    return [
        tuple(cell[name] for name in ("what", "backend", "model", "dtype", "ranks", "batch"))
        for cell in cells
    ]


def test_the_seeds_flags_are_understood(answer: Answer, measured: list[dict[str, Any]]) -> None:
    code, _, errors = answer(
        *("benchmark", "train", "-n", "1,2", "-b", "4,8", "--dtype", "fp32,bf16"),
        *("--model", "resnet50,resnet50-v1"),
        *("-i", 3, "-e", 2, "-w", 4, "--set", "image_size=64", "--set", "accumulation_steps=2"),
    )
    assert (code, errors) == (0, "")
    assert len(measured) == 16
    assert kinds(measured)[0] == ("train", "torch", "resnet50-v1.5", "fp32", 1, 4)
    assert kinds(measured)[-1] == ("train", "torch", "resnet50-v1", "bf16", 2, 8)
    plan = measured[0]["plan"]
    result = [plan[name] for name in ("iterations", "epochs", "warmup_epochs", "num_examples")]
    assert result == [3, 2, 4, None]
    assert measured[0]["recipe"]["image_size"] == 64
    assert measured[0]["execution"]["accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "whats"),
    [
        (("train",), ["train"]),
        (("inference",), ["inference"]),
        (("all",), ["train", "inference"]),
        (("all", "--only-inference"), ["inference"]),
        (("inference", "--only-inference"), ["inference"]),
    ],
)
def test_the_commands_name_says_what_is_measured(
    answer: Answer, measured: list[dict[str, Any]], arguments: tuple[str, ...], whats: list[str]
) -> None:
    assert answer("benchmark", *arguments, "-b", 4, "-i", 2)[0] == 0
    assert [kind[0] for kind in kinds(measured)] == whats


def cells_of(line: str) -> list[str]:
    return [part for part in line.split("  ") if part.strip()]


def test_quotients_follow_from_rates(answer: Answer, measured: list[dict[str, Any]]) -> None:
    _, output, _ = answer(
        "benchmark", "train", "-n", "1,2", "-b", 4, "--dtype", "fp32,bf16", "-i", 9
    )
    lines = output[output.index("ratios") :].splitlines()[2:]
    assert len(lines) == 4
    for line in lines:
        parts = [part.strip() for part in cells_of(line)]
        over, under, quotient = map(float, parts[2:5])
        assert quotient == pytest.approx(over / under, abs=5e-4)
        if parts[1] == "1":  # over one rank
            assert parts[6] == f"{over / under / 2:.0%}"
    assert f"{format_rate(1.0)} images/s" in output
    assert "steady" not in output


def test_weak_scaling_is_a_share_of_the_ranks(
    answer: Answer, measured: list[dict[str, Any]]
) -> None:
    # Two ranks take sqrt(2) times as long for twice the images.
    _, output, _ = answer("benchmark", "train", "-n", "1,2", "-b", 4, "-i", 9)
    assert "71%" in output.splitlines()[-1]


def test_a_report_is_written_and_held_against_another(
    answer: Answer, measured: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = tmp_path / "then.json"
    now = tmp_path / "now.json"
    assert answer("benchmark", "train", "-b", "4,8", "-i", 9, "-o", then)[0] == 0
    monkeypatch.setitem(SECONDS, "fp32", 2.0)
    code, output, _ = answer("benchmark", "train", "-b", 4, "-i", 9, "-o", now, "--compare", then)
    assert code == 0
    table = output[output.index("this report (left) next to the other") :]
    assert "batch 4 2.000 (2.000 to 2.000) 1.000 (1.000 to 1.000) 2.000 apart" in " ".join(
        table.split()
    )
    report = json.loads(now.read_text())
    assert report["command"].startswith("lockstep benchmark train -b 4 -i 9 -o ")
    assert report["environment"]["torch"] == {"torch": "2"}
    assert "0 cells here, 1 there" in table
    assert "no quotients are shown" not in table
    # Again: it is measured already, and the two reports are still shown next to each other.
    done = len(measured)
    _, again, _ = answer("benchmark", "train", "-b", 4, "-i", 9, "-o", now, "--compare", then)
    assert len(measured) == done
    assert "(kept)" in again
    assert "apart" in again


def test_nothing_is_divided_by_a_report_of_other_settings(
    answer: Answer, measured: list[dict[str, Any]], tmp_path: Path
) -> None:
    then = tmp_path / "then.json"
    result = answer("benchmark", "train", "-b", 4, "-i", 9, "--set", "image_size=64", "-o", then)[0]
    assert result == 0
    _, output, _ = answer("benchmark", "train", "-b", 4, "-i", 12, "--compare", then)
    table = output[output.index("this report (left) next to the other") :]
    assert "iterations: 12 here, 9 there" in table
    assert "changes: {} here, {'image_size': 64} there" in table
    assert "the measurements differ in changes" in table
    assert "batch 4 1.000 (1.000 to 1.000) 1.000 (1.000 to 1.000)" in " ".join(table.split())
    assert "quotient" not in table
    assert "apart" not in table


def test_json_is_the_report(answer: Answer, measured: list[dict[str, Any]]) -> None:
    code, output, _ = answer("benchmark", "inference", "-b", 4, "-i", 9, "--json")
    report = json.loads(output)
    assert code == 0
    assert [entry["images_per_sec"] for entry in report["cells"]] == [1.0]


def test_the_exit_code_is_1_if_no_cell_has_figures(
    answer: Answer, measured: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.json"
    work = grids.carry_out
    monkeypatch.setattr(grids, "carry_out", lambda command, folder, progress: Ended(1, "no"))
    assert answer("benchmark", "train", "-b", 4, "-i", 9, "-o", out)[0] == 1
    monkeypatch.setattr(grids, "carry_out", work)
    assert answer("benchmark", "train", "-b", "4,8", "-i", 9, "-o", out)[0] == 0
    monkeypatch.setattr(grids, "carry_out", lambda command, folder, progress: Ended(1, "no"))
    assert answer("benchmark", "train", "-b", "16", "-i", 9, "-o", out, "--json")[0] == 1
    assert answer("benchmark", "train", "-b", "16,8", "-i", 9, "-o", out)[0] == 0


def test_what_is_not_steady_is_said(answer: Answer, measured: list[dict[str, Any]]) -> None:
    _, output, _ = answer("benchmark", "train", "-b", 4, "-i", 3)
    assert "n 1, batch 4: not steady: too few iterations to tell: 3;" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "-b", "four"), "-b is 'four', expected comma-separated numbers"),
        (("train", "-n", ","), "-n is ',', expected comma-separated numbers"),
        (("train", "--only-inference"), "leaves nothing to measure in `benchmark train`"),
        (("train", "--dtype", "fp8"), "precision"),
        (("train", "--backend", "tortch"), "Did you mean torch"),
        (("train", "--model", "resnet51"), "there is no model 'resnet51'"),
        (("train", "--set", "precision=bf16"), "give it as --dtype"),
        (("train", "--set", "imagesize=3"), "Did you mean --set image_size=3"),
        (("train", "--num-examples", 5), "synthetic data is one batch"),
        (("train", "--compare", "none.json"), "none.json cannot be read"),
        (("train", "--data", "none"), "there is no folder none"),
        (("train", "--compile", "maybe"), "compile"),
    ],
)
def test_wrong_use_is_answered_before_anything_is_measured(
    answer: Answer, measured: list[dict[str, Any]], arguments: tuple[str, ...], message: str
) -> None:
    code, _, errors = answer("benchmark", *arguments)
    assert code == 2
    assert message in errors
    assert measured == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), *([(signal.SIGTERM, 75)] if SOAK else [])]
)
def test_a_signal_keeps_cells(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    out = tmp_path / "report.json"
    size = ("--set", "eval_crop=32", "--set", "eval_resize=36")
    cells = ("--backend", "reference", "--model", "resnet18", "-i", 2, "-b", "1,2,4,8")
    many = ("benchmark", "inference", *cells, *size)
    with running(*many, "-o", out) as process:
        wait_until(lambda: out.exists() and json.loads(out.read_text())["cells"])
        process.send_signal(number)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == expected, (output, errors)
    assert f"of 4 cells, kept in {out}" in errors
    assert json.loads(out.read_text())["cells"][0]["status"] == "ok"


@pytest.mark.usefixtures("without_bf16")
def test_an_emulated_precision_is_noted(answer: Answer, measured: list[dict[str, Any]]) -> None:
    code, output, errors = answer(
        "benchmark", "all", "--dtype", "fp32,bf16", "-b", "4,8", "-i", 2, "--json"
    )
    assert code == 0
    check_lines(errors, r"note: torch: bf16 is emulated.* --dtype fp32")
    assert len(json.loads(output)["cells"]) == len(measured) == 8


@in_a_soak  # the test above it runs the installed command, too
def test_the_installed_command_measures() -> None:
    small = ("--set", "image_size=32", "--set", "eval_crop=32", "--set", "eval_resize=36")
    code, output, errors = call(
        "benchmark", "train", "--model", "resnet18", "-b", 2, "-i", 2, *small
    )
    assert (code, errors) == (0, "")
    assert "train torch resnet18 fp32, n 1, batch 2: " in output
