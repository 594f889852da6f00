"""What a person sees of a run: plain lines without a terminal, a bar and lines on one, no colours
if none are wanted."""

import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest

from lockstep.cli.console import Reporter
from tests.processes import call

ABOUT = {
    "device": "CPU, 2 threads",
    "ranks": 1,
    "classes": 10,
    "train": {"images": 60, "quarantined": []},
    "val": {"images": 20, "quarantined": []},
}
START = {"kind": "start", "step": 0, "total": 40, "damaged": [], "notes": [], "environment": ABOUT}
WHOLE = START | {"steps_per_epoch": 10}
REPORT = {
    "steps": 40,
    "final": {
        "trained": {"top1_percent": 91.254, "top5_percent": 99.5, "loss": 0.34567, "images": 400}
    },
    "best": {"top1_percent": 92.0, "loss": 0.3, "images": 400, "step": 32},
    "images_per_sec": 123.45,
    "train_sec": 59.96,
    "quarantined": 3,
    "classes": list("abcdef"),
}
SUMMARY = [
    "  top-1                92.00 % (88.9 to 94.3) of 400 images, best at step 32",
    "  loss                 0.3000",
    "  last step            top-1 91.25 % (88.1 to 93.6) at step 40",
    "  training time        60.0 s",
    "  throughput           123.5 images/s (first steps left out)",
    "  bad images left out  3",
    "  run                  runs/[a]",
]
PUBLISHED = {
    "recipe": "resnet50-paddle-90ep",
    "changed": [],
    "interval_percent": [76.43, 77.17],
    "accuracies": [
        {"figure": "76.93 ± 0.14", "conditions": "PaddlePaddle, 90 epochs", "position": "within"}
    ],
    "not_compared": "",
}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind} | fields


EVALUATION = event(
    "evaluate",
    step=8,
    weights="trained",
    top1_percent=91.254,
    top5_percent=100.0,
    loss=0.34567,
    images=400,
)
EVALUATED = {"evaluates": ["trained", "ema"]}
PROBE = event("linear_probe", top1_percent=91.254, images=400, seconds=3.2)
FIRST_EVALUATIONS = (EVALUATION | {"step": 0}, EVALUATION | {"step": 0, "weights": "ema"})


def begun(**changes: Any) -> dict[str, Any]:
    return START | {"environment": ABOUT | changes}


def bad(count: int) -> dict[str, Any]:
    return {
        "images": 60,
        "root": "photos",
        "quarantined": [{"file": f"dots/{i}.jpg", "reason": "empty file"} for i in range(count)],
    }


note = "note: {}".format
NINE = dict.fromkeys("abcdefghi", 1)
MANY = START | {"notes": [*"abcde"], "details": ["x"]}
bad_line = "  photos/dots/{}.jpg: empty file".format
SHOWN = "top-1 91.25 % (88.1 to 93.6), top-5 100.00 %, loss 0.3457 on 400 images"
ON_TIME = {"elapsed_sec": 1.0}
FIRST_LINE = "60 training and 20 validation images on CPU, 2 threads"
FIGURES = {"loss": 2.346, "images_per_sec": 99.5, "images": 995, "lr": 0.004}
VERBOSE = (
    "all notes and details",
    "what early stopping waits for",
    "epochs and the time left",
    "the time left after a stop",
    "a detail if it is wanted",
    "what was chosen and why",
)
LINES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "a start": ([START], [FIRST_LINE]),
    "notes and bad images of folds, once": (
        [begun(train=bad(1)) | {"notes": ["[x] is slow"]}] * 2,
        ["note: [x] is slow", FIRST_LINE, "1 bad image left out:", bad_line(0), FIRST_LINE],
    ),
    "four notes": ([MANY], [*map(note, "abcd"), "  ... and 1 more, all in log.jsonl", FIRST_LINE]),
    "all notes and details": ([MANY], [*map(note, "abcdex"), FIRST_LINE]),
    "what early stopping waits for": (
        [
            WHOLE | ON_TIME | {"selection": "top1", "early_stopping_epochs": 2, "best": None},
            EVALUATION | {"step": 10},
            EVALUATION | {"step": 10, "weights": "ema", "top1_percent": 95.0},
            EVALUATION | {"step": 20},
            event("train", step=25, loss=2.346, images_per_sec=99.5, lr=0.004, elapsed_sec=9.0),
            EVALUATION | {"step": 30},
            EVALUATION | {"step": 40, "top1_percent": 96.0},
        ],
        [
            "recipe: 4 epochs of 10 steps",
            FIRST_LINE,
            f"step 10: {SHOWN}, best so far",
            "step 10 (moving average): top-1 95.00 % (92.4 to 96.7), top-5 100.00 %, loss 0.3457"
            " on 400 images, best so far",
            f"step 20: {SHOWN}; the best is 95.00 % at step 10 (moving average); stops after epoch"
            " 3 unless it improves",
            "epoch 3 of 4, step 25 of 40: loss 2.346, 99.5 images/s, lr 0.004, at most 5 s left",
            f"step 30: {SHOWN}; the best is 95.00 % at step 10 (moving average)",
            "step 40: top-1 96.00 % (93.6 to 97.5), top-5 100.00 %, loss 0.3457 on 400 images,"
            " best so far",
        ],
    ),
    "an epoch with its evaluation": (
        [
            WHOLE | ON_TIME | {"selection": "top1", "early_stopping_epochs": 0, "best": None},
            event("train", step=5, **FIGURES, elapsed_sec=6.0),
            event("train", step=10, **FIGURES, elapsed_sec=11.0),
            event("save", step=10, path="x"),
            event("progress", what="evaluating", done=1, total=2),
            EVALUATION | {"step": 10},
            event("train", step=20, **FIGURES, elapsed_sec=21.0),
            EVALUATION | {"step": 20, "top1_percent": 50.0},
            event("train", step=30, **FIGURES, elapsed_sec=31.0),
            event("train", step=35, **FIGURES, elapsed_sec=331.0),
            event("train", step=40, **FIGURES, elapsed_sec=336.0),
            event("warning", message="wandb [x] failed"),
        ],
        [
            "recipe: 4 epochs of 10 steps",
            FIRST_LINE,
            "epoch 1 of 4: loss 2.346; validation: top-1 91.25 % (88.1 to 93.6), top-5 100.00 %,"
            " loss 0.3457, best so far; 30 s left",
            "epoch 2 of 4: loss 2.346; validation: top-1 50.00 % (45.1 to 54.9), top-5 100.00 %,"
            " loss 0.3457; 20 s left",
            "epoch 3 of 4: loss 2.346; 10 s left",
            "epoch 4 of 4, step 35 of 40: loss 2.346, 99.5 images/s, lr 0.004, 1 min left",
            "epoch 4 of 4: loss 2.346",
            "warning: wandb [x] failed",
        ],
    ),
    "an epoch with two evaluations": (
        [
            WHOLE | EVALUATED | {"selection": "top1", "best": None, "early_stopping_epochs": 2},
            event("train", step=10, **FIGURES),
            EVALUATION | {"step": 10},
            EVALUATION | {"step": 10, "weights": "ema", "top1_percent": 95.0},
            event("train", step=20, **FIGURES),
            EVALUATION | {"step": 20},
            EVALUATION | {"step": 20, "weights": "ema", "top1_percent": 90.0},
        ],
        [
            "recipe: 4 epochs of 10 steps",
            FIRST_LINE,
            "epoch 1 of 4: loss 2.346; validation of the moving average: top-1 95.00 %"
            " (92.4 to 96.7), top-5 100.00 %, loss 0.3457, best so far",
            "epoch 2 of 4: loss 2.346; validation: top-1 91.25 % (88.1 to 93.6), top-5 100.00 %,"
            " loss 0.3457; stops after epoch 3 unless it improves",
        ],
    ),
    "a linear probe, whose evaluation is not shown twice": (
        [START | EVALUATED | {"probes": True}, *FIRST_EVALUATIONS, PROBE],
        [FIRST_LINE, "linear probe: 91.25 % (88.1 to 93.6) after 3 s"],
    ),
    "a first evaluation, also of the moving average": (
        [START | EVALUATED, *FIRST_EVALUATIONS],
        [FIRST_LINE, f"step 0: {SHOWN}"],
    ),
    "a start of several ranks": ([begun(ranks=4)], [f"{FIRST_LINE}, 4 ranks"]),
    "a start that resumes": ([START | {"step": 16}], [FIRST_LINE, "resuming after step 16 of 40"]),
    "a start after damage": (
        [START | {"step": 16, "damaged": ["step-00000024/model.safetensors is damaged [x]"]}],
        [
            "skipped a corrupt checkpoint: step-00000024/model.safetensors is damaged [x]",
            FIRST_LINE,
            "resuming after step 16 of 40",
        ],
    ),
    "a start with bad images": (
        [
            begun(
                train=bad(2),
                val={
                    "images": 20,
                    "quarantined": [{"file": "a/[b].jpg", "reason": "not an image"}],
                },
            )
        ],
        [
            FIRST_LINE,
            "3 bad images left out:",
            *map(bad_line, range(2)),
            "  val/a/[b].jpg: not an image",
        ],
    ),
    "a resumed start with bad images": (
        [begun(train=bad(2)) | {"step": 16}],
        [
            FIRST_LINE,
            "2 bad images left out, listed in environment.json",
            "resuming after step 16 of 40",
        ],
    ),
    "a start with many bad images": (
        [begun(train=bad(13))],
        [
            FIRST_LINE,
            "13 bad images left out:",
            *map(bad_line, range(10)),
            "  ... and 3 more, all in environment.json",
        ],
    ),
    "a start of a published recipe": (
        [WHOLE | {"changed": {"epochs": 4, "lr": 0.1}, "environment": ABOUT | {"recipe": "demo"}}],
        ["recipe demo with epochs=4, lr=0.1: 4 epochs of 10 steps", FIRST_LINE],
    ),
    "a start of a recipe with many changes": (
        [WHOLE | {"changed": NINE, "environment": ABOUT | {"recipe": "own"}}],
        [
            "recipe own with a=1, b=1, c=1, d=1, e=1, f=1 and 3 other fields: 4 epochs of 10 steps",
            FIRST_LINE,
        ],
    ),
    "a start of a recipe without a name": (
        [WHOLE | {"total": 10}],
        ["recipe: 1 epoch of 10 steps", FIRST_LINE],
    ),
    "a resumed run": (
        [
            event(
                "settings",
                out="runs/[a]",
                origins={"recipe": "the run's recipe (demo)", "execution": "backend=mxnet"},
            )
        ],
        ["resuming runs/[a] with the run's recipe (demo), backend=mxnet"],
    ),
    # From step 2 on, where the first interval ends: 98 s for 8 steps until step 10, so 368 s for
    # 30; 6 s for the last one.
    "epochs and the time left": (
        [
            WHOLE | {"environment": ABOUT | {"recipe": "demo"}, "elapsed_sec": 5.0},
            *(
                event(
                    "train",
                    step=step,
                    first_step=first,
                    elapsed_sec=second,
                    loss=2.0,
                    images_per_sec=9.0,
                    lr=0.1,
                )
                for first, step, second in (
                    (0, 2, 65.0),
                    (2, 10, 163.0),
                    (10, 39, 287.0),
                    (39, 40, 300.0),
                )
            ),
        ],
        [
            "recipe demo: 4 epochs of 10 steps",
            FIRST_LINE,
            "epoch 1 of 4, step 2 of 40: loss 2.000, 9.0 images/s, lr 0.1, 19 min left",
            "epoch 1 of 4, step 10 of 40: loss 2.000, 9.0 images/s, lr 0.1, 6 min left",
            "epoch 4 of 4, step 39 of 40: loss 2.000, 9.0 images/s, lr 0.1, 6 s left",
            "epoch 4 of 4, step 40 of 40: loss 2.000, 9.0 images/s, lr 0.1",
        ],
    ),
    # A step takes 1 s. The process is stopped for 180 s in the steps 7 and 8. An evaluation after
    # step 10 takes 10 s.
    "the time left after a stop": (
        [
            WHOLE | {"elapsed_sec": 0.0},
            *(
                event(
                    "train",
                    step=step,
                    elapsed_sec=second,
                    loss=2.0,
                    images=steps * 9,
                    images_per_sec=9.0 * steps / seconds,
                    lr=0.1,
                )
                for steps, step, second, seconds in (
                    (2, 2, 60.0, 60.0),
                    (2, 4, 62.0, 2.0),
                    (2, 6, 64.0, 2.0),
                    (2, 8, 246.0, 182.0),
                    (2, 10, 248.0, 2.0),
                    (2, 12, 260.0, 2.0),
                )
            ),
        ],
        [
            "recipe: 4 epochs of 10 steps",
            FIRST_LINE,
            "epoch 1 of 4, step 2 of 40: loss 2.000, 0.3 images/s, lr 0.1, 19 min left",
            "epoch 1 of 4, step 4 of 40: loss 2.000, 9.0 images/s, lr 0.1, 36 s left",
            "epoch 1 of 4, step 6 of 40: loss 2.000, 9.0 images/s, lr 0.1, 34 s left",
            "epoch 1 of 4, step 8 of 40: loss 2.000, 0.1 images/s, lr 0.1, 32 s left",
            "epoch 1 of 4, step 10 of 40: loss 2.000, 9.0 images/s, lr 0.1, 30 s left",
            "epoch 2 of 4, step 12 of 40: loss 2.000, 9.0 images/s, lr 0.1, 56 s left",
        ],
    ),
    "an interval": (
        [START, event("train", step=10, loss=2.30259, images_per_sec=21.04, lr=0.0123456)],
        [FIRST_LINE, "step 10 of 40: loss 2.303, 21.0 images/s, lr 0.01235"],
    ),
    "an evaluation of few classes": (
        [
            begun(classes=5),
            EVALUATION,
            event("finish", report=REPORT | {"classes": list("abcde")}, out="runs/[a]"),
        ],
        [
            FIRST_LINE,
            "step 8: top-1 91.25 % (88.1 to 93.6), loss 0.3457 on 400 images",
            *SUMMARY,
        ],
    ),
    "an evaluation": (
        [EVALUATION],
        ["step 8: top-1 91.25 % (88.1 to 93.6), top-5 100.00 %, loss 0.3457 on 400 images"],
    ),
    "an evaluation of averages": (
        [EVALUATION | {"weights": "ema", "top1_percent": 0.0, "images": 1} | {"top5_percent": 0.0}],
        [
            "step 8 (moving average): top-1 0.00 % (0.0 to 79.3), top-5 0.00 %, loss 0.3457 on 1"
            " image"
        ],
    ),
    "a finish": ([event("finish", report=REPORT, out="runs/[a]")], SUMMARY),
    "a finish after a linear probe": (
        [event("finish", report=REPORT | {"steps": 0, "stopped_early": "so"}, out="runs/[a]")],
        [
            "stopped early at step 0: so",
            "to train the classifier on augmented images: repeat the command with --set"
            " flip_probability=0.5 and another --out",
            *[line.replace("step 40", "step 0") for line in SUMMARY],
        ],
    ),
    "a finish next to published accuracies": (
        [event("finish", report=REPORT | {"published": PUBLISHED}, out="runs/[a]")],
        [
            *SUMMARY[:3],
            "  95 % interval        76.43 to 77.17 % (Wilson, of top-1)",
            "  published            76.93 ± 0.14 (PaddlePaddle, 90 epochs): within the interval",
            *SUMMARY[3:],
        ],
    ),
    "a finish of few steps": (
        [event("finish", report=REPORT | {"images_per_sec": None}, out="runs/[a]")],
        [*SUMMARY[:4], "  throughput           too few steps to measure", *SUMMARY[5:]],
    ),
    "a run that was finished": (
        [event("already_finished", report=REPORT, out="runs/[a]")],
        ["this run is finished (step 40); nothing is left to do", *SUMMARY],
    ),
    "short progress": (
        [event("progress", what="evaluating", done=done, total=3) for done in (1, 2, 3)],
        [],
    ),
    "progress in leaps": (
        [
            event("progress", what="indexing", done=done, total=1500)
            for done in (64, 200, 640, 704, 1500)
        ],
        ["indexing: 200 of 1500", "indexing: 640 of 1500", "indexing: 1500 of 1500"],
    ),
    "long progress": (
        [event("progress", what="drawing", done=done, total=2400) for done in range(1, 2401)],
        [f"drawing: {done} of 2400" for done in range(240, 2401, 240)],
    ),
    "a warning": ([event("warning", message="wandb [x] failed")], ["warning: wandb [x] failed"]),
    "a detail": ([event("detail", message="temperature 2")], []),
    "a detail if it is wanted": (
        [event("detail", message="temperature 2")],
        ["note: temperature 2"],
    ),
    "what was chosen": (
        [event("settled", lines=["my-images: 2 logits", "  for 9 images"]), WHOLE],
        ["my-images: 2 logits", FIRST_LINE],
    ),
    "what was chosen and why": (
        [event("settled", lines=["my-images: 2 logits", "  for 9 images"]), WHOLE],
        ["my-images: 2 logits", "  for 9 images", "recipe: 4 epochs of 10 steps", FIRST_LINE],
    ),
    "a trace": (
        [event("trace", first_step=3, last_step=4, path="a/[b]")],
        ["traced steps 3 to 4: a/[b]"],
    ),
    "a saved checkpoint": ([event("save", step=8, path="a/b")], []),
    "an event of another version": ([event("something new", step=8)], []),
}


@pytest.mark.parametrize("name", LINES)
def test_events_are_lines_without_a_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    events, lines = LINES[name]
    with Reporter(is_verbose=name in VERBOSE) as reporter:
        for event in events:
            reporter(event)
    assert capsys.readouterr().out.splitlines() == lines


def test_a_long_line_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter() as reporter:
        reporter.say("word " * 100)
    assert capsys.readouterr().out == "word " * 100 + "\n"


SHOW = f"""
from lockstep.cli.console import Reporter
with Reporter() as reporter:
    reporter({WHOLE!r} | {{"elapsed_sec": 0.0}})
    for done in (1, 2, 3):
        reporter({{"kind": "progress", "what": "evaluating", "done": done, "total": 4}})
    figures = {{"loss": 1.5, "images_per_sec": 9.0, "lr": 0.1, "elapsed_sec": 60.0}}
    reporter({{"kind": "train", "step": 20}} | figures)
"""
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)(?:;\d+)*m")


def run_on_a_terminal(*command: str, **environment: str) -> str:
    """Return what a Python command writes to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    surroundings = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"} | environment
    with subprocess.Popen(
        [sys.executable, *command], stdin=theirs, stdout=theirs, stderr=theirs, env=surroundings
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux reports a closed other end in this way
                break
            if not part:
                break
            written += part
        assert process.wait() == 0
    os.close(ours)
    return written.decode()


def test_a_terminal_shows_a_bar_and_no_line_for_every_interval() -> None:
    shown = run_on_a_terminal("-c", SHOW)
    assert FIRST_LINE in shown
    assert "20/40" in shown
    assert "epoch 2 of 4" in shown
    assert "60 s left" in shown or "1 min left" in shown
    assert "loss 1.500, 9.0 images/s" in shown
    assert "step 20 of 40" not in shown
    assert COLOUR.search(shown)


def test_a_terminal_shows_no_colours_if_none_are_wanted() -> None:
    shown = run_on_a_terminal("-c", SHOW, NO_COLOR="1")
    assert "20/40" in shown
    assert not COLOUR.search(shown)


@pytest.mark.parametrize(
    "arguments", [["recipes"], ["recipes", "diff", "demo", "resnet50-mxnet-90ep"], ["--help"]]
)
def test_without_a_terminal_there_are_no_escape_codes(arguments: list[str]) -> None:
    code, output, errors = call(*arguments)
    assert (code, errors) == (0, "")
    assert output
    assert "\x1b" not in output


@pytest.mark.parametrize(
    "arguments", [["recipes", "diff", "demo", "resnet50-mxnet-90ep"], ["train", "--help"]]
)
def test_commands_on_a_terminal_show_no_colours_if_none_are_wanted(arguments: list[str]) -> None:
    shown = run_on_a_terminal("-m", "lockstep", *arguments, NO_COLOR="1")
    assert shown
    assert not COLOUR.search(shown)
