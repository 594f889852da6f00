"""Runs of `lockstep train` that must end with the same bits: repeated, from a CUDA graph, and
killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import Rows, make_recipe, print_rows
from lockstep.data.textures import draw_data_set
from lockstep.models.architectures import MODELS, narrow_model

KILLED_AT = (3, 9)
"""Steps of 12 after which a run is killed."""
PRECISIONS = {
    "repeated": ("fp32", "tf32", "bf16", "fp16", "fp16 dynamic", "bf16 fused"),
    "killed": ("bf16", "fp16 dynamic"),
}


@dataclass(frozen=True)
class Runs:
    """Runs of one recipe in a folder."""

    folder: Path
    words: tuple[str, ...]
    """The command line without `--out`."""

    def finish(self, name: str, *more: str, killed_at: int = 0, cache: str = "cache") -> Path:
        """Start or resume a run that keeps what it compiles in a folder. Kill it once it has logged
        a step, if there is one. Return its folder."""
        run = self.folder / name
        place = self.folder / cache
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(place), "TRITON_CACHE_DIR": str(place / "triton")}
        words = [*self.words, "--out", str(run), *more]
        with subprocess.Popen(words, stdout=sys.stderr, env=os.environ | caches) as process:
            while killed_at and len(read_losses(run)) < killed_at and process.poll() is None:
                time.sleep(0.002)
            if killed_at:
                process.kill()
        if process.returncode != (-signal.SIGKILL if killed_at else 0):
            raise RuntimeError(f"lockstep train ended with code {process.returncode}")
        return run


def measure(device: str, what: str, tiny: int = 0) -> Rows:
    """Yield a row for every precision."""
    precisions = ("fp32",) if tiny else PRECISIONS[what]
    compare = _repeat if what == "repeated" else _kill
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(precisions)) as pool:
        draw_data_set(Path(folder) / "data", train_images=160, val_images=10)
        for row in pool.map(partial(compare, device, Path(folder)), precisions):
            yield {"what": what} | row


def _prepare(device: str, folder: Path, precision: str) -> Runs:
    """Return runs of a narrow model, of 12 steps."""
    recipe = make_recipe("resnet50", precision.removesuffix(" fused"), 40, tiny=True)
    recipe = recipe.replace(epochs=3, warmup_epochs=1.0, model=narrow_model(MODELS["resnet50"]))
    own = folder / precision.replace(" ", "-")
    own.mkdir()
    (own / "recipe.yaml").write_text(recipe.format_yaml(), encoding="utf-8")
    words = f"{sys.executable} -m lockstep train --recipe {own}/recipe.yaml --data {folder}/data"
    words += f" --no-tensorboard --train-only --backend torch --set device={device}"
    words += " --set save_every_steps=2 --set log_every_steps=1"
    words += " --set fused=on" if precision.endswith("fused") else ""
    return Runs(own, tuple(words.split()))


def _repeat(device: str, folder: Path, precision: str) -> dict[str, Any]:
    runs = _prepare(device, folder, precision)
    first = runs.finish("first")
    row = {"precision": precision, "same": are_same(first, runs.finish("second"))}
    if device == "cuda":
        graph = runs.finish("graph", "--set", "cuda_graph=on")
        row["same_from_a_graph"] = are_same(first, graph)
    return row


def _kill(device: str, folder: Path, precision: str) -> dict[str, Any]:
    runs = _prepare(device, folder, precision)
    whole = runs.finish("whole")
    for step in KILLED_AT:
        runs.finish("killed", killed_at=step)
    row = {"precision": precision, "same": are_same(whole, runs.finish("killed"))}
    if device == "cuda":
        # The compiler chooses kernels by their speed and remembers them. A resumed run may be on
        # another machine.
        runs.finish("late", killed_at=KILLED_AT[0])
        late = runs.finish("late", cache="empty-cache")
        row["same_with_an_empty_cache"] = are_same(whole, late)
    return row


def read_losses(run: Path) -> list[float]:
    """Return the losses of all steps in a run's log. A line that a kill cut off is left out."""
    file = run / "log.jsonl"
    losses: list[float] = []
    for line in file.read_text(encoding="utf-8").splitlines(True) if file.exists() else ():
        if line.endswith("\n"):
            losses += json.loads(line).get("losses", [])
    return losses


def are_same(a: Path, b: Path) -> bool:
    """Return whether two runs have the same losses, and the same bits in their newest
    checkpoints."""
    tensors = []
    for run in (a, b):
        newest = max((run / "checkpoints").glob("step-*"))
        files = sorted(newest.glob("*.safetensors"))
        tensors.append({f"{newest.name}/{file.name}": file.read_bytes() for file in files})
    return tensors[0] == tensors[1] != {} and read_losses(a) == read_losses(b) != []


if __name__ == "__main__":
    print_rows(measure)
