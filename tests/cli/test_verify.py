"""`lockstep verify`."""

import json
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.recipes import Recipe
from tests.processes import finish, running, wait_until
from tests.soak import SOAK

Answer = tuple[int, str, str]


def test_a_table_shows_every_quantity_of_the_model_itself_and_the_verdict(
    answer: Callable[..., Answer], tiny_recipe: Recipe, tmp_path: Path
) -> None:
    # `tests/backends/test_full_models.py` compares models that are deep.
    (tmp_path / "tiny.yaml").write_text(tiny_recipe.format_yaml())
    full = ("--full", "--recipe", tmp_path / "tiny.yaml", "--plot", tmp_path / "curves.png")
    code, output, errors = answer("verify", "--backends", "torch", *full)
    assert (code, errors) == (0, "")
    assert "3 steps of 8 images at 32 px in fp32, the model itself" in output
    for quantity in ("logits", "loss", "gradient", "statistics", "weights"):
        assert any(
            line.split()[:2] == ["torch", quantity] and line.split()[-1] == "ok"
            for line in output.splitlines()
        )
    assert output.splitlines()[-1] == "all within bounds"
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.slow
def test_frameworks_in_two_environments_agree(answer: Callable[..., Answer]) -> None:
    backends = "torch,tensorflow,paddle,mxnet,jax" if SOAK else "torch,mxnet"
    code, output, _ = answer(
        "verify", "--backends", backends, "--model", "resnet18", "--steps", 3, "--json"
    )
    assert code == 0, output
    report = json.loads(output)
    assert report["passed"]
    expected = set(backends.split(","))
    assert {name for name, result in report["engines"].items() if result["passed"]} == expected
    assert set(report["losses"]) == {"reference", *backends.split(",")}


def test_an_engine_that_does_not_pass_gives_exit_code_1(
    answer: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", "/bin/false")
    code, output, _ = answer("verify", "--backends", "torch", "--steps", 3)
    assert code == 1
    assert "torch: failed: /bin/false ended with exit code 1" in output
    assert "NOT verified" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backends", "tortch"), "Did you mean torch"),
        (("--backends", "reference"), "no backend to compare"),
        (("--model", "resnet51"), "Did you mean resnet50"),
        (("--recipe", "demp"), "Did you mean demo"),
        (("--precision", "fp8"), "precision"),
        (("--steps", "2"), "greater than or equal to 3"),
        (("--steps", "3", "--plot", "curves.xyz"), "cannot draw curves.xyz"),
        (
            ("--steps", "3", "--plot", "/no/such/folder/curves.png"),
            "cannot draw /no/such/folder/curves.png",
        ),
    ],
)
def test_wrong_use_is_one_message_and_exit_code_2(
    arguments: tuple[str, ...], message: str, answer: Callable[..., Answer]
) -> None:
    code, _, errors = answer("verify", *arguments)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


def workers_in(folder: Path) -> list[str]:
    """Return the processes whose command names a folder."""
    workers = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_text().split("\0")
            if "lockstep.verification.backend_process" in command and any(
                str(folder) in word for word in command
            ):
                workers.append(path.parent.name)
    return workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"),
    [("SIGTERM", 143), ("SIGKILL", -9), *([("SIGINT", 130)] if SOAK else [])],
)
def test_a_signal_ends_it_and_its_worker_and_leaves_no_folder(
    number: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running("verify", "--steps", 500) as process:  # first it draws its batches
        wait_until(lambda: bool(workers_in(tmp_path)))
        process.send_signal(signal.Signals[number])
        code, _, errors = finish(process)
    wait_until(lambda: not workers_in(tmp_path))
    assert code == expected
    assert "Traceback" not in errors
    if number != "SIGKILL":  # after SIGKILL there is nobody to remove it
        assert list(tmp_path.iterdir()) == []
