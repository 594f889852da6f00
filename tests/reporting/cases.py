"""Folders of runs as training writes them, with random figures."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.metrics import Scores, measure
from lockstep.recipes import Execution, Recipe
from lockstep.runs.image_results import Results, write_results
from lockstep.system.files import write_json, write_text

EPOCHS = 4
STEPS = 120
INTERVAL = 5


def random_scores(classes: int, images: int, seed: int, accuracy: float = 0.8) -> Scores:
    """Return scores of a model that is right on about this share, confuses neighbours, and is too
    confident."""
    random = np.random.default_rng(seed)
    labels = np.arange(images) * classes // images
    right = random.random(images) < accuracy
    near = (labels + random.choice([-2, -1, 1, 1, 2, 3], images)) % classes
    predictions = np.where(right, labels, near)
    confidences = np.where(right, random.beta(6, 1.5, images), random.beta(2.5, 2, images))
    return Scores(
        losses=np.where(right, 0.3, 2.5).astype(np.float32),
        ranks=np.where(right, 0, random.integers(1, 8, images)).astype(np.int32),
        predictions=predictions.astype(np.int32),
        labels=labels.astype(np.int32),
        confidences=confidences.astype(np.float32),
    )


def build_log(steps: int, seed: int, weights: list[str], images: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    entries: list[dict[str, Any]] = [
        {"kind": "start", "step": 0, "total": STEPS, "damaged": [], "notes": []}
    ]
    for first in range(0, steps, INTERVAL):
        progress = first / STEPS
        losses = (0.4 + 1.9 * np.exp(-4 * progress) + random.normal(0, 0.08, INTERVAL)).tolist()
        entries.append(
            {
                "kind": "train",
                "step": first + INTERVAL,
                "first_step": first,
                "loss": float(np.mean(losses)),
                "top1_percent": 90 * (1 - np.exp(-4 * progress)),
                "top5_percent": 99.0,
                "images": 32 * INTERVAL,
                "losses": losses,
                "loss_scale": 1.0,
                "images_per_sec": float(100 + 10 * random.random()),
                "data_wait_share": float(0.05 * random.random()),
                "lr": 0.05 * (1 + np.cos(np.pi * progress)),
            }
        )
        step = first + INTERVAL
        if step % (STEPS // EPOCHS) == 0:
            for name in weights:
                top1 = 88 * (1 - np.exp(-5 * step / STEPS))
                figures = {
                    "loss": 1.2 - 0.8 * step / STEPS,
                    "top1_percent": top1,
                    "top5_percent": 98.0,
                    "images": images,
                }
                entries.append(
                    {"kind": "evaluate", "step": step, "weights": name, "images_per_sec": 300.0}
                    | figures
                )
    return [entry | {"elapsed_sec": 0.3 * number} for number, entry in enumerate(entries)]


def write_run(
    folder: Path,
    *,
    recipe: Recipe,
    classes: list[str],
    images: int = 400,
    seed: int = 0,
    backend: str = "torch",
    data: Path | None = None,
    digest: str = "of no images",
    steps: int = STEPS,
    keeps_results: bool = True,
) -> Path:
    """Write the folder of a run at a step; at the last step the run is finished."""
    folder.mkdir(parents=True)
    recipe = recipe.replace(epochs=EPOCHS, logits=len(classes), seed=seed)
    weights = ["trained", "ema"] if recipe.ema_decay else ["trained"]
    write_text(folder / "recipe.yaml", recipe.format_yaml())
    about = {
        "lockstep": "0.1.0",
        backend: "1.2.3",
        "processor": "a processor",
        "memory_bytes": 2**34,
        "device": "CPU, 2 threads",
        "ranks": 1,
        "execution": Execution(backend=backend).fields(),
        "data": str(data),
        "val": {"images": images, "quarantined": []},
    }
    write_json(folder / "environment.json", about)
    log = build_log(steps, seed, weights, images)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    if steps < STEPS:
        return folder
    scores = {name: random_scores(len(classes), images, seed + i) for i, name in enumerate(weights)}
    if keeps_results:
        write_results(folder, Results(STEPS, digest, scores))
    final = {
        name: measure(results, len(classes))
        | {"images": images, "step": STEPS, "images_per_sec": 300.0}
        for name, results in scores.items()
    }
    report = {
        **{"recipe": "", "model": "resnet18", "epochs": 1, "device": "CPU", "ranks": 1},
        "data_wait_share": 0.1,
        "steps": STEPS,
        "final": final,
        "best": final["trained"],
        "quarantined": 0,
        "classes": classes,
        "per_class": {name: results.per_class(len(classes)) for name, results in scores.items()},
        "images_per_sec": 105.0,
        "train_sec": 61.0,
    }
    write_json(folder / "report.json", report)
    return folder
