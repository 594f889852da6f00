"""What a campaign concludes from its rows, and the figures that its modules compute."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from benchmarks.gpu import photos
from benchmarks.gpu.campaign import main
from benchmarks.gpu.rows import make_recipe
from benchmarks.gpu.runs import are_same
from benchmarks.gpu.summary import compute_ratio, judge
from benchmarks.gpu.training import OPTIMIZERS, Loop, Network, alternate

H100 = "NVIDIA H100 80GB HBM3"


def make_row(
    contender: str, rate: float, mode: str | None = "default", **more: Any
) -> dict[str, Any]:
    row = {"what": "train", "status": "ok", "contender": contender, "images_per_sec": rate}
    return row | {"mode": mode, "model": "resnet50", "precision": "bf16", "batch": 256} | more


def find_verdict(title: str, *rows: dict[str, Any], device: str = H100) -> tuple[str, str]:
    [line] = [line for line in judge(rows, device) if line.what == title]
    return line.measured, line.verdict


def test_nothing_is_judged_that_was_not_measured() -> None:
    verdicts = {(line.measured, line.verdict) for line in judge([], H100)}
    assert verdicts == {("-", "not measured")}


DEFAULT = [
    make_row("plain", 3800),
    make_row("fused", 3900),
    make_row("compile, SGD", 2500),
    make_row("compile, fused SGD", 3000),
]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (DEFAULT, ("1.300", "reached")),
        ([make_row("plain", 3890), *DEFAULT[2:]], ("1.297", "missed")),
        ([*DEFAULT, make_row("compile, SGD", 9000, precision="fp16")], ("1.300", "reached")),
        (DEFAULT[:2], ("-", "not measured")),
    ],
    ids=["reached", "missed", "other precision", "no loop"],
)
def test_the_fastest_engine_is_judged_against_the_fastest_compiled_loop(
    rows: list[Any], expected: tuple[str, str]
) -> None:
    assert find_verdict("resnet50 over compile", *rows) == expected
    assert find_verdict("resnet50 over max-autotune", *rows) == ("-", "not measured")


def test_a_ratio_of_contenders_that_alternated_has_an_interval() -> None:
    # The clock falls by half: rates fall, their ratio does not.
    ours = make_row("plain", 0, rounds=[120.0, 110.0, 60.0])
    loop = make_row("compile, SGD", 0, rounds=[100.0, 90.0, 50.0])
    ratio, low, high = compute_ratio(ours | {"images_per_sec": 97}, loop | {"images_per_sec": 80})
    logs = np.log([1.2, 110 / 90, 1.2])
    assert ratio == pytest.approx(np.exp(logs.mean()))
    half = 4.303 * logs.std(ddof=1) / np.sqrt(3)
    assert (low, high) == pytest.approx((ratio / np.exp(half), ratio * np.exp(half)))


def test_contenders_alternate_and_each_round_begins_with_another_one() -> None:
    class Sleeper:
        is_deterministic = False

        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, steps: int) -> None:
            turns.append((self.name, steps))

    turns: list[tuple[str, int]] = []
    sleepers: dict[str, Any] = {name: Sleeper(name) for name in "abc"}
    *_, times = alternate(sleepers, "cpu", 2, turn_ms=0)
    assert [len(times[name]) for name in "abc"] == [2, 2, 2]
    counted = [name for name, steps in turns if steps == 2]
    assert counted == list("abcabcbca")


@pytest.mark.parametrize(
    ("device", "rate", "verdict"),
    [
        (H100, 3000, "reached"),
        (H100, 2999, "missed"),
        ("NVIDIA H200", 4499, "missed"),
        ("other", 9000, "not measured"),
    ],
)
def test_the_rate_that_is_wanted_depends_on_the_device(
    device: str, rate: float, verdict: str
) -> None:
    title = "resnet50, images/s in one process"
    assert find_verdict(title, make_row("plain", rate), device=device)[1] == verdict


def test_one_wrong_row_of_many_is_missed() -> None:
    right = {"what": "repeated", "same": True}
    wrong = {"what": "repeated", "same": False, "same_from_a_graph": True}
    assert find_verdict("the same bits twice", right, right) == ("2 of 2", "reached")
    assert find_verdict("the same bits twice", right, wrong) == ("1 of 2", "missed")
    assert find_verdict("from a CUDA graph", right, wrong) == ("1 of 1", "reached")


def test_ratios_are_those_of_the_same_part() -> None:
    graph = make_row("graph", 3100, "reduce-overhead")
    plain = make_row("plain", 3000, "reduce-overhead")
    title = "a CUDA graph over plain"
    assert find_verdict(title, graph, plain, make_row("plain", 9000)) == ("1.033", "reached")
    assert find_verdict(title, graph, make_row("plain", 3000)) == ("-", "not measured")
    bf16 = make_row("precisions", 3400, None)
    fp32 = make_row("precisions", 1000, None, precision="fp32")
    assert find_verdict("bf16 over fp32", bf16, fp32) == ("3.400", "missed")
    data = make_row("JPEGs", 960, None, compute_only_images_per_sec=1000)
    title = "resnet50, from JPEGs over a held batch"
    assert find_verdict(title, data) == ("0.960", "reached")


def test_a_host_that_waits_for_the_device_is_missed() -> None:
    row = {"what": "host", "contender": "plain", "host_ms_a_step": 0.5}
    row |= {"returned_sec": 0.01, "done_sec": 0.5}
    title = "host time of a step, ms"
    expected = ("0.50; train returns after 2% of the steps' time", "reached")
    assert find_verdict(title, row) == expected
    assert find_verdict(title, row | {"returned_sec": 0.49})[1] == "missed"
    assert find_verdict(title, row | {"host_ms_a_step": 1.5})[1] == "missed"


def test_verify_must_run_on_the_device_and_the_message_must_advise() -> None:
    title = "lockstep verify in every precision"
    engine: dict[str, Any] = {"device": H100, "rows": [{"passed": True}]}
    row: dict[str, Any] = {"what": "verify", "engines": {"torch": engine}}
    assert find_verdict(title, row)[1] == "reached"
    assert find_verdict(title, row, device="CPU")[1] == "missed"
    engine["rows"] += [{"passed": False}]
    assert find_verdict(title, row)[1] == "missed"
    title = "the message when memory is short"
    reason = "too little memory for 512 images; use --set accumulation_steps=2"
    row = {"what": "largest batch", "tries": [{"reason": ""}, {"reason": reason}]}
    assert find_verdict(title, row)[1] == "reached"
    assert find_verdict(title, row | {"tries": [{"reason": "killed"}]})[1] == "missed"


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (["..s", "2 passed, 1 skipped in 1.00s"], "reached"),
        (["ss", "2 skipped in 1.00s"], "missed"),
        (["F.", "FAILED a.py::b - off by 3", "1 failed, 1 passed in 1.00s"], "missed"),
        (["!!!! KeyboardInterrupt !!!!", "2 passed in 1.00s"], "not measured"),
    ],
    ids=["passed", "all skipped", "failed", "not finished"],
)
def test_a_suite_whose_tests_were_all_skipped_or_not_finished_is_not_passed(
    lines: list[str], verdict: str
) -> None:
    row = {"what": "conformance", "lines": lines}
    assert find_verdict("conformance suite on the device", row)[1] == verdict


def test_results_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"part": "one", "about": {"device": H100}, "rows": DEFAULT}
    for status in ("ok", "failed"):
        text = json.dumps(result | {"status": status, "reason": "it broke"})
        (tmp_path / f"{status}.json").write_text(text)
    assert main(["--show", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{H100}\n")
    assert "one: failed: it broke" in output
    assert output.count("not measured") > 5


# Figures


def test_runs_that_differ_in_a_bit_or_a_loss_are_distinguished(tmp_path: Path) -> None:
    a = tmp_path / "a"
    b = tmp_path / "b"
    for run in (a, b):
        folder = run / "checkpoints" / "step-00000012"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        step = '"first_step": 0, "step": 12, "images": 1, "images_per_sec": 1.0'
        entry = f'{{"kind": "train", {step}, "losses": [1.0, 0.5]}}\n'
        (run / "log.jsonl").write_text(f'{entry}{{"kind": "tr')
    assert are_same(a, b)
    (b / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"Weights")
    assert not are_same(a, b)
    (b / "checkpoints" / "step-00000012" / "model.safetensors").write_bytes(b"weights")
    (b / "log.jsonl").write_text(entry.replace("0.5", "0.25"))
    assert not are_same(a, b)


def test_the_loops_take_the_step_of_sgd() -> None:
    recipe = make_recipe("resnet50", "fp32", 4, tiny=True)
    for optimizer in OPTIMIZERS:
        network = Network(recipe, "cpu", "eager")
        weight = network.model.get_parameter("conv1.weight")
        before = weight.detach().clone()
        [gradient] = torch.autograd.grad(network.compute_loss(), [weight])
        Loop(network, optimizer).run(1)
        expected = -1e-3 * (gradient + recipe.weight_decay * before)
        torch.testing.assert_close(weight.detach() - before, expected, rtol=1e-3, atol=1e-8)


def test_pictures_cost_a_decoder_what_photos_do(tmp_path: Path) -> None:
    [row] = photos.measure(str(tmp_path / "photos"), count=2)
    assert 80_000 < row["mean_bytes"] < 150_000
    first, second = [cv2.imread(str(path)) for path in sorted(tmp_path.rglob("*.jpg"))]
    assert first.shape == (375, 500, 3)
    assert first.std() > 20  # it is not a grey area
    assert not np.array_equal(first, second)
