"""`lockstep launch`: which framework's launcher starts the ranks, and what the launched command
gets."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import backends
from lockstep.launch.launcher import LOCKSTEP
from tests.backends.conftest import BACKENDS
from tests.processes import call

Run = Callable[..., tuple[int, str, str]]
Launched = list[tuple[str, int, list[str], str]]
TRAIN = ["train", "--recipe", "demo", "--data", "a folder", "--out=RUN"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    """Launches that are recorded instead of run: backend, number of processes, arguments, and what
    adds up over ranks."""
    launches: Launched = []

    def load(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            prepare_ranks=lambda table, distributed: nullcontext((name, table.ranks, distributed))
        )

    def launch_ranks(arguments: list[str], starting: Callable[[], Any], *_: object) -> int:
        assert tuple(arguments[:3]) == LOCKSTEP
        with starting() as (name, ranks, distributed):
            launches.append((name, ranks, arguments[3:], distributed))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends, "load", load)
    monkeypatch.setattr("lockstep.cli.launch.launch_ranks", launch_ranks)
    return launches


def test_a_command_is_launched_as_it_stands(answer: Run, launched: Launched) -> None:
    assert answer("launch", "-n", 3, "--", *TRAIN, "--set", "epochs=3") == (0, "", "")
    assert launched == [("torch", 3, [*TRAIN, "--set", "epochs=3"], "native")]


@pytest.mark.parametrize("code", [0, 1, 2, 75, 130])
def test_the_launch_ends_with_the_code_of_its_ranks(
    answer: Run, launched: Launched, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("lockstep.cli.launch.launch_ranks", lambda *_: code)
    assert answer("launch", "-n", 2, "--", *TRAIN)[0] == code


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["train", "--help"], 0), (["train", "--recip", "demo"], 2), (["train"], 2), (["trian"], 2)],
    ids=str,
)
def test_a_command_that_ends_before_it_trains_runs_once(
    answer: Run, launched: Launched, arguments: list[str], code: int
) -> None:
    alone = answer(*arguments)
    assert alone[0] == code
    assert answer("launch", "-n", 2, "--", *arguments) == alone
    assert launched == []


# What the command settles

SETTINGS = {
    "an option": ["--{}", "{}"],
    "an option with =": ["--{}={}"],
    "a setting": ["--set", "{}={}"],
    "a setting with =": ["--set={}={}"],
}
TENSORFLOW = [
    ["--backend", "tensorflow"],
    ["--set=backend=tensorflow"],
    ["--backend=torch", "--backend", "tensorflow"],
    ["--set", "backend=tensorflow", "--backend", "torch"],
    ["--set", "epochs=3", "--set", "backend=tensorflow", "--set", "seed=1"],
]


@pytest.mark.parametrize("options", TENSORFLOW, ids=" ".join)
def test_the_commands_framework_counts(answer: Run, launched: Launched, options: list[str]) -> None:
    assert answer("launch", "-n", 2, "--", *TRAIN, *options)[0] == 0
    assert launched == [("tensorflow", 2, [*TRAIN, *options], "native")]


@pytest.mark.parametrize("options", [["--data", "backend=tensorflow"], ["--set", "seed=1"]])
def test_torch_is_the_default(answer: Run, launched: Launched, options: list[str]) -> None:
    assert answer("launch", "-n", 2, "--", *TRAIN, *options)[0] == 0
    assert [name for name, *_ in launched] == ["torch"]


@pytest.mark.parametrize("dashes", [["--"], []], ids=["with --", "without --"])
def test_names_are_passed_on(answer: Run, launched: Launched, dashes: list[str]) -> None:
    options = ["--backend", "tensorflow", "--distributed=horovod"]
    assert answer("launch", "-n", 2, *options, *dashes, *TRAIN)[0] == 0
    [(name, ranks, arguments, distributed)] = launched
    assert (name, ranks, distributed) == ("tensorflow", 2, "horovod")
    assert arguments == ["train", "--backend", "tensorflow", "--distributed", "horovod", *TRAIN[1:]]


@pytest.mark.parametrize("options", TENSORFLOW, ids=" ".join)
def test_both_may_name_the_same(answer: Run, launched: Launched, options: list[str]) -> None:
    assert answer("launch", "-n", 2, "--backend", "tensorflow", "--", *TRAIN, *options)[0] == 0
    result = [(name, distributed) for name, _, _, distributed in launched]
    assert result == [("tensorflow", "native")]


@pytest.mark.parametrize("form", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    ("field", "own", "other"),
    [("backend", "torch", "tensorflow"), ("distributed", "native", "horovod")],
)
def test_two_values_are_refused_with_both_names(
    answer: Run, launched: Launched, form: list[str], field: str, own: str, other: str
) -> None:
    *words, last = form
    options = [word.format(field) for word in words]
    options.append(last.format(other) if last == "{}" else last.format(field, other))
    code, output, errors = answer("launch", "-n", 2, f"--{field}", own, "--", *TRAIN, *options)
    assert (code, output, launched) == (2, "", [])
    assert errors.startswith(
        f"lockstep: launch --{field} is {own}, but the command after -- says {other}"
    )


def test_launch_and_command_may_share_the_settings(answer: Run, launched: Launched) -> None:
    command = [*TRAIN, "--backend", "tensorflow"]
    assert answer("launch", "-n", 2, "--distributed", "horovod", "--", *command)[0] == 0
    result = [(name, distributed) for name, _, _, distributed in launched]
    assert result == [("tensorflow", "horovod")]


@pytest.mark.parametrize("place", [0, 1], ids=["launch", "command"])
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--backend=tensorflw", "there is no backend 'tensorflw'. Did you mean tensorflow?"),
        ("--distributed=mpi", "distributed: Input should be 'native' or 'horovod', not 'mpi'"),
    ],
)
def test_unknown_values_are_refused(answer: Run, option: str, expected: str, place: int) -> None:
    line = [option, "--", *TRAIN] if place == 0 else ["--", *TRAIN, option]
    assert answer("launch", "-n", 2, *line) == (2, "", f"lockstep: {expected}\n")


def test_the_reference_is_refused_because_it_has_no_ranks(
    answer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, errors = answer("launch", "-n", 2, "--", *TRAIN, "--backend", "reference")
    assert (code, output) == (2, "")
    assert "one process" in errors
    assert list(tmp_path.iterdir()) == []


# Horovod


@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_horovod_is_refused_to_pytorch_without_a_traceback(answer: Run) -> None:
    code, output, errors = answer("launch", "-n", 2, "--distributed", "horovod", "--", *TRAIN)
    assert (code, output) == (2, "")
    assert errors.startswith(
        "lockstep: distributed is horovod, but the torch backend supports only native"
    )


tensorflow_tests = pytest.mark.skipif(
    "tensorflow" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out"
)


@tensorflow_tests
def test_where_horovod_is_missing_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python finds this one before an installed one.
    (tmp_path / "horovod.py").write_text("raise ModuleNotFoundError(\"No module named 'horovod'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, output, errors = call(
        "launch", "-n", 2, "--distributed", "horovod", "--backend", "tensorflow", "--", *TRAIN
    )
    assert (code, output) == (2, "")
    assert errors.startswith(
        "lockstep: distributed is horovod, which is not installed here: No module named 'horovod'"
    )
    assert "`make tensorflow-horovod` makes .venv-tensorflow-horovod" in errors
    assert errors.count("\n") == 1


def test_a_dry_run_prints_ranks_and_starts_none(answer: Run, launched: Launched) -> None:
    code, output, errors = answer("launch", "--dry-run", "--nodes", 2, "-n", 2, "--", *TRAIN)
    assert (code, errors, launched) == (0, "", [])
    assert [line.split() for line in output.splitlines()[1:]] == [
        ["0", "0", "0", "here"],
        ["1", "0", "1", "RUN/logs/rank-1.log"],
        ["2", "1", "0", "RUN/logs/rank-2.log"],
        ["3", "1", "1", "RUN/logs/rank-3.log"],
    ]


def test_ray_refuses_what_says_where_machines_meet(answer: Run, launched: Launched) -> None:
    errors = answer("launch", "--on", "ray", "--hosts", "a", "-n", 1, "--", *TRAIN)[2]
    assert "--hosts does not apply to --on ray" in errors
    assert "expected ray" in answer("launch", "--on", "slurm", "-n", 1, "--", *TRAIN)[2]
    for address in ("local", "ray://node0:10001"):
        options = ["--on", "ray", "--address", address, "-n", 1]
        errors = answer("launch", *options, "--", *TRAIN)[2]
        assert f"address is {address!r}, expected HOST:PORT" in errors
