"""Train the first steps of a recipe from photos on every installed backend, and compare the losses.

    python benchmarks/recipe_steps.py --data DIR --recipe resnet50-rsb-a2

The fields are those of the recipe, except for the batch, the precision (fp32), a narrow model of
the same kind, and a peak rate of 0.0001: at rates useful for training, rounding soon leads to
another trajectory (docs/explanation/numerics.md). A difference is the largest one between two
backends in a step, as a share of the loss.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lockstep
from lockstep.backends import FRAMEWORKS, find_interpreter
from lockstep.models.architectures import narrow_model
from lockstep.system.event_log import read_log
from measuring import make_parser, record


def main() -> None:
    parser = make_parser(__doc__, "Folders of photos, one for each class.")
    parser.add_argument("--recipe", default="resnet50-rsb-a2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--images", type=int, default=16, help="Images in a step.")
    parser.add_argument("--backends", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    arguments = parser.parse_args()
    changes = choose_changes(arguments.recipe, arguments.images)
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in arguments.backends:
            python = find_interpreter(backend)
            if python is None:
                print(f"{backend}: not installed")
                continue
            run = Path(folder) / backend
            train(python, backend, run, arguments.recipe, arguments.data, arguments.steps, changes)
            entries = read_log(run / "log.jsonl")
            losses[backend] = [
                loss for entry in entries if entry["kind"] == "train" for loss in entry["losses"]
            ]
    spreads = [(max(step) - min(step)) / min(step) for step in zip(*losses.values(), strict=True)]
    record(
        f"recipe_steps_{arguments.recipe}",
        {"changes": changes, "losses": losses, "largest_difference": max(spreads)},
    )


def choose_changes(name: str, images: int) -> dict[str, Any]:
    """Return the fields in which the runs differ from the recipe."""
    recipe = lockstep.load_recipe(name)
    narrow = recipe.replace(model=narrow_model(recipe.spec))
    return {
        "model": narrow.fields()["model"],
        "precision": "fp32",
        "global_batch_images": images,
        "epochs": 2,
        "warmup_epochs": 1,
        "lr": 1e-4,
        "lr_scaling": "none",
    }


def train(
    python: Path, backend: str, run: Path, recipe: str, data: Path, steps: int, changes: Any
) -> None:
    """Train the first steps with a backend in an environment that has it."""
    options = {
        "--recipe": recipe,
        "--data": data,
        "--out": run,
        "--backend": backend,
        "--stop-after-steps": steps,
    }
    command = [str(python), "-m", "lockstep", "train", "--train-only"]
    for name, value in options.items():
        command += [name, str(value)]
    for name, value in changes.items():
        command += ["--set", f"{name}={json.dumps(value)}"]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
