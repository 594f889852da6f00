"""What a run resumes with if arguments are left out, and with which other schedules it can resume."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import lockstep
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.runs.report import read_report
from lockstep.runs.resuming import complete_settings, explain_refusal, keep_parts, last_execution
from lockstep.system.errors import CheckpointError, DataError, RecipeError, UserError
from lockstep.system.event_log import read_log

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
    note(folder, data=str(tmp_path / "images"), execution=execution.fields())
    return folder


def note(run: Path, **environment: Any) -> None:
    (run / "environment.json").write_text(json.dumps(environment))


def test_what_is_not_given_is_taken_from_the_runs_folder(
    run: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    asked = complete_settings(run)
    assert asked.recipe == tiny_recipe
    assert asked.data == tmp_path / "images"
    assert asked.execution == Execution(backend="tensorflow", loader_threads=3), (
        "a trace and a part are of one command"
    )
    assert asked.origins == {
        "recipe": "its recipe (my recipe)",
        "data": f"its images ({tmp_path / 'images'})",
        "execution": "backend=tensorflow, loader_threads=3",
    }


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 12), (2, 6), (3, 4), (6, 2), (12, 1)])
def test_a_step_keeps_its_parts_on_any_number_of_ranks(
    run: Path, ranks: int, accumulation: int
) -> None:
    note(run, ranks=4, execution={"accumulation_steps": 3})
    kept = keep_parts(Execution(keep_global_batch=True), run, ranks)
    assert kept == Execution(keep_global_batch=True, accumulation_steps=accumulation)


def test_ranks_that_cannot_share_the_parts_are_refused_with_those_that_can(run: Path) -> None:
    note(run, ranks=4, execution={})
    with pytest.raises(
        RecipeError,
        match=r"computes a step in 4 parts, which 3 ranks cannot share equally; use 1, 2, 4 ranks",
    ):
        keep_parts(Execution(keep_global_batch=True), run, 3)


def test_parts_are_kept_only_if_asked_for_and_if_there_were_some(run: Path, tmp_path: Path) -> None:
    note(run, ranks=4, execution={"accumulation_steps": 3})
    assert keep_parts(Execution(), run, 2) == Execution()
    new = Execution(keep_global_batch=True, accumulation_steps=5)
    assert keep_parts(new, tmp_path / "new", 2) == new
    note(run, ranks="four")
    assert keep_parts(new, run, 2) == new


def test_what_is_given_comes_before_what_is_in_the_folder(run: Path, tiny_recipe: Recipe) -> None:
    asked = complete_settings(
        run, data="elsewhere", changes={"epochs": 3}, how={"loader_threads": 1}
    )
    assert asked.recipe == tiny_recipe.replace(epochs=3)
    assert asked.data == Path("elsewhere")
    assert asked.execution == Execution(backend="tensorflow", loader_threads=1)
    assert asked.origins["execution"] == "backend=tensorflow"
    assert complete_settings(run, execution=Execution()).execution == Execution()


def test_a_command_with_a_recipe_says_all_of_its_execution(run: Path, tiny_recipe: Recipe) -> None:
    asked = complete_settings(run, tiny_recipe.replace(lr=1.0))
    assert (asked.recipe.lr, asked.execution) == (1.0, Execution())
    assert list(asked.origins) == ["data"]


def test_a_run_of_an_earlier_version_is_resumed_without_a_name(
    run: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    (run / "recipe.yaml").write_text(tiny_recipe.format_yaml())
    note(run, data=str(tmp_path), execution={"backend": "paddle", "a_field_that_is_gone": 1})
    asked = complete_settings(run)
    assert (asked.recipe, asked.recipe.based_on, asked.origins["recipe"]) == (
        tiny_recipe,
        "",
        "its recipe",
    )
    assert asked.execution == Execution(backend="paddle")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda run: (run / "recipe.yaml").unlink(),
            DataError,
            r"no run in .*a run; a new run needs images",
        ),
        (
            lambda run: (run / "environment.json").unlink(),
            DataError,
            r"does not say which images .*; add --data DATA",
        ),
        (
            lambda run: note(run, data="/no/such"),
            DataError,
            r"trained on /no/such, which does not exist; .* --data DATA",
        ),
        (lambda run: note(run, data=7), CheckpointError, r"is not a run's environment"),
        (
            lambda run: note(run, execution={"loader_threads": -1}),
            CheckpointError,
            r"json: execution: loader_th",
        ),
        (
            lambda run: (run / "environment.json").write_text("[]"),
            CheckpointError,
            r"environment.json is not a run's environment",
        ),
        (
            lambda run: (run / "environment.json").write_text("{"),
            CheckpointError,
            r"environment.json is not JSON;",
        ),
        (
            lambda run: (run / "recipe.yaml").write_text("based_on: [1]"),
            RecipeError,
            r"based_on: expected the name",
        ),
    ],
)
def test_what_cannot_be_taken_is_asked_for(
    run: Path, change: Any, error: type[UserError], message: str
) -> None:
    change(run)
    with pytest.raises(error, match=message):
        complete_settings(run)


def test_a_new_run_without_images_asks_for_them(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"there is no run in .*; a new run needs images: --data DATA"
    ):
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
    asked = complete_settings(run, "resnet50-tensorflow-90ep", changes={"epochs": 100})
    assert asked.recipe == published.replace(**geometry, epochs=100)
    assert (
        asked.origins["evaluation"]
        == "its evaluation (eval_side_rounding=down, eval_offset_rounding=even,"
        " eval_sampling=half_pixel)"
    )
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


def why(recipe: Recipe, run: Path, done: int, **changes: Any) -> str | None:
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
    assert (
        why(tiny_recipe.replace(lr_decay="step", lr_step_epochs=(1,)), run, done, **changes) is None
    )


def test_a_cosine_is_continued_only_while_it_warms_up(run: Path, tiny_recipe: Recipe) -> None:
    assert why(tiny_recipe, run, PER_EPOCH, epochs=4) is None
    assert "step 8 had " in str(why(tiny_recipe, run, PER_EPOCH + 2, epochs=4))


def test_a_refused_schedule_says_which_step_differs_and_what_to_type(
    run: Path, tiny_recipe: Recipe
) -> None:
    recipe = tiny_recipe.replace(lr_decay="linear", warmup_epochs=0.0)
    said = str(why(recipe, run, 2 * PER_EPOCH, epochs=4, lr_end=0.01))
    # A line from 0.05 to 0 over 14 steps, or to 0.01 over 28 steps: step 1 has 13/14 * 0.05, or
    # 0.01 + 27/28 * 0.04.
    assert said.splitlines() == [
        (
            "It has done 14 steps, and the new schedule changes their learning rates: step 1 had"
            " 0.0464286, and would have 0.0485714."
        ),
        "To start a new run from its weights, at step 0:",
        (
            f"  lockstep train --recipe '{run}' --weights '{run}' --data DATA --out ANOTHER --set"
            " epochs=4 --set lr_end=0.01"
        ),
    ]


def test_fewer_steps_than_are_done_are_refused(run: Path, tiny_recipe: Recipe) -> None:
    assert (
        why(tiny_recipe, run, 14, epochs=1) == "It has done 14 steps, but epochs=1 ends at step 7."
    )


@pytest.mark.parametrize(
    "changes", [{"momentum": 0.5}, {"epochs": 3, "seed": 1}, {"global_batch_images": 4}], ids=repr
)
def test_other_fields_than_the_schedules_are_never_changed(
    run: Path, tiny_recipe: Recipe, changes: dict[str, Any]
) -> None:
    assert why(tiny_recipe.replace(lr_decay="step", lr_step_epochs=(1,)), run, 7, **changes) == ""


def test_another_recipe_is_named_before_anything_that_does_not_fit_it(
    run: Path, textures: Path
) -> None:
    """The 60 images are fewer than a step of this recipe has, and its parts do not divide a step."""
    execution = Execution(backend="reference", accumulation_steps=3)
    with pytest.raises(RecipeError, match="holds a run of another recipe:\n") as refused:
        lockstep.train("resnet50-paddle-90ep", textures, run, execution=execution)
    assert "global_batch_images: 8 there, 2048 now" in str(refused.value)


def test_a_finished_run_of_more_epochs_ends_bit_for_bit_like_one_that_had_them_from_the_start(
    tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(epochs=1, lr_decay="step", lr_step_epochs=(1,)).rename("steps")
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    lockstep.train(recipe, textures, run)
    told: list[dict[str, Any]] = []

    def listener(event: dict[str, Any]) -> None:
        if event["kind"] == "train":
            assert read_report(run) is None, "a run that goes on is not finished"
        told.append(event)

    report = lockstep.train(load_recipe(run).replace(epochs=2), out=run, listener=listener)
    lockstep.train(recipe.replace(epochs=2), textures, whole)
    weights = [
        load_file(each / "checkpoints" / "step-00000014" / "model.safetensors")
        for each in (run, whole)
    ]
    assert [
        name for name in weights[0] if weights[0][name].tobytes() != weights[1][name].tobytes()
    ] == []
    assert (report["epochs"], report["recipe"]) == (2, "steps")
    assert told[0] == {
        "kind": "taken",
        "out": str(run),
        "taken": {"data": f"its images ({textures.resolve()})"},
    }
    start = next(event for event in told if event["kind"] == "start")
    assert "epochs is 2 from here on; until here it was 1" in start["notes"]
    assert [
        entry["step"] for entry in read_log(run / "log.jsonl") if entry["kind"] == "evaluate"
    ] == [7, 14]
    told.clear()
    assert lockstep.train(out=run, listener=told.append)["final"] == report["final"]
    assert "already_finished" in [event["kind"] for event in told]
    assert load_recipe(run).based_on == "steps"


def test_training_without_a_folder_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="needs out"):
        lockstep.train("demo", "data")
