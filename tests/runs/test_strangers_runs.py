"""Folders of runs that a stranger wrote: nothing that they name is used without the user's word."""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.recipes import Execution, Recipe
from lockstep.runs.reading import read_run
from lockstep.runs.resuming import complete_settings
from lockstep.runs.starting_weights import read_masks, starts_from_probe
from lockstep.system.errors import CheckpointError, LockstepError, RecipeError
from lockstep.weights import checkpoint, choose, open_weights
from tests.hostile import HOSTILE
from tests.runs.cases import stop_at, train_until

EXECUTION = Execution(save_every_steps=3, loggers=())
MODULE = "stranger_of_a_run"


@pytest.fixture(scope="module")
def begun(tiny_recipe: Recipe, textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped."""
    run = tmp_path_factory.mktemp("begun") / "run"
    train_until(stop_at("save", 3), tiny_recipe, textures, run, execution=EXECUTION)
    return run


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(begun, tmp_path / "run")


def change_environment(run: Path, **fields: Any) -> None:
    """Change what `environment.json` says, as a stranger does."""
    file = run / "environment.json"
    environment = json.loads(file.read_text())
    environment["execution"] |= fields.pop("execution", {})
    file.write_text(json.dumps(environment | fields))


@pytest.mark.parametrize(
    "execution",
    [
        {"model_prefix": "OUTSIDE/x"},
        {"dlll_file": "OUTSIDE/x"},
        {"nvidia_report_file": "OUTSIDE/x"},
        {"checkpoint_store": "s3://strangers-bucket/run"},
        {"loggers": ["wandb"]},
        {"loggers": ["mlflow"]},
    ],
)
def test_folders_need_the_users_word(run: Path, tmp_path: Path, execution: dict[str, Any]) -> None:
    text = json.dumps(execution).replace("OUTSIDE", str(tmp_path / "outside"))
    change_environment(run, execution=json.loads(text))
    with pytest.raises(CheckpointError, match="which no command on this machine has used"):
        lockstep.train(out=run)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "checkpoints/step-00000001"])
def test_folders_behind_links_need_the_users_word(run: Path, tmp_path: Path, name: str) -> None:
    (run / name).mkdir(exist_ok=True)
    outside = (run / name).rename(tmp_path / "outside")
    (outside / "step-00000001").mkdir()
    (outside / "step-00000001/mine.txt").write_text("mine")
    (run / name).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(CheckpointError, match=f"link={name} -> .*, which no command on this"):
        lockstep.train(out=run)
    assert sorted(outside.rglob("*")) == before


def test_a_link_that_the_user_trusted_is_known(run: Path, tmp_path: Path) -> None:
    (run / "checkpoints").rename(tmp_path / "large disk")
    (run / "checkpoints").symlink_to("../large disk")
    one = EXECUTION.replace(stop_after_steps=1)
    lockstep.train(out=run, execution=one, trust_run=True)
    lockstep.train(out=run, execution=one)
    assert checkpoint.checkpoint_path(tmp_path / "large disk", 5).is_dir()


def test_images_that_a_folder_names_need_the_users_word(run: Path, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    for data in (str(tmp_path / "others"), "s3://strangers-bucket/images"):
        change_environment(run, data=data)
        for command in (
            lambda: lockstep.train(out=run),
            lambda: lockstep.load(run).evaluate().to_json(),
        ):
            with pytest.raises(CheckpointError, match="which no command on this machine"):
                command()
    assert list((tmp_path / "others").iterdir()) == []


def test_a_module_that_a_folder_names_needs_the_users_word(
    run: Path, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{MODULE}.py").write_text("raise ImportError('imported')")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text() + f"\naugmentations: ['{MODULE}:Fog']\n")
    for options in ({"out": run}, {"out": tmp_path / "new", "recipe": run}):
        with pytest.raises(CheckpointError, match=f"augmentation={MODULE}:Fog"):
            lockstep.train(data=textures, **options)
    assert MODULE not in sys.modules
    with pytest.raises(RecipeError, match="imported"):
        lockstep.train(data=textures, out=run, trust_run=True)


def test_what_a_command_named_suffices_on_this_machine(
    run: Path, tiny_recipe: Recipe, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.train(out=run, execution=EXECUTION.replace(stop_after_steps=1))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    with pytest.raises(CheckpointError, match="train takes --trust-run"):
        lockstep.train(out=run)
    report = lockstep.train(out=run, trust_run=True)
    assert report["steps"] == 14
    lockstep.train(out=run)


def test_a_recipe_of_a_run_reads_no_other_file(run: Path, textures: Path, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("lr: 3")
    (run / "recipe.yaml").write_text(f"base: {tmp_path / 'other.yaml'}")
    for command in (lambda: lockstep.train(data=textures, out=run), lambda: read_run(run)):
        with pytest.raises(RecipeError, match="needs no base"):
            command()


FILES = [
    *("run.json", "environment.json", "report.json", "log.jsonl", "recipe.yaml", "start.json"),
    *("validation.npz", "best-validation.npz", "masks.safetensors"),
    *("checkpoints/STEP/state.json", "checkpoints/STEP/model.safetensors"),
    *("checkpoints/STEP/temperature.json", "checkpoints/STEP/calibration.json"),
]


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_one_sentence(run: Path, textures: Path, name: str, kind: str) -> None:
    [step] = checkpoint.steps(run / "checkpoints")[-1:]
    file = run / name.replace("STEP", f"step-{step:08d}")
    file.unlink(missing_ok=True)
    HOSTILE[kind](file)
    before = sorted(run.rglob("*"))
    commands: list[Callable[[], object]] = [
        lambda: read_run(run),
        lambda: complete_settings(run, data=textures),
        lambda: open_weights(choose(run)),
        lambda: read_masks(run),
        lambda: starts_from_probe(run),
    ]
    for command in commands:
        with suppress(LockstepError):  # all other errors are tracebacks for the user
            command()
    assert sorted(run.rglob("*")) == before
