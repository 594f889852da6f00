"""Part: a run of `lockstep train` that is killed with SIGKILL and resumed ends bit for bit like one
that was not."""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.engines import recipe_of
from benchmarks.gpu.timing import Ground, Say
from lockstep.data.textures import draw_data_set
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.recipes import Recipe

KILLED_AT = (3, 9)
"""Steps after which the run is killed."""


def measure(ground: Ground, say: Say) -> None:
    """Write a row for every precision."""
    with tempfile.TemporaryDirectory() as folder:
        images = 40 if ground.tiny else 160
        draw_data_set(Path(folder) / "data", train_images=images, val_images=10)
        precisions = ("fp32",) if ground.tiny else ("bf16", "fp16 dynamic")
        with ThreadPoolExecutor(len(precisions)) as pool:
            for row in pool.map(
                lambda precision: _killed(ground, precision, Path(folder), images), precisions
            ):
                say(row)


def _recipe(ground: Ground, precision: str, images: int) -> Recipe:
    """Return the recipe of a narrow model, for 12 steps."""
    size = 32 if ground.tiny else 64
    recipe = recipe_of(ground, "resnet50", precision, images // 4)
    small = {
        "image_size": size,
        "eval_resize": size,
        "eval_crop": size,
        "logits": 10,
        "epochs": 3,
        "warmup_epochs": 1.0,
    }
    return recipe.replace(
        model=narrow_model(MODELS["resnet50"]), global_batch_images=images // 4, **small
    )


def _killed(ground: Ground, precision: str, folder: Path, images: int) -> dict[str, Any]:
    recipe = folder / f"{precision}.yaml"
    recipe.write_text(_recipe(ground, precision, images).format_yaml(), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        "--recipe",
        str(recipe),
        "--data",
        str(folder / "data"),
    ]
    command += ["--no-tensorboard", "--train-only", "--backend", "torch"]
    for field in (f"device={ground.device}", "save_every_steps=2", "log_every_steps=1"):
        command += ["--set", field]
    whole, killed, late = (folder / f"{precision}-{name}" for name in ("whole", "killed", "late"))
    cache = folder / f"{precision}-cache"
    _finish([*command, "--out", str(whole)], cache)
    steps = KILLED_AT[: 1 if ground.tiny else None]
    found: dict[str, Any] = {
        "killed_after_steps": [
            _kill([*command, "--out", str(killed)], killed, s, cache) for s in steps
        ]
    }
    _finish([*command, "--out", str(killed)], cache)
    found |= {"steps": last_step(whole), "different": different_files(whole, killed)}
    found["same"] = not found["different"]
    if ground.device == "cuda":
        # The compiler chooses kernels by their speed and remembers them. A resumed run may be on
        # another machine.
        _kill([*command, "--out", str(late)], late, KILLED_AT[0], cache)
        _finish([*command, "--out", str(late)], folder / f"{precision}-empty-cache")
        found["same_with_an_empty_cache"] = not different_files(whole, late)
    return {"what": "killed", "precision": precision} | found


def _environment(cache: Path) -> dict[str, str]:
    """Return the environment of a run that keeps what it compiles in a folder."""
    return os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }


def _finish(command: list[str], cache: Path) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, env=_environment(cache), check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"lockstep train ended with code {done.returncode}: {done.stderr[-600:]}"
        )


def _kill(command: list[str], run: Path, step: int, cache: Path) -> int:
    """Start a run and kill it once it has logged this step; return the step that it had logged
    last."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment(cache)
    )
    try:
        while last_step(run) < step:
            if process.poll() is not None:
                raise RuntimeError(
                    f"lockstep train ended with code {process.returncode} before step {step}"
                )
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    return last_step(run)


def losses(run: Path) -> list[float]:
    """Return the losses of all steps in a run's log. A line that a kill cut off is left out."""
    return [loss for entry in _entries(run) if entry["kind"] == "train" for loss in entry["losses"]]


def last_step(run: Path) -> int:
    """Return the last step in a run's log; 0 if there is none."""
    return max([0, *(entry["step"] for entry in _entries(run) if "step" in entry)])


def _entries(run: Path) -> list[dict[str, Any]]:
    file = run / "log.jsonl"
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def different_files(a: Path, b: Path) -> list[str]:
    """Return which tensors' files of the newest checkpoint differ in two runs; "losses" if their
    losses do."""
    newest = max((a / "checkpoints").glob("step-*"))
    found = [] if losses(a) == losses(b) and losses(a) else ["losses"]
    files = sorted(newest.glob("*.safetensors"))
    for file in files:
        other = b / "checkpoints" / newest.name / file.name
        if not other.is_file() or other.read_bytes() != file.read_bytes():
            found.append(file.name)
    return found if files else [*found, "no file of tensors"]
