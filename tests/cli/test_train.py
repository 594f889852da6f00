"""`lockstep train`, `evaluate`, `predict`, `launch` and `demo` as processes: killed, signalled,
several at once."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import lockstep
from lockstep.launch.nodes import one_machine
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.runs.image_results import read_results
from lockstep.runs.starting_weights import read_masks
from lockstep.system.event_log import read_log
from lockstep.verification.bounds import BOUNDS, distance
from lockstep.weights import checkpoint
from tests.backends.conftest import BACKENDS
from tests.backends.launchers import LAUNCHED, RING
from tests.processes import PATIENT_SEC, call, finish, is_running, room_for, running, wait_until
from tests.soak import SOAK, in_a_soak


def some(*names: str) -> tuple[str, ...]:
    """Return these engines, or the first one of an environment that has none of them; all in a
    soak.

    The driver and the launcher are alike for all engines.
    """
    return BACKENDS if SOAK else tuple(name for name in names if name in BACKENDS) or BACKENDS[:1]


HANDED_OVER = RING if SOAK else RING[-1:]
DEFAULT = [] if "torch" in BACKENDS else ["--backend", BACKENDS[0]]
"""Options that select an engine, for tests that do not test a command's default."""


@pytest.fixture
def arguments(recipe_file: Path, textures: Path) -> list[object]:
    return [
        "train",
        "--recipe",
        recipe_file,
        "--data",
        textures,
        "--set",
        "save_every_steps=2",
        *DEFAULT,
    ]


@pytest.fixture(scope="module", params=LAUNCHED if SOAK else LAUNCHED[-1:])
def once(request: pytest.FixtureRequest) -> str:
    """One of the launchers; all of them in a soak."""
    return request.param


@pytest.fixture
def ranked_once(once: str, arguments: list[object]) -> list[object]:
    """The arguments to launch in several processes, on one engine; on all engines in a soak."""
    return launchable(once, arguments)


@pytest.fixture(scope="module")
def finished(
    once: str, recipe_file: Path, textures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A finished run of one epoch on that engine; read only."""
    run = tmp_path_factory.mktemp("finished") / "a run"
    arguments = launchable(
        once, ["train", "--recipe", recipe_file, "--data", textures, "--set", "save_every_steps=2"]
    )
    code, output, errors = call(*arguments, "--out", run, "--set", "epochs=1")
    assert code == 0, errors
    assert "\x1b" not in output
    return run


def launchable(launcher: str, arguments: list[object]) -> list[object]:
    backend, _, distributed = launcher.partition(" ")
    return [*arguments, "--set", f"distributed={distributed or 'native'}", "--backend", backend]


def losses(run: Path) -> list[float]:
    return [
        loss
        for entry in read_log(run / "log.jsonl")
        if entry["kind"] == "train"
        for loss in entry["losses"]
    ]


def last_step(run: Path) -> int:
    return max([0, *(entry["step"] for entry in read_log(run / "log.jsonl"))])


def newest_weights(run: Path) -> dict[str, np.ndarray]:
    folder = run / "checkpoints"
    return load_file(
        checkpoint.checkpoint_path(folder, checkpoint.steps(folder)[-1]) / "model.safetensors"
    )


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest difference of any tensor, relative to the tensor's largest value."""
    return max(float(np.abs(a[name] - b[name]).max() / np.abs(a[name]).max()) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("backend", some("torch"))
def test_a_run_killed_again_and_again_ends_bit_for_bit_like_one_that_was_not(
    backend: str, arguments: list[object], tmp_path: Path
) -> None:
    arguments += ["--backend", backend, "--set", "log_every_steps=1"]
    code, _, errors = call(*arguments, "--out", tmp_path / "whole")
    assert code == 0, errors
    killed = tmp_path / "killed"
    for step in (1, 5, 8, 20, 33) if SOAK else (1, 20):
        more = room_for(step - last_step(killed))
        with running(
            *arguments, "--out", killed, "--set", f"loader_threads={1 + step % 3}", room=more
        ):
            wait_until(lambda step=step: last_step(killed) >= step)  # type: ignore[misc]
    code, output, errors = call(*arguments, "--out", killed)
    assert code == 0, errors
    assert "resuming after step" in output
    assert losses(killed) == losses(tmp_path / "whole")
    assert len(losses(killed)) == 42
    a = newest_weights(killed)
    b = newest_weights(tmp_path / "whole")
    assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), HANDED_OVER, ids=map(" to ".join, HANDED_OVER))
def test_a_run_stopped_on_one_engine_ends_on_another_where_it_would_have(
    first: str, second: str, arguments: list[object], tiny_recipe: Recipe, tmp_path: Path
) -> None:
    # At ten times this rate the difference in rounding doubles with every other step.
    arguments += ["--set", "lr=0.00003", "--set", "log_every_steps=1"]
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    code, _, errors = call(*arguments, "--backend", second, "--out", whole)
    assert code == 0, errors
    with running(*arguments, "--backend", first, "--out", run, room=room_for(5)) as process:
        wait_until(lambda: last_step(run) >= 5)
        process.send_signal(signal.SIGUSR1)
        code, _, errors = finish(process)
    assert code == 75, errors
    code, output, errors = call(*arguments, "--backend", second, "--out", run)
    assert code == 0, errors
    assert "resuming after step" in output
    assert len(losses(run)) == 42
    assert losses(run) == pytest.approx(losses(whole), rel=BOUNDS["loss"].value)
    begin = initial_tensors(tiny_recipe)
    trained = [name for name in begin if "running" not in name]
    ways = [
        {name: end[name] - begin[name] for name in trained}
        for end in map(newest_weights, (run, whole))
    ]
    assert distance(*ways) < BOUNDS["weights"].value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"), [("SIGTERM", 75), ("SIGINT", 130)]
)  # SIGUSR1: sent when a run is handed over
def test_a_signal_saves_the_next_step_and_tells_by_the_exit_code(
    number: str, expected: int, arguments: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running(*arguments, "--out", run, "--set", "epochs=500") as process:
        wait_until(lambda: last_step(run) > 0)
        process.send_signal(signal.Signals[number])
        code, _, errors = finish(process)
    assert code == expected
    assert re.fullmatch(
        rf"lockstep: stopped by {number} after step \d+ of 3500, saved in .*\n", errors
    )


@pytest.mark.slow
def test_two_processes_in_one_folder_do_not_mix(arguments: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(*arguments, "--out", run, "--set", "epochs=500") as first:
        wait_until((run / "log.jsonl").exists)
        code, _, errors = call(*arguments, "--out", run, "--set", "epochs=500")
        first.send_signal(signal.SIGTERM)
        assert finish(first)[0] == 75
    assert code == 2
    assert "another process is training in" in errors


@pytest.mark.slow
def test_a_run_can_be_evaluated_and_asked_for_predictions(finished: Path, textures: Path) -> None:
    run = finished
    code, output, errors = call(
        "evaluate", run, "--data", textures, "--json", "--batch", 7, *DEFAULT
    )
    assert (code, errors) == (0, "")
    evaluated = json.loads(output)
    report = json.loads((run / "report.json").read_text())
    assert evaluated["images"] == 20
    assert evaluated["per_class"] == report["per_class"]["trained"]
    assert evaluated["loss"] == pytest.approx(report["final"]["trained"]["loss"], rel=1e-6)
    images = sorted((textures / "val").rglob("*.jpg"))[:3]
    code, output, errors = call("predict", run, *images, "--json", "--top", 2, *DEFAULT)
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert [row["path"] for row in found] == [str(image) for image in images]
    assert all(len(row["classes"]) == 2 and row["classes"][0] in report["classes"] for row in found)


@pytest.mark.slow
def test_two_ranks_with_synchronised_batch_norm_end_with_the_weights_of_one(
    ranked_once: list[object], tmp_path: Path
) -> None:
    # A low rate and one epoch: rounding differences grow with every step, chaotically at a high
    # rate.
    changes = ["--set", "batch_norm=synchronised", "--set", "epochs=1", "--set", "lr=0.001"]
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert call(*ranked_once, *changes, "--out", one)[0] == 0
    code, output, errors = call("launch", "-n", 2, "--", *ranked_once, *changes, "--out", two)
    assert code == 0, errors
    assert output.count("throughput") == 1, "only rank 0 prints"
    assert "2 ranks" in output
    assert largest_difference(newest_weights(one), newest_weights(two)) < 2e-4
    assert json.loads((two / "report.json").read_text())["final"]["trained"]["images"] == 20
    of_one, of_two = (
        results.scores["trained"] for results in map(read_results, (one, two)) if results
    )
    assert of_two.labels.tolist() == [label for label in range(10) for _ in range(2)]
    assert of_two.losses == pytest.approx(of_one.losses, rel=1e-3), "every image has its own result"
    assert len(set(np.round(of_one.losses, 2))) > 5, "which distinguishes images"


@pytest.mark.slow
@in_a_soak  # `tests/backends/test_ranks.py` sees the same of every engine
def test_two_ranks_with_batch_norm_of_their_own_end_with_other_weights(
    ranked_once: list[object], tmp_path: Path
) -> None:
    # This shows that the bound of synchronised ones can fail.
    changes = ["--set", "epochs=1", "--set", "lr=0.001"]
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert call(*ranked_once, *changes, "--out", one)[0] == 0
    assert call("launch", "-n", 2, "--", *ranked_once, *changes, "--out", two)[0] == 0
    assert largest_difference(newest_weights(one), newest_weights(two)) > 2e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *([signal.SIGINT] if SOAK else [])]
)  # SIGUSR1: to one rank, below
def test_one_signal_to_the_launcher_ends_all_ranks_saved(
    number: signal.Signals, ranked_once: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running(
        "launch", "-n", 2, "--", *ranked_once, "--out", run, "--set", "epochs=500"
    ) as process:
        wait_until(lambda: last_step(run) > 0)
        ranks = children(process.pid)
        process.send_signal(number)
        code, _, errors = finish(process)
    assert code == (130 if number == signal.SIGINT else 75), errors
    assert len(ranks) == 2
    wait_until(lambda: not any(map(is_running, ranks)), seconds=10)
    assert checkpoint.newest_intact(run / "checkpoints")[0] is not None


@pytest.mark.slow
def test_two_ranks_stopped_by_a_signal_to_one_resume_bit_for_bit(
    ranked_once: list[object], tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    ranked_once += ["--set", "epochs=3", "--set", "log_every_steps=1"]
    assert call("launch", "-n", 2, "--", *ranked_once, "--out", whole)[0] == 0
    with running(
        "launch", "-n", 2, "--", *ranked_once, "--out", parts, room=room_for(2)
    ) as process:
        wait_until(lambda: last_step(parts) >= 2)
        os.kill(children(process.pid)[1], signal.SIGUSR1)
        code, _, errors = finish(process)
    assert code == 75, errors
    stopped = re.findall(
        r"after step (\d+) of", errors + (parts / "logs" / "rank-1.log").read_text()
    )
    assert len(stopped) == 2
    assert stopped[0] == stopped[1]
    assert call("launch", "-n", 2, "--", *ranked_once, "--out", parts)[0] == 0
    assert losses(whole) == losses(parts)
    a = newest_weights(whole)
    b = newest_weights(parts)
    assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(ranked_once: list[object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running(
        "launch", "-n", 2, "--", *ranked_once, "--out", run, "--set", "epochs=500"
    ) as process:
        wait_until(lambda: last_step(run) > 0)
        ranks = children(process.pid)
        process.send_signal(signal.SIGKILL)
    wait_until(
        lambda: not any(map(is_running, ranks)), seconds=100
    )  # less than the patience, which would end them
    assert len(ranks) == 2
    assert checkpoint.newest_intact(run / "checkpoints")[0] is not None


@pytest.mark.slow
def test_a_folder_refused_to_rank_0_ends_all_ranks_without_a_traceback(
    ranked_once: list[object], finished: Path
) -> None:
    changes = ["--set", "epochs=1", "--set", "momentum=0.5"]
    code, _, errors = call("launch", "-n", 2, "--", *ranked_once, "--out", finished, *changes)
    assert code == 2, errors
    assert "holds a run of another recipe" in errors
    assert (
        "[rank 1] lockstep: another rank has ended"
        in (finished / "logs" / "rank-1.log").read_text()
    )
    assert "Traceback" not in errors


@pytest.mark.slow
@in_a_soak  # `tests/backends/test_ranks.py` sees the scores, and a finished run those of two ranks
def test_an_evaluation_on_two_ranks_prints_one_result_with_every_image_once(
    ranked_once: list[object], textures: Path, finished: Path
) -> None:
    evaluate = ["evaluate", finished, "--data", textures, "--json", "--batch", 3, *ranked_once[-4:]]
    alone = json.loads(call(*evaluate)[1])
    code, output, errors = call("launch", "-n", 2, "--", *evaluate)
    assert (code, errors) == (0, "")
    together = json.loads(output)
    assert together.pop("loss") == pytest.approx(alone.pop("loss"), rel=1e-6)
    assert together.pop("speed").keys() == alone.pop("speed").keys()
    assert together == alone
    assert together["images"] == 20


@pytest.mark.slow
@pytest.mark.skipif("torch" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_plain_torchrun_works(arguments: list[object], tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lockstep",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*torchrun, *map(str, arguments), "--out", str(tmp_path / "run"), "--set", "epochs=1"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENT_SEC, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "report.json").read_text())["ranks"] == 2


@pytest.mark.slow
@pytest.mark.skipif("paddle" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_plain_paddle_launch_works(arguments: list[object], tmp_path: Path) -> None:
    launch = [
        sys.executable,
        "-m",
        "paddle.distributed.launch",
        "--nproc_per_node",
        "2",
        "--log_dir",
        tmp_path / "log",
    ]
    program = Path(lockstep.__file__).with_name("__main__.py")  # this launcher has no -m
    command = [
        *launch,
        program,
        *arguments,
        "--out",
        tmp_path / "run",
        "--backend",
        "paddle",
        "--set",
        "epochs=1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env=environment,
        timeout=PATIENT_SEC,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "report.json").read_text())["ranks"] == 2


@pytest.mark.slow
@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="LOCKSTEP_BACKENDS leaves it out")
def test_plain_tf_config_works(arguments: list[object], tmp_path: Path) -> None:
    from lockstep.backends.tensorflow.launching import worker

    environment = partial(worker, one_machine(2))
    command = [
        sys.executable,
        "-m",
        "lockstep",
        *map(str, arguments),
        "--backend",
        "tensorflow",
        "--set",
        "epochs=1",
    ]
    with ExitStack() as stack:
        ranks = []
        for rank in (0, 1):
            errors = stack.enter_context((tmp_path / f"{rank}.txt").open("w"))
            process = subprocess.Popen(
                [*command, "--out", tmp_path / "run"],
                env=os.environ | environment(rank),
                stderr=errors,
            )
            stack.callback(process.kill)
            ranks.append(process)
        for i, process in enumerate(ranks):
            assert process.wait(PATIENT_SEC) == 0, (tmp_path / f"{i}.txt").read_text()
    assert json.loads((tmp_path / "run" / "report.json").read_text())["ranks"] == 2


@pytest.mark.slow
def test_a_user_error_of_launched_ranks_keeps_its_exit_code(
    arguments: list[object], tmp_path: Path
) -> None:
    code, _, errors = call(
        "launch", "-n", 2, "--", *arguments, "--out", tmp_path / "run", "--set", "epoch=1"
    )
    assert code == 2
    assert "Did you mean --set epochs=" in errors
    assert "Traceback" not in errors


@pytest.fixture(scope="session")
def dense(recipe_file: Path, textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to start from."""
    run = tmp_path_factory.mktemp("dense") / "run"
    changes = ["--set", "epochs=1", "--backend", "reference", "--set", "reference_dtype=float32"]
    code, _, errors = call(
        "train", "--recipe", recipe_file, "--data", textures, "--out", run, *changes
    )
    assert code == 0, errors
    return run


def zeros(run: Path) -> dict[str, int]:
    """Return the number of weights of each masked tensor that are 0, minus the zeros of its mask."""
    kept = read_masks(run)
    found = newest_weights(run)
    return {name: int((found[name] == 0).sum() - (~mask).sum()) for name, mask in kept.items()}


@pytest.mark.slow
@in_a_soak  # `tests/backends/test_sparse_runs.py` stops and resumes such a run on every engine
@pytest.mark.parametrize("backend", some("paddle"))
def test_a_sparse_run_killed_again_and_again_ends_bit_for_bit_like_one_that_was_not(
    backend: str, arguments: list[object], dense: Path, tmp_path: Path
) -> None:
    arguments += [
        "--backend",
        backend,
        "--set",
        "sparsity=mask_1d",
        "--set",
        "ema_decay=0.9",
        "--set",
        "epochs=3",
    ]
    code, output, errors = call(*arguments, "--weights", dense, "--out", tmp_path / "whole")
    assert code == 0, errors
    assert "note: starts from the weights of step-00000007" in output
    killed = tmp_path / "killed"
    for step in (0, 1, 8) if SOAK else (1,):
        with running(*arguments, "--weights", dense, "--out", killed):
            wait_until(
                lambda step=step: (killed / "start.json").exists() and last_step(killed) >= step
            )  # type: ignore[misc]
    code, output, errors = call(*arguments, "--out", killed)
    assert code == 0, errors
    assert "starts from" not in output
    assert losses(killed) == losses(tmp_path / "whole")
    a = newest_weights(killed)
    b = newest_weights(tmp_path / "whole")
    assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []
    assert set(zeros(killed).values()) == {0}


@pytest.mark.slow
@in_a_soak  # sparse runs and ranks are seen on every engine in `tests/backends`
def test_two_sparse_ranks_end_with_the_weights_of_one(
    ranked_once: list[object], dense: Path, tmp_path: Path
) -> None:
    changes = [
        "--set",
        "sparsity=mask_2d_best",
        "--set",
        "batch_norm=synchronised",
        "--set",
        "epochs=1",
    ]
    changes += ["--set", "lr=0.001", "--weights", str(dense)]
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert call(*ranked_once, *changes, "--out", one)[0] == 0
    code, _, errors = call("launch", "-n", 2, "--", *ranked_once, *changes, "--out", two)
    assert code == 0, errors
    assert largest_difference(newest_weights(one), newest_weights(two)) < 2e-4
    assert zeros(one) == zeros(two)
    assert set(zeros(two).values()) == {0}
    assert (one / "start.json").read_text() == (two / "start.json").read_text()


@pytest.mark.slow
@in_a_soak  # a folder that is refused ends the ranks in the same way
def test_weights_refused_to_rank_0_end_all_ranks_without_a_traceback(
    ranked_once: list[object], dense: Path, finished: Path
) -> None:
    changes = ["--set", "epochs=1", "--weights", dense]
    code, _, errors = call("launch", "-n", 2, "--", *ranked_once, *changes, "--out", finished)
    assert code == 2, errors
    assert "was started from its recipe's initial weights" in errors
    assert (
        "[rank 1] lockstep: another rank has ended"
        in (finished / "logs" / "rank-1.log").read_text()
    )
    assert "Traceback" not in errors


def test_a_sparse_recipe_without_weights_says_what_to_do(
    arguments: list[object], answer: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, _, errors = answer(*arguments, "--set", "sparsity=mask_1d", "--out", tmp_path / "run")
    assert code == 2
    assert "--weights" in errors
    assert not (tmp_path / "run").exists()


def children(parent: int) -> list[int]:
    """Return the processes that are ranks started by a launcher, by rank."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = [value for value in environment if value.startswith(b"RANK=")]
        if int(status[1]) == parent and rank:
            ranks[int(rank[0].removeprefix(b"RANK="))] = int(entry.name)
    return [ranks[rank] for rank in sorted(ranks)]


def test_a_wrong_profile_is_refused_with_what_it_takes(
    arguments: list[object], answer: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for text in ("ten", "3:2:1", "3:x"):
        code, _, errors = answer(*arguments, "--profile", text, "--out", tmp_path / "run")
        assert code == 2
        assert f"--profile takes N or N:M, such as 20:3; found {text!r}" in errors
    assert not (tmp_path / "run").exists()


def test_loggers_and_traces_are_chosen_by_options(
    arguments: list[object], answer: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
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
