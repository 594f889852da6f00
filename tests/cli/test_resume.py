"""`lockstep train --out RUN`: what the command line takes from an existing run, and prints about
it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep import backends
from lockstep.data.textures import draw_data_set
from lockstep.recipes import Execution, Recipe
from lockstep.runs import train as training
from lockstep.runs.resuming import RunSettings
from lockstep.runs.starting_weights import StartSource
from lockstep.runs.trust import list_names, remember
from lockstep.weights.run_identity import settle_identity

Run = Callable[..., tuple[int, str, str]]
Opened = list[tuple[RunSettings, StartSource | None]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """What runs are opened with. They train nothing here, on images that do not exist."""
    calls: Opened = []

    @contextmanager
    def open_run(settings: RunSettings, source: StartSource | None, *_: object) -> Iterator[None]:
        calls.append((settings, source))
        yield

    world = SimpleNamespace(rank=0, close=lambda: None)
    monkeypatch.setattr(backends, "load", lambda name: SimpleNamespace(world=lambda _: world))
    monkeypatch.setattr(training, "check_paths", lambda *_: None)
    monkeypatch.setattr(training, "open_run", open_run)
    monkeypatch.setattr(training, "_train", lambda run: None)
    return calls


@pytest.fixture
def run(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """A run on the reference engine, on the images in its parent folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("based_on: demo\n" + tiny_recipe.format_yaml())
    execution = Execution(backend="reference", loggers=("mlflow",), loader_threads=3)
    (folder / "environment.json").write_text(
        json.dumps({"data": str(tmp_path), "execution": execution.fields()})
    )
    settle_identity(folder)
    remember(folder, list_names(execution.fields(), tmp_path))
    return folder


def test_the_folder_alone_resumes_its_run_and_prints_what_was_taken_from_it(
    answer: Run, opened: Opened, run: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    code, output, errors = answer("train", "--out", run)
    assert (code, errors) == (0, "")
    assert output == (
        f"resuming {run} with the run's recipe (demo), images {tmp_path}, "
        "backend=reference, loader_threads=3, loggers=[mlflow]\n"
    )
    ((settings, _),) = opened
    assert (settings.recipe, settings.data) == (tiny_recipe, tmp_path)
    result = settings.execution
    assert result == Execution(backend="reference", loggers=("mlflow",), loader_threads=3)


def test_options_come_before_what_the_folder_says(answer: Run, opened: Opened, run: Path) -> None:
    options = ["--set", "epochs=9", "--set", "loader_threads=1", "--tensorboard"]
    options += ["--data", "elsewhere"]
    code, output, _ = answer("train", "--out", run, *options)
    assert (code, output) == (
        0,
        f"resuming {run} with the run's recipe (demo), backend=reference\n",
    )
    ((settings, _),) = opened
    assert settings.recipe is not None
    assert (settings.recipe.epochs, settings.data) == (9, Path("elsewhere"))
    assert settings.execution == Execution(backend="reference", loader_threads=1)


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
def test_a_new_run_has_the_chosen_loggers(
    answer: Run, opened: Opened, tmp_path: Path, options: list[str], loggers: tuple[str, ...]
) -> None:
    assert answer(
        "train", "--recipe", "demo", "--data", "images", "--out", tmp_path / "new", *options
    ) == (0, "", "")
    ((settings, _),) = opened
    assert settings.execution == Execution(loggers=loggers)


@pytest.mark.parametrize(
    ("options", "backend"), [([], "reference"), (["--recipe", "demo"], "torch")], ids=str
)
def test_ranks_are_launched_on_the_backend_that_the_run_had(
    answer: Run, run: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], backend: str
) -> None:
    launched = []

    def load(name: str) -> SimpleNamespace:
        launched.append(name)
        return SimpleNamespace(prepare_ranks=lambda *_: nullcontext())

    monkeypatch.setattr(backends, "load", load)
    monkeypatch.setattr("lockstep.cli.launch.launch_ranks", lambda *_: 0)
    assert answer("launch", "-n", 2, "--", "train", "--out", run, *options)[0] == 0
    assert launched == [backend]


# --resume-from


@pytest.fixture
def new_run(recipe_file: Path, tmp_path: Path) -> list[object]:
    """The command of a run on the reference engine."""
    places = ["--data", tmp_path, "--out", tmp_path / "new"]
    return ["train", "--recipe", recipe_file, *places, "--backend", "reference"]


@pytest.mark.parametrize(("option", "resumes"), [("--resume-from", True), ("--weights", False)])
def test_what_the_run_starts_from_is_passed_on(
    answer: Run, opened: Opened, new_run: list[object], option: str, resumes: bool
) -> None:
    assert answer(*new_run, option, "checkpoint.pth.tar")[0] == 0
    ((_, source),) = opened
    assert source is not None
    assert (source.path, source.resumes) == (Path("checkpoint.pth.tar"), resumes)


def test_a_checkpoint_needs_the_recipe_of_its_run(answer: Run, tmp_path: Path) -> None:
    draw_data_set(tmp_path / "data", train_images=20, val_images=10)
    places = ["--data", tmp_path / "data", "--out", tmp_path / "new"]
    code, _, errors = answer("train", *places, "--resume-from", "checkpoint.pth.tar")
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("lockstep: --resume-from needs --recipe: ")
    assert not (tmp_path / "new").exists()


def test_weights_exclude_checkpoints(answer: Run, new_run: list[object], tmp_path: Path) -> None:
    code, _, errors = answer(*new_run, "--resume-from", tmp_path / "a", "--weights", tmp_path / "a")
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("lockstep: --weights and --resume-from exclude each other")
    assert not (tmp_path / "new").exists()
