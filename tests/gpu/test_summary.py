"""What a campaign concludes from its rows: `benchmarks/gpu/summary.py`, and the figures that parts
compute."""

import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from packaging.requirements import Requirement

from benchmarks.gpu import conformance, prepare
from benchmarks.gpu.command import main
from benchmarks.gpu.conformance import rows_of, without_determinism
from benchmarks.gpu.killed import different_files
from benchmarks.gpu.parts import PLAIN
from benchmarks.gpu.photos import draw_photos
from benchmarks.gpu.profiling import figures
from benchmarks.gpu.results import Results
from benchmarks.gpu.summary import wanted
from benchmarks.gpu.timing import SPARE_SEC, Ground, interval, ratio_row
from benchmarks.gpu.verifying import judged
from tests.processes import ROOT, wait_until

H100 = "NVIDIA H100 80GB HBM3"


def train(contender: str, rate: float, *, mode: str = "default", **more: Any) -> dict[str, Any]:
    row = {
        "what": "train",
        "contender": contender,
        "images_per_sec": rate,
        "interval": [rate - 1, rate + 1],
        "mode": mode,
    }
    return row | {"model": "resnet50", "precision": "bf16", "batch": 256, "turns": [rate]} | more


def verdicts(rows: list[dict[str, Any]], device: str = H100) -> dict[str, tuple[str, str]]:
    return {line.what: (line.measured, line.verdict) for line in wanted(rows, device)}


def test_nothing_is_judged_that_was_not_measured() -> None:
    found = verdicts([])
    assert len(found) > 12
    assert set(found.values()) == {("-", "not measured")}


OVER = "resnet50 over the better torch.compile"
DEFAULT = [train(PLAIN, 3900), train("compile, SGD", 2500), train("compile, fused SGD", 2600)]
AUTOTUNED = [
    train(PLAIN, 3900, mode="max-autotune"),
    train("max-autotune, fused SGD", 3000, mode="max-autotune"),
]
SLOW = [
    train(PLAIN, 3890, mode="max-autotune"),
    train("max-autotune, SGD", 3000, mode="max-autotune"),
]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (DEFAULT + AUTOTUNED, ("1.50 (compile), 1.30 (max-autotune) in bf16 at 256", "reached")),
        (DEFAULT + SLOW, ("1.50 (compile), 1.30 (max-autotune) in bf16 at 256", "missed")),
        (DEFAULT, ("1.50 (compile) in bf16 at 256", "not measured")),
        ([train(PLAIN, 3000), *DEFAULT[1:]], ("1.15 (compile) in bf16 at 256", "missed")),
        (DEFAULT[:1], ("- in bf16 at 256", "not measured")),
        ([train(PLAIN, 9000, mode="reduce-overhead"), *DEFAULT[1:]], ("-", "not measured")),
    ],
    ids=["both", "one below", "one alone", "one alone and below", "no baseline", "another mode"],
)
def test_the_engine_is_judged_against_the_better_compiled_loop(
    rows: list[Any], expected: tuple[str, str]
) -> None:
    assert verdicts(rows)[OVER] == expected


@pytest.mark.parametrize(
    ("device", "rate", "verdict"),
    [
        (H100, 3000, "reached"),
        (H100, 2999, "missed"),
        ("NVIDIA H200", 4499, "missed"),
        ("other", 9000, "not measured"),
    ],
)
def test_the_speed_that_is_wanted_depends_on_the_device(
    device: str, rate: float, verdict: str
) -> None:
    assert verdicts([train(PLAIN, rate)], device)["resnet50, images/s in one process"][1] == verdict


def test_one_wrong_row_of_many_is_missed() -> None:
    rows = [
        {"what": "repeated", "same": True, "resumed": True},
        {"what": "repeated", "same": True, "resumed": False},
    ]
    found = verdicts(rows)
    assert found["the same bits twice, narrow models, deterministic"] == ("2 of 2", "reached")
    assert found["the same bits after a resume, narrow models"] == ("1 of 2", "missed")


def test_a_suite_whose_tests_were_all_skipped_is_not_passed() -> None:
    row = {"what": "conformance", "tests": 3, "failures": 0, "errors": 0, "skipped": 3}
    title = "conformance suite on the device"
    assert verdicts([row])[title][1] == "missed"
    assert verdicts([row | {"skipped": 2}])[title][1] == "reached"
    assert verdicts([row | {"skipped": 0, "errors": 1}])[title] == (
        "1 of 3 failed, 0 skipped",
        "missed",
    )


def test_a_host_that_waits_for_the_device_is_missed() -> None:
    row = train(PLAIN, 3000, host_ms_a_step=0.5, returned_sec=0.01, done_sec=0.5)
    title = "host time of a step, ms"
    assert verdicts([row])[title] == ("0.50; train returns after 2% of the steps' time", "reached")
    assert verdicts([row | {"returned_sec": 0.49}])[title][1] == "missed"
    assert verdicts([row | {"host_ms_a_step": 1.5}])[title][1] == "missed"
    new = {"host_ms_a_new_batch": 4.5, "processor_ms_a_new_batch": 0.6}
    assert verdicts([row | new])["the same with new batches, ms"] == (
        "4.50, of which 0.60 of the processor",
        "",
    )


def test_a_captured_step_is_judged_against_the_plain_one() -> None:
    row = train(
        "lockstep, CUDA graph",
        3100,
        mode="reduce-overhead",
        host_ms_a_step=0.3,
        returned_sec=0.01,
        done_sec=0.5,
    )
    ratio = {
        "what": "ratio",
        "of": "lockstep, CUDA graph",
        "over": PLAIN,
        "ratio": 1.033,
        "interval": [1.03, 1.04],
    }
    found = verdicts([row, ratio])
    assert found["host time of a step as a CUDA graph, ms"][1] == "reached"
    assert found["host time of a step, ms"][1] == "not measured"
    assert found["resnet50, a CUDA graph over the plain step"] == (
        "1.033 (1.030 to 1.040)",
        "reached",
    )
    assert (
        verdicts([ratio | {"ratio": 0.99}])["resnet50, a CUDA graph over the plain step"][1]
        == "missed"
    )


def test_a_file_of_results_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "campaign.json")
    machine = results.add_machine(
        {"device": H100, "torch": "2.11.0", "cuda": "13.0", "sources": "abc"}
    )
    of_image = {"flop_an_image": 24e9, "bytes_an_image": 1e9, "computes_in": "bf16"}
    rows = [
        {"what": "copy", "gb_per_sec": 3000.0},
        {"what": "product", "precision": "bf16", "gflops": 750_000.0},
        train(PLAIN, 1500, **of_image),
        {
            "what": "train",
            "contender": "eager",
            "status": "failed",
            "reason": "",
            "model": "m",
            "precision": "p",
            "batch": 1,
        },
    ]
    same = {"settings": {}, "machine": machine, "seconds": 1}
    results.put({"part": "one", "status": "ok", "reason": "", "rows": rows} | same)
    results.put({"part": "two", "status": "failed", "reason": "it broke", "rows": []} | same)
    assert main(["--show", str(results.path)]) == 0
    shown = capsys.readouterr().out
    # 1500 images/s: 36 of 750 TFLOP/s, and 1.5 of 3 TB/s, which is the limit.
    (line,) = [line for line in shown.splitlines() if line.startswith("resnet50 bf16")]
    assert line.split()[-3:] == ["5%", "50%", "50%"]
    assert f"{H100}, torch 2.11.0, CUDA 13.0, sources abc" in shown
    assert "two: failed: it broke" in shown
    assert shown.count("not measured") > 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--show", "nowhere.json"],
            "campaign.py: nowhere.json is not a file; --show expects a campaign's campaign.json",
        ),
        (
            ["--parts", "machine,nothing"],
            "campaign.py: there is no part 'nothing'; the parts are machine, ",
        ),
    ],
)
def test_wrong_options_are_refused_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(said)


# Figures


def test_an_interval_is_students() -> None:
    # Mean 2, deviation 1, three values: 4.303 / sqrt(3) on each side.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48434, 2 + 2.48434), abs=1e-4)


def test_a_ratio_is_the_geometric_mean_over_turns() -> None:
    row = ratio_row({"a": [2.0, 8.0], "b": [1.0, 1.0]}, "a", "b")
    assert row["ratio"] == pytest.approx(4)
    assert row["interval"][0] < 4 < row["interval"][1]


def test_gaps_and_longest_kernels_of_a_trace() -> None:
    def kernel(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        kernel("long", 0, 100),
        kernel("within", 10, 50),  # another stream, at the same time
        kernel("next", 103, 47),  # a gap of 3 us, which does not count as one
        kernel("copy", 200, 100, "gpu_memcpy"),  # a gap of 50 us
        kernel("host", 0, 1000, "cpu_op"),
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 999},
    ]
    found = figures(events, ("kernel", "gpu_memcpy"), steps=2)
    assert (found["events"], found["gaps"], found["longest_gap_us"]) == (4, 0.5, 50)
    assert found["span_ms"] == pytest.approx(0.15)
    assert found["busy_share"] == pytest.approx(247 / 300)
    assert [row["name"] for row in found["longest"]] == ["long", "copy", "within", "next"]
    assert found["longest"][0]["share"] == pytest.approx(100 / 297)
    assert figures(events, ("none",), 1) == {"events": 0}


def test_tests_that_failed_are_named(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="1" skipped="0" time="2.5"><testcase'
        ' classname="a" name="b"><failure message="off by 3">...</failure></testcase><testcase'
        ' classname="a" name="c"><error message="no GPU"/></testcase><testcase classname="a"'
        ' name="d"/></testsuite></testsuites>'
    )
    counts, *failures = rows_of(report)
    assert counts == {
        "what": "conformance",
        "seconds": 2.5,
        "tests": 3,
        "failures": 1,
        "errors": 1,
        "skipped": 0,
    }
    assert [(row["test"], row["message"]) for row in failures] == [
        ("a::b", "off by 3"),
        ("a::c", "no GPU"),
    ]


def test_a_suite_that_takes_too_long_is_interrupted_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "test_long.py"
    begun = tmp_path / "begun"
    second = f"def test_second(): Path({str(begun)!r}).touch(); time.sleep(1000)\n"
    tests.write_text(
        "import time\nfrom pathlib import Path\ndef test_first(): assert 1 == 2\n" + second
    )

    class Short(Ground):
        """Its time is over soon after the second test has begun, however slowly pytest starts."""

        @property
        def left_sec(self) -> float:
            wait_until(begun.exists)
            return super().left_sec

    def command(ground: Ground, report: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(tests),
            f"--junitxml={report}",
        ]

    monkeypatch.setattr(conformance, "command", command)
    rows: list[Any] = []
    conformance.measure(
        Short("cpu", True, time.monotonic() + SPARE_SEC + 1, str(tmp_path)), rows.append
    )
    counts, failure = rows
    assert (counts["interrupted"], counts["failures"]) == (True, 1)
    assert failure["test"].endswith("test_first")
    assert verdicts([counts])["conformance suite on the device"][1] == "missed"
    assert (
        verdicts([counts | {"failures": 0}])["conformance suite on the device"][1] == "not measured"
    )


def test_operators_without_determinism_are_listed_once() -> None:
    line = (
        "  /x.py:1: UserWarning: {} does not have a deterministic implementation, but you set ...\n"
    )
    assert without_determinism(line.format("b") + line.format("a") + line.format("b")) == ["a", "b"]
    assert without_determinism("1 passed") == []


def test_the_largest_share_of_a_bound_is_found() -> None:
    row = {"quantity": "loss", "relative": 1e-6, "bound": 1e-5, "passed": True}
    other = {"quantity": "logits", "relative": 4e-6, "bound": 5e-6, "passed": True}
    exact = {"quantity": "counts", "relative": None, "bound": 0.0, "passed": True}
    found = judged({"device": "GPU", "rows": [row, other, exact]})
    assert (found["passed"], found["of"], found["failed"]) == (True, "logits", [])
    assert found["largest_share_of_a_bound"] == pytest.approx(0.8)
    assert judged({"device": "GPU", "rows": [row, exact | {"passed": False}]})["failed"] == [
        "counts"
    ]


def test_runs_that_differ_in_a_bit_or_a_loss_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name / "checkpoints" / "step-00000012"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "log.jsonl").write_text(
            '{"kind": "train", "step": 12, "losses": [1.0, 0.5]}\n{"kind": "tr'
        )
    a = tmp_path / "a"
    b = tmp_path / "b"
    assert different_files(a, b) == []
    (b / "log.jsonl").write_text('{"kind": "train", "step": 12, "losses": [1.0, 0.25]}\n')
    (b / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"Weights")
    assert different_files(a, b) == ["losses", "model.safetensors"]


def test_the_wheels_that_are_fetched_are_of_packages_that_lockstep_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {Requirement(each).name for each in project["dependencies"]}
    assert {*prepare.ALONE, *prepare.WITH_NEEDS} <= needed
    assert all(
        command[-1] in needed and "3.12" in command
        for command in prepare.commands("3.12", Path("out"))
    )


def test_pictures_cost_a_decoder_what_photos_do(tmp_path: Path) -> None:
    assert 80_000 < draw_photos(tmp_path, 2) < 150_000
    first, second = (cv2.imread(str(path)) for path in sorted(tmp_path.rglob("*.jpg")))
    assert first.shape == (375, 500, 3)
    assert first.std() > 20  # it is no grey area
    assert not np.array_equal(first, second)
