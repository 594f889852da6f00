"""Runs of `lockstep train` that must end with the same bits: repeated, from a CUDA graph, killed
and resumed, and fine-tuned from weights."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Rows, make_recipe, print_rows
from lockstep.data.textures import draw_data_set
from lockstep.system.event_log import read_log

KILLED_AT = (3, 9)
"""Steps of 12 after which a run is killed."""


def measure(device: str, what: str, precisions: str) -> Rows:
    """Yield a row for every precision, such as fp16, fp16-dynamic or bf16-fused."""
    compare = partial(COMPARISONS[what], device)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        draw_data_set(Path(folder) / "data", train_images=160, val_images=10)
        runs = [Runs(device, Path(folder), precision) for precision in precisions.split(",")]
        for row in pool.map(compare, runs):
            yield {"what": what} | row


class Runs:
    """Runs of one recipe for a narrow model, of 12 steps."""

    def __init__(self, device: str, folder: Path, precision: str) -> None:
        recipe = make_recipe("resnet50", precision, 40, tiny=True)
        recipe = recipe.replace(epochs=3, warmup_epochs=1.0)
        self.precision = precision
        self._folder = folder / precision
        self._folder.mkdir()
        (self._folder / "recipe.yaml").write_text(recipe.format_yaml(), encoding="utf-8")
        words = f"-m lockstep train --data {folder}/data --no-tensorboard --backend torch"
        words += f" --set device={device} --set save_every_steps=2 --set log_every_steps=1"
        words += " --set fused=on" if precision.endswith("fused") else ""
        self._words = [sys.executable, *words.split()]
        self._from_start = ("--train-only", "--recipe", str(self._folder / "recipe.yaml"))

    def finish(self, name: str, *more: str, killed_at: int = 0, cache: str = "cache") -> Path:
        """Start or resume a run of the recipe that keeps what it compiles in a folder. Kill it once
        it has logged a step, if there is one. Return its folder."""
        return self._finish(name, *self._from_start, *more, killed_at=killed_at, cache=cache)

    def fine_tune(self, name: str, weights: Path, killed_at: int = 0) -> Path:
        """Start or resume a run of two epochs from the weights of another one, as `finish` does."""
        more = ["--weights", str(weights), "--set", "epochs=2"]
        more += ["--set", f"precision={self.precision}"]
        return self._finish(name, *more, killed_at=killed_at)

    def _finish(self, name: str, *more: str, killed_at: int, cache: str = "cache") -> Path:
        run = self._folder / name
        place = self._folder / cache
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(place), "TRITON_CACHE_DIR": str(place / "triton")}
        words = [*self._words, "--out", str(run), *more]
        with subprocess.Popen(words, stdout=sys.stderr, env=os.environ | caches) as process:
            while killed_at and len(_read_losses(run)) < killed_at and process.poll() is None:
                time.sleep(0.002)
            if killed_at:
                process.kill()
        if process.returncode != (-signal.SIGKILL if killed_at else 0):
            raise RuntimeError(f"lockstep train ended with code {process.returncode}")
        return run


def _repeat(device: str, runs: Runs) -> dict[str, Any]:
    first = runs.finish("first")
    row = {"precision": runs.precision, "same": are_same(first, runs.finish("second"))}
    if device == "cuda":
        graph = runs.finish("graph", "--set", "cuda_graph=on")
        row["same_from_a_graph"] = are_same(first, graph)
    return row


def _kill(device: str, runs: Runs) -> dict[str, Any]:
    whole = runs.finish("whole")
    for step in KILLED_AT:
        runs.finish("killed", killed_at=step)
    row = {"precision": runs.precision, "same": are_same(whole, runs.finish("killed"))}
    if device == "cuda":
        # The compiler chooses kernels by their speed and remembers them. A resumed run may be on
        # another machine.
        runs.finish("late", killed_at=KILLED_AT[0])
        late = runs.finish("late", cache="empty-cache")
        row["same_with_an_empty_cache"] = are_same(whole, late)
    return row


def _fine_tune(device: str, runs: Runs) -> dict[str, Any]:
    """Fine-tune on the device from a run's weights: the classifier on features, then all layers."""
    weights = runs.finish("weights")
    whole = runs.fine_tune("tuned", weights)
    for step in KILLED_AT:
        runs.fine_tune("tuned-killed", weights, killed_at=step)
    resumed = runs.fine_tune("tuned-killed", weights)
    return {"precision": runs.precision, "same": are_same(whole, resumed)}


COMPARISONS = {"repeated": _repeat, "killed": _kill, "fine-tuned": _fine_tune}


def _read_losses(run: Path) -> list[float]:
    log = read_log(run / "log.jsonl")
    return [loss for entry in log if entry["kind"] == "train" for loss in entry["losses"]]


def are_same(a: Path, b: Path) -> bool:
    """Return whether two runs have the same losses, and newest checkpoints of the same bits."""
    results = []
    for run in (a, b):
        newest = max((run / "checkpoints").glob("step-*"))
        tensors = {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}
        results.append((newest.name, tensors, _read_losses(run)))
    return all(results[0]) and results[0] == results[1]


if __name__ == "__main__":
    print_rows(measure)
