"""Fine-tune the same weights on the same images with Lockstep and with what people use instead:
seconds to the same accuracy, and the accuracy at the end. docs/how-to/fine-tune.md explains
`train`.

Without `--weights`, Lockstep first trains some on drawn images of many classes, which is not
counted: each class is a mixture of two textures, and the classes of the two data sets differ.

    python benchmarks/fine_tune.py --contenders-python VENV/bin/python

runs the other contenders in an environment that has torchvision, timm, fastai or ultralytics beside
torch. Contenders that cannot be imported there are reported as not measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

import lockstep
from fine_tune_contenders import CONTENDERS
from lockstep.data.textures import PATTERNS, SHORTER_PIXELS, draw_texture
from lockstep.models.accuracy_interval import wilson
from measuring import record

SOURCE_IMAGES = 60
"""Training and validation images of each class from which weights are made."""
TARGET_CLASSES = 10
TARGET_IMAGES = 30
"""Training and validation images of each class for the fine-tuning."""


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = arguments.data or draw_target(folder / "target")
        weights = arguments.weights or make_weights(folder, arguments)
        images = sum(1 for path in (data / "val").rglob("*.*") if path.is_file())
        curves: dict[str, list[dict[str, float]]] = {}
        missing = {}
        for contender in arguments.contenders:
            # Other programs take hidden folders for classes, and write into the data set.
            own = folder / f"data-{contender}"
            subprocess.run(["cp", "-r", str(data), str(own)], check=True)
            curve, error = run_contender(contender, own, weights, arguments, folder)
            if error:
                missing[contender] = error
            else:
                curves[contender] = curve
            print(contender, error or curve[-1], flush=True)
    record(
        arguments.name,
        {
            "model": arguments.model,
            "image_size": arguments.size,
            "validation_images": images,
            **compare(curves, images),
            "not_measured": missing,
            "curves": curves,
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="Folders train/<class> and val/<class>.")
    parser.add_argument("--weights", type=Path, help="A state dict in torchvision's names (.pth).")
    parser.add_argument("--keep-weights", type=Path, help="Where to keep weights that are made.")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64, help="Image size of the others in pixels.")
    parser.add_argument("--epochs", type=int, default=30, help="Epochs in which weights are made.")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--contenders-python", default=sys.executable)
    parser.add_argument("--name", default="fine_tune", help="Name of the result.")
    return parser.parse_args()


def draw_target(root: Path) -> Path:
    """Draw the data set for the fine-tuning and return its folder."""
    draw_mixtures(root, list_mixtures()[-TARGET_CLASSES:], TARGET_IMAGES)
    return root


def list_mixtures() -> list[tuple[str, str]]:
    """Return all pairs of textures, in an order that gives both data sets every texture."""
    pairs = list(combinations(sorted(PATTERNS), 2))
    return [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))]


def draw_mixtures(root: Path, pairs: Iterable[tuple[str, str]], images: int) -> None:
    """Write as many training as validation images of each pair of textures."""
    for first, second in pairs:
        for number in range(2 * images):
            split = "train" if number < images else "val"
            path = root / split / f"{first}-{second}" / f"{number:04}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(simplejpeg.encode_jpeg(mix(first, second, number), quality=90))


def mix(first: str, second: str, number: int) -> np.ndarray:
    """Return the mean of two textures: uint8 RGB [96, 96, 3]."""
    parts = []
    for kind in (first, second):
        # Another number for each pair, so that no two classes share a picture of a texture.
        seed = sorted(PATTERNS).index(first) * 100 + sorted(PATTERNS).index(second)
        pixels = draw_texture(kind, number, seed)
        parts.append(pixels[:SHORTER_PIXELS, :SHORTER_PIXELS].astype(np.uint16))
    return (sum(parts) // 2).astype(np.uint8)


def make_weights(folder: Path, arguments: argparse.Namespace) -> Path:
    """Train weights on the classes that are not fine-tuned, and return them as a state dict."""
    source = folder / "source"
    draw_mixtures(source, list_mixtures()[:-TARGET_CLASSES], SOURCE_IMAGES)
    run = folder / "source-run"
    settings = {"model": arguments.model, "image_size": arguments.size, "epochs": arguments.epochs}
    command = ["train", "--recipe", "my-images", "--data", str(source), "--out", str(run)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run([sys.executable, "-m", "lockstep", *command], check=True)
    weights = arguments.keep_weights or folder / "weights.pth"
    lockstep.convert(run, weights, to="torchvision")
    return weights


def run_contender(
    contender: str, data: Path, weights: Path, arguments: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, float]], str]:
    """Run a contender in a process of its own and return its evaluations, or why there are none."""
    out = folder / f"{contender}.jsonl"
    is_ours = contender == "lockstep"
    command = [
        *(sys.executable if is_ours else arguments.contenders_python,),
        str(Path(__file__).with_name("fine_tune_contenders.py")),
        contender,
        *("--data", str(data), "--weights", str(weights), "--model", arguments.model),
        *("--size", str(arguments.size), "--out", str(out), "--began", str(time.time())),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if result.returncode:
        return [], (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
    return [json.loads(line) for line in out.read_text().splitlines()], ""


def compare(curves: dict[str, list[dict[str, float]]], images: int) -> dict[str, Any]:
    """Return the accuracy that all contenders have to reach, and the seconds of each to it.

    It is the end of the slowest contender less its 95 % interval.
    """
    slowest = max(curves, key=lambda name: curves[name][-1]["seconds"])
    end = curves[slowest][-1]["top1_percent"]
    goal = 100 * wilson(round(end / 100 * images), images)[0]
    rows = {}
    for name, curve in curves.items():
        reached = [point["seconds"] for point in curve if point["top1_percent"] >= goal]
        rows[name] = {
            "seconds_to_goal": reached[0] if reached else None,
            "seconds": curve[-1]["seconds"],
            "top1_percent": round(curve[-1]["top1_percent"], 2),
            "best_top1_percent": round(max(point["top1_percent"] for point in curve), 2),
        }
    return {"slowest": slowest, "goal_top1_percent": round(goal, 2), "contenders": rows}


if __name__ == "__main__":
    main()
