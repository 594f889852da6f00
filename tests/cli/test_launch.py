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
from lockstep.launch.nodes import one_machine
from lockstep.system.errors import BackendError
from tests.backends.conftest import BACKENDS
from tests.processes import call

Run = Callable[..., tuple[int, str, str]]
Launched = list[tuple[str, int, list[str], str]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Launches that are recorded instead of run: backend, number of processes, arguments, and what
    adds up over ranks."""
    found: Launched = []

    def load(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            prepare_ranks=lambda table, distributed: nullcontext((name, table.ranks, distributed))
        )

    def launch_ranks(arguments: list[str], starting: Callable[[], Any], *_: object) -> int:
        assert tuple(arguments[:3]) == LOCKSTEP
        with starting() as (name, ranks, distributed):
            found.append((name, ranks, arguments[3:], distributed))
        return 0

    monkeypatch.setattr(backends, "load", load)
    monkeypatch.setattr("lockstep.launch.launcher.launch_ranks", launch_ranks)
    return found


def test_a_command_is_launched_as_it_stands(answer: Run, launched: Launched) -> None:
    said = ["train", "--recipe", "demo", "--data", "a folder", "--set", "epochs=3", "--out=RUN"]
    assert answer("launch", "-n", 3, "--", *said) == (0, "", "")
    assert launched == [("torch", 3, said, "native")]


@pytest.mark.parametrize("code", [0, 1, 2, 75, 130])
def test_the_launch_ends_with_the_code_of_its_ranks(
    answer: Run, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(
        backends, "load", lambda name: SimpleNamespace(prepare_ranks=lambda *_: nullcontext())
    )
    monkeypatch.setattr("lockstep.launch.launcher.launch_ranks", lambda *_: code)
    assert answer("launch", "-n", 2, "--", "train")[0] == code


# The framework

SAID_BY_THE_COMMAND = {
    "an option": ["--backend", "tensorflow"],
    "an option with =": ["--backend=tensorflow"],
    "a setting": ["--set", "backend=tensorflow"],
    "a setting with =": ["--set=backend=tensorflow"],
    "the last of two options": ["--backend", "torch", "--backend", "tensorflow"],
    "the last of two options with =": ["--backend", "torch", "--backend=tensorflow"],
    "the last of two options, the first with =": ["--backend=torch", "--backend", "tensorflow"],
    "a setting before an option, which it outdoes": [
        "--set",
        "backend=tensorflow",
        "--backend",
        "torch",
    ],
    "among other settings": ["--set", "epochs=3", "--set", "backend=tensorflow", "--set", "seed=1"],
}


@pytest.mark.parametrize("said", SAID_BY_THE_COMMAND.values(), ids=SAID_BY_THE_COMMAND)
def test_the_framework_is_that_of_the_launched_command(
    answer: Run, launched: Launched, said: list[str]
) -> None:
    assert answer("launch", "-n", 2, "--", "train", *said, "--out", "RUN")[0] == 0
    assert launched == [("tensorflow", 2, ["train", *said, "--out", "RUN"], "native")]


@pytest.mark.parametrize(
    "said", [["--backend", "tensorflow"], ["--backend=tensorflow"]], ids=["two words", "one word"]
)
def test_a_framework_that_the_launch_alone_names_is_told_to_the_command(
    answer: Run, launched: Launched, said: list[str]
) -> None:
    assert answer("launch", "-n", 2, *said, "--", "train", "--out", "RUN")[0] == 0
    assert launched == [
        ("tensorflow", 2, ["train", "--out", "RUN", "--backend", "tensorflow"], "native")
    ]


def test_a_framework_named_without_two_dashes_between_is_told_to_the_command(
    answer: Run, launched: Launched
) -> None:
    assert answer("launch", "-n", 2, "train", "--out", "RUN", "--backend", "tensorflow")[0] == 0
    assert launched == [
        ("tensorflow", 2, ["train", "--out", "RUN", "--backend", "tensorflow"], "native")
    ]


@pytest.mark.parametrize("said", SAID_BY_THE_COMMAND.values(), ids=SAID_BY_THE_COMMAND)
def test_a_framework_that_both_name_is_not_repeated(
    answer: Run, launched: Launched, said: list[str]
) -> None:
    assert answer("launch", "-n", 2, "--backend", "tensorflow", "--", "train", *said)[0] == 0
    assert launched == [("tensorflow", 2, ["train", *said], "native")]


@pytest.mark.parametrize("said", SAID_BY_THE_COMMAND.values(), ids=SAID_BY_THE_COMMAND)
def test_two_frameworks_are_refused_with_both_names(
    answer: Run, launched: Launched, said: list[str]
) -> None:
    code, output, errors = answer("launch", "-n", 2, "--backend", "torch", "--", "train", *said)
    assert (code, output, launched) == (2, "", [])
    assert errors.startswith(
        "lockstep: launch --backend is torch, but the command after -- says tensorflow"
    )


@pytest.mark.parametrize(
    "said",
    [
        ["--set", "backendx=tensorflow"],
        ["--data", "backend=tensorflow"],
        ["backend=tensorflow"],
    ],
    ids=" ".join,
)
def test_what_only_looks_like_a_framework_is_none(
    answer: Run, launched: Launched, said: list[str]
) -> None:
    assert answer("launch", "-n", 2, "--", "train", *said)[0] == 0
    assert [name for name, *_ in launched] == ["torch"]


def test_a_framework_that_is_not_there_is_refused_before_anything_starts(answer: Run) -> None:
    code, output, errors = answer("launch", "-n", 2, "--", "train", "--backend=tensorflw")
    assert (code, output) == (2, "")
    assert errors == "lockstep: there is no backend 'tensorflw'. Did you mean tensorflow?\n"


def test_the_reference_is_refused_because_it_has_no_ranks(answer: Run) -> None:
    code, output, errors = answer("launch", "-n", 2, "--", "train", "--backend", "reference")
    assert (code, output) == (2, "")
    assert "one process" in errors


# The library that adds up over ranks

HOROVOD_SAID = {
    "an option": ["--distributed", "horovod"],
    "an option with =": ["--distributed=horovod"],
    "a setting": ["--set", "distributed=horovod"],
    "a setting with =": ["--set=distributed=horovod"],
}


@pytest.mark.parametrize("said", HOROVOD_SAID.values(), ids=HOROVOD_SAID)
def test_what_adds_up_is_what_the_launched_command_says(
    answer: Run, launched: Launched, said: list[str]
) -> None:
    assert answer("launch", "-n", 2, "--", "train", "--backend", "tensorflow", *said)[0] == 0
    assert launched == [("tensorflow", 2, ["train", "--backend", "tensorflow", *said], "horovod")]


def test_what_adds_up_is_told_to_the_command_if_the_launch_alone_says_it(
    answer: Run, launched: Launched
) -> None:
    assert (
        answer(
            "launch", "-n", 2, "--distributed", "horovod", "--backend", "tensorflow", "--", "train"
        )[0]
        == 0
    )
    (_, _, arguments, distributed) = launched[0]
    assert arguments[0] == "train"
    assert arguments[1:] == ["--backend", "tensorflow", "--distributed", "horovod"]
    assert distributed == "horovod"


def test_the_launch_may_say_the_one_and_its_command_the_other(
    answer: Run, launched: Launched
) -> None:
    assert (
        answer(
            "launch", "-n", 2, "--distributed", "horovod", "--", "train", "--backend", "tensorflow"
        )[0]
        == 0
    )
    assert launched == [
        (
            "tensorflow",
            2,
            ["train", "--backend", "tensorflow", "--distributed", "horovod"],
            "horovod",
        )
    ]


@pytest.mark.parametrize("said", HOROVOD_SAID.values(), ids=HOROVOD_SAID)
def test_two_ways_to_add_up_are_refused_with_both_names(
    answer: Run, launched: Launched, said: list[str]
) -> None:
    code, output, errors = answer(
        "launch", "-n", 2, "--distributed", "native", "--", "train", *said
    )
    assert (code, output, launched) == (2, "", [])
    assert errors.startswith(
        "lockstep: launch --distributed is native, but the command after -- says horovod"
    )


@pytest.mark.parametrize(
    "line",
    [["--distributed", "mpi", "--", "train"], ["--", "train", "--distributed=mpi"]],
    ids=["launch", "command"],
)
def test_an_unknown_way_to_add_up_is_refused_with_those_there_are(
    answer: Run, launched: Launched, line: list[str]
) -> None:
    code, output, errors = answer("launch", "-n", 2, *line)
    assert (code, output, launched) == (2, "", [])
    assert errors.startswith("lockstep: distributed: ")
    assert "'native' or 'horovod'" in errors
    assert "not 'mpi'" in errors


@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_horovod_is_refused_to_pytorch_with_what_to_do() -> None:
    with pytest.raises(
        BackendError, match="--set distributed=native, or --backend mxnet or tensorflow"
    ):
        backends.load("torch").prepare_ranks(one_machine(2), "horovod").__enter__()


@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_horovod_is_refused_to_pytorch_without_a_traceback(answer: Run) -> None:
    code, output, errors = answer("launch", "-n", 2, "--distributed", "horovod", "--", "train")
    assert (code, output) == (2, "")
    assert errors.startswith(
        "lockstep: distributed is horovod, but the torch backend supports only native"
    )


tensorflow_tests = pytest.mark.skipif(
    "tensorflow" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out"
)


@tensorflow_tests
def test_where_horovod_is_missing_it_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python finds this one before an installed one.
    (tmp_path / "horovod.py").write_text("raise ModuleNotFoundError(\"No module named 'horovod'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, output, errors = call(
        "launch", "-n", 2, "--distributed", "horovod", "--backend", "tensorflow", "--", "train"
    )
    assert (code, output) == (2, "")
    assert errors.startswith(
        "lockstep: distributed is horovod, which is not installed here: No module named 'horovod'"
    )
    assert "`make tensorflow-horovod` makes .venv-tensorflow-horovod" in errors
    assert errors.count("\n") == 1


# Processes


@tensorflow_tests
def test_two_ranks_run_the_command_with_what_the_launch_says_and_rank_0_prints() -> None:
    code, output, errors = call(
        "launch", "-n", 2, "--backend", "tensorflow", "--", "train", "--help"
    )
    assert (code, errors) == (0, "")
    assert output.count("Usage: ") == 1


@tensorflow_tests
def test_ranks_of_wrong_use_end_the_launch_with_2() -> None:
    code, output, errors = call(
        "launch", "-n", 2, "--backend", "tensorflow", "--", "train", "--recip", "demo"
    )
    assert (code, output) == (2, "")
    assert (
        "No such option: --recip" in errors
    )  # once or twice: when one rank has ended, the other is stopped
