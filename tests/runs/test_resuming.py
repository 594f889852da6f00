"""Which settings a run resumes with, and with which other schedules it can resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.runs.report import read_report
from lockstep.runs.resuming import complete_settings, explain_refusal, keep_parts, last_execution
from lockstep.runs.trust import remember
from lockstep.system.errors import CheckpointError, DataError, RecipeError, UserError
from lockstep.weights.run_identity import settle_identity
from tests.runs.cases import Event, find_same_parts, list_evaluations, newest_step

IMAGES = 60
PER_EPOCH = 7  # 60 images, 8 per step


@pytest.fixture
def run(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """The folder of a run that has begun, with its images next to it."""
    folder = tmp_path / "a run"
    (folder / "checkpoints").mkdir(parents=True)
    (tmp_path / "images").mkdir()
    (folder / "recipe.yaml").write_text("based_on: my recipe\n" + tiny_recipe.format_yaml())
    (folder / "log.jsonl").touch()
    execution = Execution(
        backend="tensorflow",
        loader_threads=3,
        profile_step=5,
        stop_after_epochs=1,
        stop_after_steps=5,
    )
    write_environment(folder, data=str(tmp_path / "images"), execution=execution.fields())
    settle_identity(folder)
    remember(folder, [f"data={tmp_path / 'images'}"])
    return folder


def write_environment(run: Path, **environment: Any) -> None:
    (run / "environment.json").write_text(json.dumps(environment))


def test_missing_settings_are_the_runs(run: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    settings = complete_settings(run)
    assert settings.recipe == tiny_recipe
    assert settings.data == tmp_path / "images"
    assert settings.execution == Execution(backend="tensorflow", loader_threads=3), (
        "a trace and a part are of one command"
    )
    assert settings.origins == {
        "recipe": "the run's recipe (my recipe)",
        "data": f"images {tmp_path / 'images'}",
        "execution": "backend=tensorflow, loader_threads=3",
    }


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 12), (2, 6), (3, 4), (6, 2), (12, 1)])
def test_a_step_keeps_its_parts_on_any_ranks(run: Path, ranks: int, accumulation: int) -> None:
    write_environment(run, ranks=4, execution={"accumulation_steps": 3})
    kept = keep_parts(Execution(keep_global_batch=True), run, ranks)
    assert kept == Execution(keep_global_batch=True, accumulation_steps=accumulation)


def test_ranks_that_cannot_share_the_parts_are_refused_with_those_that_can(run: Path) -> None:
    write_environment(run, ranks=4, execution={})
    message = "computes a step in 4 parts, which 3 ranks cannot share equally; use 1, 2, 4 ranks"
    with pytest.raises(RecipeError, match=message):
        keep_parts(Execution(keep_global_batch=True), run, 3)


def test_parts_are_kept_only_with_the_option(run: Path, tmp_path: Path) -> None:
    write_environment(run, ranks=4, execution={"accumulation_steps": 3})
    assert keep_parts(Execution(), run, 2) == Execution()
    new = Execution(keep_global_batch=True, accumulation_steps=5)
    assert keep_parts(new, tmp_path / "new", 2) == new
    write_environment(run)
    assert keep_parts(new, run, 2) == new
    write_environment(run, ranks="four")
    with pytest.raises(CheckpointError, match="is not a run's environment"):
        keep_parts(new, run, 2)


def test_arguments_take_precedence_over_the_folder(run: Path, tiny_recipe: Recipe) -> None:
    settings = complete_settings(
        run, data="elsewhere", changes={"epochs": 3}, how={"loader_threads": 1}
    )
    assert settings.recipe == tiny_recipe.replace(epochs=3)
    assert settings.data == Path("elsewhere")
    assert settings.execution == Execution(backend="tensorflow", loader_threads=1)
    assert settings.origins["execution"] == "backend=tensorflow"
    assert complete_settings(run, execution=Execution()).execution == Execution()


def test_a_recipe_takes_nothing_of_the_last_execution(run: Path, tiny_recipe: Recipe) -> None:
    settings = complete_settings(run, tiny_recipe.replace(lr=1.0))
    assert (settings.recipe.lr, settings.execution) == (1.0, Execution())
    assert list(settings.origins) == ["data"]


def test_an_earlier_version_is_resumed(run: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    (run / "recipe.yaml").write_text(tiny_recipe.format_yaml())
    write_environment(
        run,
        data=str(tmp_path / "images"),
        execution={"backend": "paddle", "a_field_that_is_gone": 1},
    )
    settings = complete_settings(run)
    assert (settings.recipe, settings.recipe.based_on) == (tiny_recipe, "")
    assert settings.origins["recipe"] == "the run's recipe"
    assert settings.execution == Execution(backend="paddle")


def overwrite(name: str, text: str) -> Callable[[Path], object]:
    """Return a function that overwrites a file of a run."""
    return lambda run: (run / name).write_text(text)


def note(**environment: Any) -> Callable[[Path], object]:
    """Return a function that writes the environment of a run."""
    return lambda run: write_environment(run, **environment)


DATA_IS_GONE = r"trained on /no/such, which does not exist; .* --data DATA"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda run: (run / "recipe.yaml").unlink(), DataError, "a new run needs images"),
        (lambda run: (run / "environment.json").unlink(), DataError, "; add --data DATA"),
        (note(data="/no/such"), DataError, DATA_IS_GONE),
        (note(data=7), CheckpointError, r"is not a run's environment"),
        (note(execution={"loader_threads": -1}), CheckpointError, r"json: execution: loader_th"),
        (overwrite("environment.json", "[]"), CheckpointError, "is not a run's environment"),
        (overwrite("environment.json", "{"), CheckpointError, r"environment\.json is not JSON;"),
        (overwrite("recipe.yaml", "based_on: [1]"), RecipeError, "based_on: expected the name"),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    run: Path, change: Any, error: type[UserError], message: str
) -> None:
    change(run)
    with pytest.raises(error, match=message):
        complete_settings(run)


@pytest.mark.parametrize(
    ("changes", "how", "share", "is_noted"),
    [
        ({}, {}, 0.3, True),
        ({"validation_share": 0.1}, {}, 0.1, False),
        ({"validation_share": 0.0}, {}, 0.0, False),
        ({"folds": 5, "fold": 2}, {}, 0.0, False),
        ({}, {"train_only": True}, 0.0, False),
    ],
)
@pytest.mark.parametrize("recipe", [None, "demo"])
def test_a_run_without_validation_images_sets_a_share_apart_and_keeps_it(
    recipe: str | None,
    changes: dict[str, Any],
    how: dict[str, Any],
    share: float,
    is_noted: bool,
    run: Path,
    tiny_recipe: Recipe,
    tmp_path: Path,
) -> None:
    data = tmp_path / "photos"
    (data / "cats").mkdir(parents=True)
    new = complete_settings(tmp_path / "new", recipe, data, changes=changes, how=how)
    assert new.wanted.validation_share == share
    assert ["--split 0.1" in note for note in new.notes] == [True] * is_noted
    begun = tiny_recipe.replace(validation_share=0.2)
    (run / "recipe.yaml").write_text(begun.format_yaml())
    resumed = complete_settings(run, recipe and begun.replace(validation_share=0.0), data)
    assert (resumed.wanted.validation_share, resumed.notes) == (0.2, ())


def test_a_new_run_without_images_asks_for_them(tmp_path: Path) -> None:
    message = r"there is no run in .*; a new run needs images: --data DATA"
    with pytest.raises(DataError, match=message):
        complete_settings(tmp_path, "demo")
    assert last_execution(tmp_path) == {}


def test_a_folder_called_like_a_published_recipe_is_still_a_folder(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    Path("demo/recipe.yaml").write_text(tiny_recipe.format_yaml())
    assert complete_settings(Path("demo"), data="images").recipe == tiny_recipe


def test_a_run_keeps_its_evaluation_if_a_recipe_of_its_name_has_another(run: Path) -> None:
    published = load_recipe("resnet50-tensorflow-90ep")
    geometry = {
        "eval_side_rounding": "down",
        "eval_offset_rounding": "even",
        "eval_sampling": "half_pixel",
    }
    (run / "recipe.yaml").write_text(published.replace(**geometry).format_yaml())
    settings = complete_settings(run, "resnet50-tensorflow-90ep", changes={"epochs": 100})
    assert settings.recipe == published.replace(**geometry, epochs=100)
    fields = "eval_side_rounding=down, eval_offset_rounding=even, eval_sampling=half_pixel"
    assert settings.origins["evaluation"] == f"evaluation settings {fields}"
    chosen = complete_settings(
        run, "resnet50-tensorflow-90ep", changes={"eval_sampling": "asymmetric", "antialias": True}
    )
    assert chosen.recipe == published.replace(antialias=True), (
        "what differs is for the folder to refuse"
    )
    assert "evaluation" not in complete_settings(run, published).origins, (
        "a recipe itself is what it is"
    )


# Another schedule


def explain(recipe: Recipe, run: Path, done: int, **changes: Any) -> str | None:
    (run / "checkpoints" / f"step-{done:08d}").mkdir()
    return explain_refusal(run, recipe, recipe.replace(**changes), IMAGES)


@pytest.mark.parametrize(
    ("done", "changes"),
    [
        (2 * PER_EPOCH, {"epochs": 3}),
        (2 * PER_EPOCH, {"epochs": 4, "lr_step_epochs": [1, 3]}),
        (PER_EPOCH, {"lr_step_epochs": [1.5]}),
        (PER_EPOCH, {"epochs": 1}),
        (0, {"lr": 7.0, "lr_decay": "linear"}),
    ],
    ids=repr,
)
def test_a_schedule_that_begins_with_the_same_rates_is_continued(
    run: Path, tiny_recipe: Recipe, done: int, changes: dict[str, Any]
) -> None:
    recipe = tiny_recipe.replace(lr_decay="step", lr_step_epochs=(1,))
    assert explain(recipe, run, done, **changes) is None


def test_a_cosine_is_continued_only_while_it_warms_up(run: Path, tiny_recipe: Recipe) -> None:
    assert explain(tiny_recipe, run, PER_EPOCH, epochs=4) is None
    assert "step 8 was " in str(explain(tiny_recipe, run, PER_EPOCH + 2, epochs=4))


def test_a_refused_schedule_says_what_to_type(run: Path, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(lr_decay="linear", warmup_epochs=0.0)
    refusal = str(explain(recipe, run, 2 * PER_EPOCH, epochs=4, lr_end=0.01))
    # A line from 0.05 to 0 over 14 steps, or to 0.01 over 28 steps: step 1 has 13/14 * 0.05, or
    # 0.01 + 27/28 * 0.04.
    assert refusal.splitlines() == [
        (
            "That run is at step 14, but the new schedule changes learning rates before it: that of"
            " step 1 was 0.0464286 and would be 0.0485714."
        ),
        "To start a new run from its weights, at step 0:",
        (
            f"  lockstep train --weights '{run}' --data DATA --out '{run}2' --recipe '{run}' --set"
            " epochs=4 --set lr_end=0.01"
        ),
    ]


def test_fewer_steps_than_are_done_are_refused(run: Path, tiny_recipe: Recipe) -> None:
    refusal = explain(tiny_recipe, run, 14, epochs=1)
    assert refusal == "That run is at step 14, but epochs=1 ends at 7."


@pytest.mark.parametrize(
    "changes", [{"momentum": 0.5}, {"epochs": 3, "seed": 1}, {"global_batch_images": 4}], ids=repr
)
def test_other_fields_never_change(run: Path, tiny_recipe: Recipe, changes: dict[str, Any]) -> None:
    result = explain(tiny_recipe.replace(lr_decay="step", lr_step_epochs=(1,)), run, 7, **changes)
    assert result == ""


def test_another_recipe_is_named_before_anything_that_does_not_fit_it(
    run: Path, textures: Path
) -> None:
    # The 60 images are fewer than a step of this recipe has, and its parts do not divide a step.
    execution = Execution(backend="reference", accumulation_steps=3)
    with pytest.raises(RecipeError, match="holds a run of a different recipe:\n") as refused:
        lockstep.train("resnet50-paddle-90ep", textures, run, execution=execution)
    assert "global_batch_images: 8 in that run, 2048 here" in str(refused.value)


def test_more_epochs_continue_exactly(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe.replace(epochs=1, lr_decay="step", lr_step_epochs=(1,)).rename("steps")
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    lockstep.train(recipe, textures, run)
    events: list[Event] = []

    def listener(event: Event) -> None:
        if event["kind"] == "train":
            assert read_report(run) is None, "a run that resumes is not finished"
        events.append(event)

    report = lockstep.train(load_recipe(run).replace(epochs=2), out=run, listener=listener)
    lockstep.train(recipe.replace(epochs=2), textures, whole)
    assert (newest_step(run), newest_step(whole)) == (14, 14)
    assert "tensors" in find_same_parts(run, whole)
    assert (report["epochs"], report["recipe"]) == (2, "steps")
    assert events[0] == {
        "kind": "settings",
        "out": str(run),
        "origins": {"data": f"images {textures.resolve()}"},
    }
    start = next(event for event in events if event["kind"] == "start")
    assert "epochs changes from 1 to 2" in start["notes"]
    assert list_evaluations(run) == [7, 14]
    events.clear()
    assert lockstep.train(out=run, listener=events.append)["final"] == report["final"]
    assert "already_finished" in [event["kind"] for event in events]
    assert load_recipe(run).based_on == "steps"


def test_training_without_a_folder_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="needs out"):
        lockstep.train("demo", "data")
