import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.system.machine import Arithmetic
from lockstep.weights import checkpoint
from tests.backends.launchers import LAUNCHED
from tests.cli.cases import DEFAULT, LAUNCH, LONGER, choose_launcher, run_command, set_fields
from tests.soak import SOAK

Answer = tuple[int, str, str]


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the tester's environment variables that set colours, width or rank."""
    for name in (
        "FORCE_COLOR",
        "NO_COLOR",
        "CLICOLOR_FORCE",
        "COLUMNS",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "TF_CONFIG",
        "HOROVOD_RANK",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def any_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the processor emulates nothing, so that notes do not depend on the tester's
    machine."""
    everything = Arithmetic(("AVX2", "AVX-512"), ("fp32", "bf16", "fp16", "int8"), "bf16")
    monkeypatch.setattr("lockstep.system.machine.arithmetic", lambda: everything)


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the processor has AVX2 and nothing newer."""
    monkeypatch.setattr(
        "lockstep.system.machine.arithmetic", lambda: Arithmetic(("AVX2",), ("fp32",), "fp32")
    )


@pytest.fixture
def answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Return a function that runs a command line in this process and returns exit code, output and
    errors."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["lockstep", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.run()
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def recipe_file(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six epochs of the tiny model at 64 px."""
    path = tmp_path_factory.mktemp("a recipe") / "tiny recipe.yaml"
    path.write_text(
        tiny_recipe.replace(epochs=6, image_size=64, eval_resize=72, eval_crop=64).format_yaml()
    )
    return path


@pytest.fixture
def run_folder(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> Path:
    """A run at step 7 whose classes are those of the textures."""
    return _run(tiny_recipe, textures, tmp_path / "run")


@pytest.fixture
def run_in_bf16(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> Path:
    """The same run, trained in bf16."""
    return _run(tiny_recipe.replace(precision="bf16"), textures, tmp_path / "run-bf16")


def _run(recipe: Recipe, textures: Path, folder: Path) -> Path:
    about = {
        "recipe": recipe.fields(),
        "classes": sorted(path.name for path in (textures / "train").glob("[!.]*")),
    }
    checkpoint.save(
        folder / "checkpoints", State(7, initial_tensors(recipe), {}), data_digest="", about=about
    )
    entry = {"kind": "evaluate", "step": 7, "weights": "trained", "top1_percent": 10.0}
    (folder / "log.jsonl").write_text(json.dumps(entry) + "\n")
    return folder


@pytest.fixture
def arguments(recipe_file: Path, textures: Path) -> list[object]:
    """A training, without its folder."""
    options = [*set_fields(save_every_steps=2), *DEFAULT]
    return ["train", "--recipe", recipe_file, "--data", textures, *options]


@pytest.fixture(scope="session", params=LAUNCHED if SOAK else LAUNCHED[-1:])
def launcher(request: pytest.FixtureRequest) -> str:
    """One of the launchers; all of them in a soak."""
    return str(request.param)


@pytest.fixture
def ranked(launcher: str, arguments: list[object]) -> list[object]:
    """A training to launch in several processes."""
    return [*arguments, *choose_launcher(launcher)]


@pytest.fixture(scope="session")
def finished_run(
    launcher: str, recipe_file: Path, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run of one epoch. Tests only read it."""
    run = tmp_path_factory.mktemp("finished") / "a run"
    options = [*set_fields(save_every_steps=2, epochs=1), *choose_launcher(launcher)]
    output = run_command(
        "train", "--recipe", recipe_file, "--data", textures, *options, "--out", run
    )
    assert "\x1b" not in output
    return run


@pytest.fixture(scope="session")
def whole_of_two_ranks(
    launcher: str, recipe_file: Path, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that two ranks finished without a stop, next to what they printed. Tests only read
    it."""
    run = tmp_path_factory.mktemp("whole") / "run"
    options = [*LONGER, *choose_launcher(launcher), "--out", run]
    train = ("train", "--recipe", recipe_file, "--data", textures, *options)
    (run.parent / "output.txt").write_text(run_command(*LAUNCH, *train))
    return run


@pytest.fixture(scope="session")
def dense(recipe_file: Path, textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from."""
    run = tmp_path_factory.mktemp("dense") / "run"
    options = ["--backend", "reference", *set_fields(epochs=1, reference_dtype="float32")]
    run_command("train", "--recipe", recipe_file, "--data", textures, "--out", run, *options)
    return run
