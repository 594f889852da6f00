"""`lockstep train --out RUN`: what the command line takes from an existing run, and prints about
it."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import backends
from lockstep.recipes import Execution, Recipe
from lockstep.runs import train as training

Run = Callable[..., tuple[int, str, str]]
Trained = list[dict[str, Any]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The calls of `lockstep.train`, which does nothing here."""
    found: Trained = []

    def train(recipe: Recipe, data: Path, out: Path, **options: Any) -> None:
        found.append({"recipe": recipe, "data": data, "out": out} | options)

    monkeypatch.setattr(training, "train", train)
    return found


@pytest.fixture
def run(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """A run whose last engine was the reference engine, on the images in its parent folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("based_on: demo\n" + tiny_recipe.format_yaml())
    execution = Execution(backend="reference", loggers=("mlflow",), loader_threads=3)
    (folder / "environment.json").write_text(
        json.dumps({"data": str(tmp_path), "execution": execution.fields()})
    )
    return folder


def test_the_folder_alone_resumes_its_run_and_says_what_was_taken_from_it(
    answer: Run, trained: Trained, run: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    code, output, errors = answer("train", "--out", run)
    assert (code, errors) == (0, "")
    assert output == (
        f"resuming {run} with its recipe (demo); its images ({tmp_path}); "
        "backend=reference, loader_threads=3, loggers=['mlflow']\n"
    )
    (asked,) = trained
    assert (asked["recipe"], asked["data"]) == (tiny_recipe, tmp_path)
    assert asked["execution"] == Execution(
        backend="reference", loggers=("mlflow",), loader_threads=3
    )


def test_options_come_before_what_the_folder_says(answer: Run, trained: Trained, run: Path) -> None:
    options = [
        "--set",
        "epochs=9",
        "--set",
        "loader_threads=1",
        "--tensorboard",
        "--data",
        "elsewhere",
    ]
    code, output, _ = answer("train", "--out", run, *options)
    assert (code, output) == (0, f"resuming {run} with its recipe (demo); backend=reference\n")
    (asked,) = trained
    assert (asked["recipe"].epochs, asked["data"]) == (9, Path("elsewhere"))
    assert asked["execution"] == Execution(backend="reference", loader_threads=1)


@pytest.mark.parametrize(
    ("options", "loggers"),
    [
        ([], ("tensorboard",)),
        (["--no-tensorboard"], ()),
        (["--logger", "mlflow"], ("tensorboard", "mlflow")),
        (["--no-tensorboard", "--logger", "wandb", "--logger", "wandb"], ("wandb",)),
    ],
    ids=str,
)
def test_a_new_run_has_the_loggers_that_are_asked_for(
    answer: Run, trained: Trained, tmp_path: Path, options: list[str], loggers: tuple[str, ...]
) -> None:
    assert answer(
        "train", "--recipe", "demo", "--data", "images", "--out", tmp_path / "new", *options
    ) == (0, "", "")
    assert trained[0]["execution"] == Execution(loggers=loggers)


@pytest.mark.parametrize(
    ("said", "backend"), [([], "reference"), (["--recipe", "demo"], "torch")], ids=str
)
def test_ranks_are_launched_on_the_engine_that_the_run_had(
    answer: Run, run: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], backend: str
) -> None:
    launched = []

    def load(name: str) -> SimpleNamespace:
        launched.append(name)
        return SimpleNamespace(prepare_ranks=lambda *_: nullcontext())

    monkeypatch.setattr(backends, "load", load)
    monkeypatch.setattr("lockstep.launch.launcher.launch_ranks", lambda *_: 0)
    assert answer("launch", "-n", 2, "--", "train", "--out", run, *said)[0] == 0
    assert launched == [backend]


# --resume-from


def test_the_checkpoint_to_go_on_from_is_passed_on(
    answer: Run, trained: Trained, recipe_file: Path, tmp_path: Path
) -> None:
    given = tmp_path / "checkpoint.pth.tar"
    arguments = [
        "--recipe",
        recipe_file,
        "--data",
        tmp_path,
        "--out",
        tmp_path / "new",
        "--backend",
        "reference",
    ]
    assert answer("train", *arguments, "--resume-from", given)[0] == 0
    assert [(call["resume_from"], call["weights"]) for call in trained] == [(given, None)]


def test_weights_and_a_checkpoint_to_go_on_from_are_not_given_together(
    answer: Run, recipe_file: Path, tmp_path: Path
) -> None:
    arguments = [
        "--recipe",
        recipe_file,
        "--data",
        tmp_path,
        "--out",
        tmp_path / "new",
        "--backend",
        "reference",
    ]
    code, _, errors = answer(
        "train", *arguments, "--resume-from", tmp_path / "a", "--weights", tmp_path / "a"
    )
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("lockstep: --weights and --resume-from are both given")
    assert not (tmp_path / "new").exists()
