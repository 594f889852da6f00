"""Complete runs of a tiny model: what they write, how they stop and resume."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import lockstep
from lockstep.data.textures import draw_data_set
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.runs.intervals import plan_intervals
from lockstep.system.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    Interrupted,
    RecipeError,
)
from lockstep.system.event_log import read_log
from lockstep.system.machine import Arithmetic
from lockstep.weights import checkpoint
from lockstep.weights.formats import mxnet_params

EXECUTION = Execution(log_every_steps=2, save_every_steps=3)
STEPS = 14  # 60 images, 8 per step, 2 epochs


def losses(run: Path) -> list[float]:
    return [
        loss
        for entry in read_log(run / "log.jsonl")
        if entry["kind"] == "train"
        for loss in entry["losses"]
    ]


def weights(run: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    folder = checkpoint.checkpoint_path(run / "checkpoints", step)
    return load_file(folder / "model.safetensors") | {
        f"momentum.{name}": value
        for name, value in load_file(folder / "momentum.safetensors").items()
    }


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b)
    assert len(losses(a)) == STEPS
    left = weights(a)
    right = weights(b)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


def evaluated_steps(run: Path) -> list[int]:
    return [entry["step"] for entry in read_log(run / "log.jsonl") if entry["kind"] == "evaluate"]


def send(
    number: signal.Signals, when: Callable[[dict[str, Any]], bool]
) -> Callable[[dict[str, Any]], None]:
    """Return a listener that sends this process a signal at the first matching event."""
    sent = []

    def listener(event: dict[str, Any]) -> None:
        if not sent and when(event):
            sent.append(event)
            os.kill(os.getpid(), number)

    return listener


@pytest.fixture(scope="module")
def uninterrupted(
    tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    lockstep.train(tiny_recipe.rename("resnet50-paddle-90ep"), textures, out, execution=EXECUTION)
    return out


@pytest.mark.parametrize("first", range(23))
def test_borders_of_intervals_do_not_depend_on_where_a_run_starts(first: int) -> None:
    execution = Execution(log_every_steps=4, save_every_steps=5)
    whole = [span.stop for span in plan_intervals(0, 23, 9, execution)]
    assert whole == [4, 5, 8, 9, 10, 12, 15, 16, 18, 20, 23]
    assert [span.stop for span in plan_intervals(first, 23, 9, execution)] == [
        stop for stop in whole if stop > first
    ]


def test_a_run_saves_at_every_epoch_and_evaluates_as_often_as_asked() -> None:
    found = list(plan_intervals(0, 30, 6, Execution(log_every_steps=100, evaluate_every_epochs=2)))
    assert [span.stop for span in found if span.saves] == [6, 12, 18, 24, 30]
    assert [span.stop for span in found if span.evaluates] == [12, 24, 30]


def test_a_run_reports_exact_counts(uninterrupted: Path) -> None:
    report = json.loads((uninterrupted / "report.json").read_text())
    assert report["final"]["trained"]["images"] == 20
    assert report["per_class"]["trained"]["images"] == [2] * 10
    hits = sum(report["per_class"]["trained"]["top1"])
    assert report["final"]["trained"]["top1_percent"] == 100 * hits / 20


def test_a_run_of_a_published_recipe_on_other_images_reports_why_it_is_not_compared(
    uninterrupted: Path,
) -> None:
    published = json.loads((uninterrupted / "report.json").read_text())["published"]
    assert (published["recipe"], published["accuracies"]) == ("resnet50-paddle-90ep", [])
    assert published["not_compared"].endswith("these are 10 and 20")


def test_the_log_holds_every_step_once_and_its_learning_rate(
    uninterrupted: Path, tiny_recipe: Recipe
) -> None:
    entries = [entry for entry in read_log(uninterrupted / "log.jsonl") if entry["kind"] == "train"]
    assert [s for e in entries for s in range(e["first_step"], e["step"])] == list(range(STEPS))
    assert entries[1]["lr"] == pytest.approx(
        0.05 * 2 / 7
    )  # step 2, on the way to 0.05 over the 7 steps of an epoch
    assert evaluated_steps(uninterrupted) == [7, 14]


def test_a_finished_run_started_again_changes_nothing(
    uninterrupted: Path, textures: Path, tiny_recipe: Recipe
) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in uninterrupted.rglob("*")
        if path.suffix in (".jsonl", ".safetensors")
    }
    kinds: list[str] = []
    report = lockstep.train(
        tiny_recipe, textures, uninterrupted, listener=lambda event: kinds.append(event["kind"])
    )
    assert report == json.loads((uninterrupted / "report.json").read_text())
    assert "already_finished" in kinds
    assert before == {path: path.stat().st_mtime_ns for path in before}


@pytest.mark.parametrize("step", [1, 5, 7, 10])
def test_a_run_stopped_by_sigterm_goes_on_bit_for_bit(
    step: int, uninterrupted: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    every_step = EXECUTION.replace(log_every_steps=1)
    listener = send(
        signal.SIGTERM, lambda event: event["kind"] == "train" and event["step"] >= step
    )
    with pytest.raises(Interrupted) as stopped:
        lockstep.train(tiny_recipe, textures, run, execution=every_step, listener=listener)
    assert stopped.value.exit_code == 75
    assert step <= checkpoint.steps(run / "checkpoints")[-1] <= step + 2
    lockstep.train(
        tiny_recipe, textures, run, execution=EXECUTION.replace(loader_threads=5, loader_batches=1)
    )
    assert_same_run(run, uninterrupted)


def test_a_run_in_parts_ends_bit_for_bit_like_an_undivided_one(
    uninterrupted: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for part, step, evaluated in (
        ({"stop_after_steps": 4}, 4, []),
        ({"stop_after_epochs": 1}, 7, [7]),
    ):
        events: list[dict[str, Any]] = []
        how = EXECUTION.replace(save_every_steps=0, **part)
        assert (
            lockstep.train(tiny_recipe, textures, run, execution=how, listener=events.append) == {}
        )
        assert events[-1] == {"kind": "pause", "step": step, "total": STEPS, "out": str(run)}
        assert checkpoint.steps(run / "checkpoints")[-1] == step
        assert evaluated_steps(run) == evaluated
        assert not (run / "report.json").exists()
    report = lockstep.train(out=run)  # to the end: parts are of one command alone
    assert_same_run(run, uninterrupted)
    assert (
        report["per_class"] == json.loads((uninterrupted / "report.json").read_text())["per_class"]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_during_evaluation_stops_it_and_it_is_made_up_for(
    number: signal.Signals, uninterrupted: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    listener = send(
        number, lambda event: event["kind"] == "progress" and event["what"].startswith("evaluating")
    )
    with pytest.raises(Interrupted) as stopped:
        lockstep.train(tiny_recipe, textures, run, execution=EXECUTION, listener=listener)
    assert stopped.value.exit_code == 75
    assert evaluated_steps(run) == []
    assert checkpoint.steps(run / "checkpoints")[-1] == 7
    lockstep.train(tiny_recipe, textures, run, execution=EXECUTION)
    assert evaluated_steps(run) == [7, 14]
    assert_same_run(run, uninterrupted)


def test_a_stop_in_the_last_evaluation_leaves_a_run_that_can_be_finished(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(epochs=1)
    listener = send(
        signal.SIGTERM,
        lambda event: event["kind"] == "progress" and event["what"].startswith("evaluating"),
    )
    with pytest.raises(Interrupted):
        lockstep.train(recipe, textures, run, listener=listener)
    report = lockstep.train(recipe, textures, run)
    assert report["final"]["trained"]["images"] == 20


@pytest.mark.parametrize("logged", [0, 1, 2])
def test_a_run_killed_before_its_report_evaluates_its_last_step_once_more(
    logged: int, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(ema_decay=0.9, epochs=1)
    whole = lockstep.train(recipe, textures, run)
    (run / "report.json").unlink()
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(lines[: len(lines) - 2 + logged]))
    again = lockstep.train(recipe, textures, run)
    assert [
        entry["weights"] for entry in read_log(run / "log.jsonl") if entry["kind"] == "evaluate"
    ] == ["trained", "ema"]
    assert again["per_class"] == whole["per_class"]
    assert again["final"]["ema"]["loss"] == whole["final"]["ema"]["loss"]


def test_a_run_killed_between_two_evaluations_of_a_step_makes_both(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(ema_decay=0.9)
    listener = send(signal.SIGTERM, lambda event: event["kind"] == "evaluate")
    with pytest.raises(Interrupted):
        lockstep.train(recipe, textures, run, listener=listener)
    lockstep.train(recipe, textures, run)
    found = [
        (e["step"], e["weights"]) for e in read_log(run / "log.jsonl") if e["kind"] == "evaluate"
    ]
    assert found == [(7, "trained"), (7, "ema"), (14, "trained"), (14, "ema")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_images_are_indexed_stops_at_once(
    number: signal.Signals, code: int, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    draw_data_set(tmp_path / "data", train_images=20, val_images=10)
    listener = send(number, lambda event: event["kind"] == "progress")
    with pytest.raises(Interrupted, match="while indexing train") as stopped:
        lockstep.train(tiny_recipe, tmp_path / "data", tmp_path / "run", listener=listener)
    assert stopped.value.exit_code == code
    assert not (tmp_path / "run").exists()


def test_weights_that_are_no_numbers_are_not_saved(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(lr=3e38, warmup_epochs=0, weight_decay=1.0)
    execution = Execution(save_every_steps=1)
    with pytest.raises(DivergedError, match="Last good checkpoint: none"):
        lockstep.train(recipe, textures, tmp_path / "run", execution=execution)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == []


def test_a_step_that_does_not_divide_into_parts_is_refused_before_there_is_a_folder(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(
        RecipeError, match=r"global_batch_images \(8\) must be a multiple of .* \(3\)"
    ):
        lockstep.train(
            tiny_recipe, textures, tmp_path / "run", execution=Execution(accumulation_steps=3)
        )
    assert not (tmp_path / "run").exists()


def test_ctrl_c_saves_and_exits_with_130(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    listener = send(signal.SIGINT, lambda event: event["kind"] == "train")
    with pytest.raises(Interrupted) as stopped:
        lockstep.train(
            tiny_recipe, textures, tmp_path / "run", execution=EXECUTION, listener=listener
        )
    assert stopped.value.exit_code == 130
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    uninterrupted: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    listener = send(signal.SIGTERM, lambda event: event["kind"] == "save" and event["step"] == 9)
    with pytest.raises(Interrupted):
        lockstep.train(tiny_recipe, textures, run, execution=EXECUTION, listener=listener)
    newest = checkpoint.checkpoint_path(
        run / "checkpoints", checkpoint.steps(run / "checkpoints")[-1]
    )
    weights_file = newest / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"\xff")
    events: list[dict[str, Any]] = []
    lockstep.train(tiny_recipe, textures, run, execution=EXECUTION, listener=events.append)
    start = next(event for event in events if event["kind"] == "start")
    assert newest.name in start["damaged"][0]
    assert_same_run(run, uninterrupted)


def test_the_newest_checkpoints_and_the_best_are_kept(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe.replace(epochs=4, lr=0.02)
    report = lockstep.train(recipe, textures, run, execution=Execution(keep_checkpoints=1))
    assert checkpoint.steps(run / "checkpoints") == sorted({report["best"]["step"], 28})


def test_weights_of_every_epoch_are_written_for_mxnet(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    prefix = tmp_path / "for mxnet" / "model"
    execution = Execution(keep_checkpoints=3, save_every_steps=5, model_prefix=str(prefix))
    lockstep.train(tiny_recipe, textures, tmp_path / "run", execution=execution)
    written = sorted(path.name for path in prefix.parent.iterdir())
    first = "model-0001.params"
    second = "model-0002.params"
    assert written == [
        "model-0001.momentum.params",
        first,
        "model-0002.momentum.params",
        second,
        "model-symbol.json",
    ]
    for step, name in ((7, first), (14, second)):
        found = mxnet_params.load(prefix.with_name(name))
        expected = weights(tmp_path / "run", step)
        assert (
            found["arg:stage2_unit1_conv1sc_weight"].tobytes()
            == expected["layer2.0.downsample.0.weight"].tobytes()
        )
        assert found["aux:bn0_moving_var"].tobytes() == expected["bn1.running_var"].tobytes()


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_window_and_the_last_good_checkpoint(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(lr=1e30, warmup_epochs=1.5, warmup_start_lr=1e-3, epochs=3)
    with pytest.raises(
        DivergedError, match=r"within steps \d+ to \d+.*Last good checkpoint"
    ) as error:
        lockstep.train(recipe, textures, tmp_path / "run", execution=EXECUTION)
    assert error.value.exit_code == 3
    last = read_log(tmp_path / "run" / "log.jsonl")[-1]
    assert (last["kind"], last["message"]) == ("diverged", str(error.value))
    assert None in last["losses"]
    assert last["not_finite"]["losses"] in ("inf", "nan")
    for step in checkpoint.steps(tmp_path / "run" / "checkpoints"):
        assert all(np.isfinite(value).all() for value in weights(tmp_path / "run", step).values())


def test_an_infinite_validation_loss_ends_the_run_after_its_step_was_saved(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(epochs=1, lr=1e-6)
    values = initial_tensors(recipe)
    values["bn1.running_mean"][:] = -3e38  # training does not use it
    checkpoint.write_weights(
        tmp_path / "start.safetensors", values, {"recipe": recipe.fields(), "classes": []}
    )
    run = tmp_path / "run"
    with pytest.raises(
        DivergedError,
        match=r"not finite at step 7: .* of 20 images.*Last good checkpoint: \S+step-00000000 ",
    ):
        lockstep.train(recipe, textures, run, weights=tmp_path / "start.safetensors")
    assert checkpoint.steps(run / "checkpoints") == [0, 7]
    assert not (run / "report.json").exists()
    last = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (run / "log.jsonl").read_text().splitlines()
    ][-1]
    assert (last["kind"], last["loss"], last["step"]) == ("diverged", None, 7)
    with pytest.raises(DivergedError, match="of 20 images"):
        lockstep.evaluate(run, textures)
    with pytest.raises(DivergedError, match="logits"):
        lockstep.predict(run, [next((textures / "val").rglob("*.jpg"))])


def test_a_moving_average_is_evaluated_too(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    report = lockstep.train(
        tiny_recipe.replace(ema_decay=0.9, epochs=1), textures, tmp_path / "run"
    )
    assert set(report["final"]) == {"trained", "ema"}
    assert report["final"]["trained"]["loss"] != report["final"]["ema"]["loss"]


@pytest.mark.parametrize(
    "changes",
    [
        {"mixup_alpha": 0.2},
        {"mixup_alpha": 0.2, "mixup_coefficient": "sample", "mixup_pairing": "reverse"},
        {"padding": "same", "logits": 11},
        {"precision": "bf16"},
        {"precision": "fp16", "loss_scaling": "dynamic"},
        {"antialias": True, "ema_decay": 0.99},
    ],
    ids=str,
)
def test_every_kind_of_recipe_resumes_bit_for_bit(
    changes: dict[str, Any], textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(**changes)
    lockstep.train(recipe, textures, tmp_path / "whole", execution=EXECUTION)
    listener = send(signal.SIGUSR1, lambda event: event["kind"] == "train" and event["step"] == 4)
    with pytest.raises(Interrupted):
        lockstep.train(recipe, textures, tmp_path / "parts", execution=EXECUTION, listener=listener)
    lockstep.train(recipe, textures, tmp_path / "parts", execution=EXECUTION)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_accumulation_resumes_bit_for_bit(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    execution = EXECUTION.replace(accumulation_steps=2)
    lockstep.train(tiny_recipe, textures, tmp_path / "whole", execution=execution)
    listener = send(signal.SIGTERM, lambda event: event["kind"] == "train" and event["step"] == 4)
    with pytest.raises(Interrupted):
        lockstep.train(
            tiny_recipe, textures, tmp_path / "parts", execution=execution, listener=listener
        )
    lockstep.train(tiny_recipe, textures, tmp_path / "parts", execution=execution)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_run_does_not_go_on_with_other_images(
    split: str, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    draw_data_set(data, train_images=20, val_images=20)
    listener = send(signal.SIGTERM, lambda event: event["kind"] == "train")
    with pytest.raises(Interrupted):
        lockstep.train(tiny_recipe, data, tmp_path / "run", listener=listener)
    next((data / split / "dots").glob("*.jpg")).unlink()
    with pytest.raises(CheckpointError, match="other images"):
        lockstep.train(tiny_recipe, data, tmp_path / "run")


def test_more_classes_than_logits_are_refused(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="logits=10"):
        lockstep.train(tiny_recipe.replace(logits=9), textures, tmp_path / "run")


def test_a_step_of_more_images_than_there_are_is_refused(
    textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="only 60 training images"):
        lockstep.train(tiny_recipe.replace(global_batch_images=64), textures, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup_epochs": 0}, []),
        (
            {"precision": "fp16", "logits": 12},
            ["precision=bf16", "10 classes, but the model has 12", "the warm-up of 1 epoch"],
        ),
    ],
    ids=str,
)
def test_what_is_allowed_but_seldom_meant_is_noted(
    changes: dict[str, Any],
    words: list[str],
    textures: Path,
    tiny_recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "lockstep.system.machine.arithmetic",
        lambda: Arithmetic(("AVX-512",), ("fp32", "bf16"), "bf16"),
    )
    events: list[dict[str, Any]] = []
    lockstep.train(
        tiny_recipe.replace(epochs=1, **changes), textures, tmp_path / "run", listener=events.append
    )
    notes = next(event for event in events if event["kind"] == "start")["notes"]
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_own_images_are_split_trained_on_and_evaluated_without_a_recipe(
    tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    data = tmp_path / "images"
    run = tmp_path / "run"
    shutil.copytree(textures / "train", data, ignore=shutil.ignore_patterns(".*"))
    events: list[dict[str, Any]] = []
    changes = {
        "model": tiny_recipe.fields()["model"],
        "epochs": 1,
        "precision": "fp32",
        "eval_sampling": "asymmetric",
    }
    report = lockstep.train(data=data, out=run, split=0.25, changes=changes, listener=events.append)
    kinds = [event["kind"] for event in events if event["kind"] != "progress"]
    assert kinds[:2] == ["settled", "start"]
    recipe = lockstep.load_recipe(run)
    assert (recipe.logits, recipe.image_size, recipe.validation_share) == (10, 64, 0.25)
    assert all(
        isinstance(value, int | float | str | bool | list | dict)
        for value in recipe.fields().values()
    )
    images = report["final"]["trained"]["images"]
    assert events[-1]["report"] == report
    assert 10 <= images < 30
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["train"]["images"] + images, environment["data"]) == (60, str(data))
    again = lockstep.train(data=data, out=run)
    assert again["per_class"] == report["per_class"], "the same run, with neither recipe nor split"
    evaluated = lockstep.evaluate(run, data)
    assert evaluated["per_class"] == report["per_class"]["trained"]
    assert evaluated["loss"] == pytest.approx(report["final"]["trained"]["loss"], rel=1e-5), (
        "resized as in the run"
    )
    assert lockstep.evaluate(run, data, split=0)["images"] == 60
    assert lockstep.evaluate(run, textures)["images"] == 20
    page = lockstep.report(run, tmp_path / "page.html").read_text()
    assert 'data-image="' in page
    with pytest.raises(RecipeError, match=r"validation_share: 0\.25 there, 0\.5 now"):
        lockstep.train(data=data, out=run, split=0.5)
