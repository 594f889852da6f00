"""`lockstep train`, `evaluate` and `predict` as processes: killed, signalled, two in one folder."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.recipes import Recipe, difference, load_recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.recipes.published import RECIPES
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends.conftest import BACKENDS
from tests.backends.launchers import RING
from tests.cli.cases import (
    DEFAULT,
    assert_same_training,
    count_zeros,
    last_step,
    read_report,
    run_command,
    select_backends,
    set_fields,
)
from tests.processes import finish, room_for, running, wait_until
from tests.runs.cases import read_losses, read_state
from tests.soak import SOAK, in_a_soak

Answer = Callable[..., tuple[int, str, str]]

HANDED_OVER = (*RING, ("mxnet", "jax")) if "jax" in BACKENDS else RING
"""MXNet is in an environment of its own, which the command finds."""


def take_rules(name: str) -> dict[str, Any]:
    """Return the fields of a published recipe, apart from its sizes: optimizer, loss, augmentations
    and the rest."""
    sizes = {"epochs", "global_batch_images", "precision", "image_size", "eval_resize", "eval_crop"}
    changed = difference(Recipe(), RECIPES[name]())
    return {field: new for field, (_, new) in changed.items() if field not in sizes}


@pytest.mark.slow
@pytest.mark.parametrize("backend", select_backends("torch"))
@pytest.mark.parametrize("rules", ["plain", "resnet50-rsb-a2"] if SOAK else ["resnet50-rsb-a2"])
def test_a_run_killed_several_times_gives_bit_identical_weights(
    rules: str, backend: str, arguments: list[object], recipe_file: Path, tmp_path: Path
) -> None:
    arguments += ["--backend", backend, *set_fields(log_every_steps=1)]
    if rules != "plain":
        changes = take_rules(rules) | {"stochastic_depth": 0.5}
        changes |= {"ema_decay": 0.9, "ema_every_steps": 3}
        recipe = load_recipe(recipe_file).replace(**changes)
        (tmp_path / "recipe.yaml").write_text(recipe.format_yaml())
        arguments += ["--recipe", tmp_path / "recipe.yaml"]
    run_command(*arguments, "--out", tmp_path / "whole")
    killed = tmp_path / "killed"
    for step in (1, 5, 8, 20, 33) if SOAK else (1, 20):
        more = room_for(step - last_step(killed)) + 400  # evaluations of the average
        threads = set_fields(loader_threads=1 + step % 3)
        with running(*arguments, *threads, "--out", killed, room=more):
            wait_until(lambda step=step: last_step(killed) >= step)  # type: ignore[misc]
    output = run_command(*arguments, "--out", killed)
    assert "resuming after step" in output
    assert_same_training(killed, tmp_path / "whole")
    assert len(read_losses(killed)) == 42


@in_a_soak  # `test_other_environments` stops and resumes on MXNet; `test_across` hands runs over
@pytest.mark.parametrize(("first", "second"), HANDED_OVER, ids=map(" to ".join, HANDED_OVER))
def test_a_run_stopped_on_one_backend_ends_on_another_where_it_would_have(
    first: str, second: str, arguments: list[object], tiny_recipe: Recipe, tmp_path: Path
) -> None:
    # At ten times this rate the difference in rounding doubles with every other step.
    arguments += set_fields(lr=0.00003, log_every_steps=1)
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    run_command(*arguments, "--backend", second, "--out", whole)
    with running(*arguments, "--backend", first, "--out", run, room=room_for(5)) as process:
        wait_until(lambda: last_step(run) >= 5)
        process.send_signal(signal.SIGUSR1)
        code, _, errors = finish(process)
    assert code == 75, errors
    output = run_command(*arguments, "--backend", second, "--out", run)
    assert "resuming after step" in output
    assert len(read_losses(run)) == 42
    assert read_losses(run) == pytest.approx(read_losses(whole), rel=BOUNDS["loss"].value)
    ways = []
    for folder in (run, whole):
        end = read_state(folder).tensors
        way = {}
        for name, begin in initial_tensors(tiny_recipe).items():
            if "running" not in name:
                way[name] = end[name] - begin
        ways.append(way)
    assert distance(*ways) < BOUNDS["weights"].value


@pytest.mark.slow
# SIGUSR1: sent when a run is handed over
@pytest.mark.parametrize(
    ("number", "name", "expected"),
    [("SIGTERM", "SIGTERM", 75), *([("SIGINT", "Ctrl-C", 130)] if SOAK else [])],
)
def test_a_signal_saves_the_next_step_and_is_the_exit_code_and_nobody_else_may_train_meanwhile(
    number: str, name: str, expected: int, arguments: list[object], tmp_path: Path, answer: Answer
) -> None:
    run = tmp_path / "run"
    arguments += ["--out", run, "--set", "epochs=500"]
    with running(*arguments) as process:
        wait_until(lambda: last_step(run) > 0)
        second = answer(*arguments)
        process.send_signal(signal.Signals[number])
        code, _, errors = finish(process)
    assert code == expected
    message = rf"lockstep: stopped by {name} after step \d+ of 3500, saved in .*\n"
    assert re.fullmatch(message, errors)
    assert second[0] == 2
    assert "another process is training in" in second[2]


@pytest.mark.slow
def test_a_run_evaluates_and_predicts(finished_run: Path, textures: Path, answer: Answer) -> None:
    run = finished_run
    code, output, errors = answer("evaluate", run, "--json", "--batch", 7, *DEFAULT)
    assert (code, errors) == (0, "")
    evaluated = json.loads(output)
    report = read_report(run)
    assert (evaluated["images"], evaluated["data"]) == (20, str(textures / "val"))
    assert evaluated["per_class"] == report["per_class"]["trained"]
    assert evaluated["loss"] == pytest.approx(report["final"]["trained"]["loss"], rel=1e-5)
    images = sorted((textures / "val").rglob("*.jpg"))[:3]
    code, output, errors = answer(
        "predict", run, *images, "--json", "--top", 2, "--checkpoint", "newest", *DEFAULT
    )
    assert (code, errors) == (0, "")
    rows = json.loads(output)
    assert [row["path"] for row in rows] == [str(image) for image in images]
    for row in rows:
        assert len(row["classes"]) == 2
        assert row["classes"][0] in report["classes"]


@pytest.mark.slow
@in_a_soak  # `tests/backends/test_sparse_runs.py` stops and resumes such a run on every engine
@pytest.mark.parametrize("backend", select_backends("paddle"))
def test_a_sparse_run_killed_several_times_gives_bit_identical_weights(
    backend: str, arguments: list[object], dense: Path, tmp_path: Path
) -> None:
    arguments += ["--backend", backend, *set_fields(sparsity="mask_1d", ema_decay=0.9, epochs=3)]
    output = run_command(*arguments, "--verbose", "--weights", dense, "--out", tmp_path / "whole")
    assert "note: starts from the weights of step-00000007" in output
    killed = tmp_path / "killed"
    for step in (0, 1, 8) if SOAK else (1,):
        with running(*arguments, "--weights", dense, "--out", killed):
            wait_until(
                lambda step=step: (killed / "start.json").exists() and last_step(killed) >= step
            )  # type: ignore[misc]
    output = run_command(*arguments, "--out", killed)
    assert "starts from" not in output
    assert_same_training(killed, tmp_path / "whole")
    assert set(count_zeros(killed).values()) == {0}


def test_a_sparse_recipe_without_weights_says_what_to_do(
    arguments: list[object], answer: Answer, tmp_path: Path
) -> None:
    code, _, errors = answer(*arguments, "--set", "sparsity=mask_1d", "--out", tmp_path / "run")
    assert code == 2
    assert "--weights" in errors
    assert not (tmp_path / "run").exists()


def test_wrong_profiles_are_named(arguments: list[object], answer: Answer, tmp_path: Path) -> None:
    for text in ("ten", "3:2:1", "3:x"):
        code, _, errors = answer(*arguments, "--profile", text, "--out", tmp_path / "run")
        assert code == 2
        assert f"--profile takes N or N:M, such as 20:3; found {text!r}" in errors
    assert not (tmp_path / "run").exists()


def test_options_choose_loggers(arguments: list[object], answer: Answer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output, errors = answer(
        *arguments, "--no-tensorboard", "--profile", "2:2", "--set", "epochs=1", "--out", run
    )
    assert code == 0, errors
    assert f"traced steps 2 to 3: {run}/profile/step-00000002\n" in output
    assert (run / "profile" / "step-00000002").is_dir()
    assert not (run / "tensorboard").exists()
    code, _, errors = answer(*arguments, "--logger", "comet", "--out", run)
    assert code == 2
    assert "loggers" in errors
