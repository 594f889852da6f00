import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.benchmark import largest_batch
from lockstep.benchmark.largest_batch import Found, Try
from lockstep.cli import find
from lockstep.recipes import Execution, Recipe
from lockstep.system import machine
from lockstep.system.machine import describe_gpu_arithmetic
from tests.soak import in_a_soak

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def recipe(tmp_path: Path, tiny_recipe: Recipe) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_recipe.replace(global_batch_images=256).format_yaml(), encoding="utf-8")
    return path


@in_a_soak
@pytest.mark.parametrize(
    ("backend", "gb"),
    [("reference", 0.4), ("torch", 0.8), ("tensorflow", 1.5), ("paddle", 1.5), ("mxnet", 0.8)],
)
def test_the_largest_batch_is_found(answer: Run, recipe: Path, backend: str, gb: float) -> None:
    how = ("--recipe", recipe, "--backend", backend, "--start", "256", "--memory-gb", gb, "--json")
    if backend == "mxnet":  # it is in another environment, where the command would go
        words = [sys.executable, "-m", "lockstep", "find", "batch", *map(str, how)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        code = done.returncode
        output = done.stdout
    else:
        code, output, _ = answer("find", "batch", *how)
    assert code == 0
    result = json.loads(output)
    assert result["memory_bytes"] == gb * 10**9
    assert {attempt["fits"] for attempt in result["tries"]} == {True, False}
    assert result["tries"][-1]["images"] == 256
    assert 256 // result["parts"] <= result["largest"]


def test_every_try_is_a_line_and_the_last_one_a_command(
    answer: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(
        recipe: Recipe, execution: Execution, images: int, parts: int, memory_bytes: int | None
    ) -> Try:
        assert (execution.recompute, memory_bytes) == ("blocks", 2_000_000_000)
        return Try(images, parts, images // parts <= 60, images_per_sec=100.0, is_short=images > 62)

    monkeypatch.setattr(largest_batch, "_try_steps", fake)
    how = ["--recipe", recipe, "--precision", "bf16", "--recompute", "blocks"]
    how += ["--memory-gb", "2", "--set", "device=cpu"]
    code, output, errors = answer("find", "batch", *how)
    assert (code, errors) == (0, "")
    assert output.splitlines() == [
        "a custom model in bf16 at 32 px on torch",
        "    32 images: fits, 100.0 images/s",
        "    64 images: too large",
        "    48 images: fits, 100.0 images/s",
        "    56 images: fits, 100.0 images/s",
        "    60 images: fits, 100.0 images/s",
        "    62 images: failed: ?",
        "   256 images in 8 parts: fits, 100.0 images/s",
        "The largest batch that fits: 60 images.",
        "The recipe's 256 images fit in 8 parts of 32:",
        (
            f"lockstep train --recipe {recipe} --data DATA --out RUN --set precision=bf16 --set"
            " device=cpu --set recompute=blocks --set accumulation_steps=8"
        ),
    ]
    code, output, _ = answer("find", "batch", *how, "--json")
    assert (code, json.loads(output)["largest"]) == (0, 60)


def test_the_answer_is_a_command_that_trains_the_recipes_batch() -> None:
    recipe = Recipe(global_batch_images=256)
    how = Execution(backend="tensorflow", recompute="blocks")
    lines = find.advise(
        "r.yaml", recipe, how, Found(98, 4, []), ["precision=bf16", "recompute=blocks"]
    )
    assert lines == [
        "The largest batch that fits: 98 images.",
        "The recipe's 256 images fit in 4 parts of 64:",
        (
            "lockstep train --recipe r.yaml --backend tensorflow --data DATA --out RUN --set"
            " precision=bf16 --set recompute=blocks --set accumulation_steps=4"
        ),
    ]
    plain = find.advise("r.yaml", recipe, Execution(), Found(98, 4, []), [])
    assert plain[2:] == [
        "lockstep train --recipe r.yaml --data DATA --out RUN --set accumulation_steps=4",
        "With --recompute blocks, larger batches fit, but steps take longer.",
    ]
    assert find.advise("r.yaml", recipe, Execution(), Found(256, 1, []), [])[1:] == [
        "The recipe's 256 images fit at once:",
        "lockstep train --recipe r.yaml --data DATA --out RUN",
    ]


def test_a_refused_range_test_leaves_no_folder(answer: Run, tmp_path: Path) -> None:
    out = tmp_path / "range"
    code, _, errors = answer(
        "find", "lr", "--data", tmp_path, "--from", "2", "--to", "1", "--out", out
    )
    assert (code, out.exists()) == (2, False), errors


def test_main_memory_is_no_limit_of_a_gpu(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: ("H100", describe_gpu_arithmetic((9, 0))))
    code, output, errors = answer("find", "batch", "--memory-gb", "1")
    assert (code, output) == (2, "")
    assert errors.startswith(
        "lockstep: --memory-gb limits main memory, but the steps run on a GPU; leave it out"
    )


def test_unknown_memory_needs_a_limit(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: None)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: None)
    code, _, errors = answer("find", "batch")
    assert code == 2
    assert errors.endswith("set a limit: --memory-gb\n")
