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
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import simplejpeg

import lockstep
from fine_tune_contenders import CONTENDERS
from lockstep.data.textures import PATTERNS, SHORTER_PIXELS, draw_texture
from lockstep.models.accuracy_interval import wilson
from measuring import median, record, round_all

SOURCE_IMAGES = 60
"""Training and validation images of each class from which weights are made."""
TARGET_CLASSES = 10
TARGET_IMAGES = 30
"""Training and validation images of each class for the fine-tuning."""
Curve = list[dict[str, float]]
"""The evaluations of one contender in one round, in their order."""


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = arguments.data or draw_target(folder / "target")
        weights = arguments.weights or make_weights(folder, arguments)
        images = sum(1 for path in (data / "val").rglob("*.*") if path.is_file())
        curves: dict[str, list[Curve]] = {}
        missing = {}
        for seed in range(arguments.rounds):
            for contender in arguments.contenders:
                # Other programs take hidden folders for classes, and write into the data set.
                own = folder / f"{contender}-{seed}"
                own.mkdir()
                subprocess.run(["cp", "-r", str(data), str(own / "data")], check=True)
                curve, error = run_contender(contender, seed, weights, arguments, own)
                if error:
                    missing[contender] = error
                else:
                    curves.setdefault(contender, []).append(curve)
                print(contender, seed, error or curve[-1], flush=True)
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
    parser.add_argument(
        "--size",
        type=int,
        default=64,
        help="Image size of the others in pixels. Give that of the weights, which Lockstep takes.",
    )
    parser.add_argument("--epochs", type=int, default=30, help="Epochs in which weights are made.")
    parser.add_argument("--rounds", type=int, default=3, help="Runs of each, alternately.")
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
    lockstep.load(run).save(weights, to="torchvision")
    return weights


def run_contender(
    contender: str, seed: int, weights: Path, arguments: argparse.Namespace, folder: Path
) -> tuple[Curve, str]:
    """Run a contender in a process of its own on `folder/data`, and return its evaluations, or why
    there are none."""
    out = folder / "evaluations.jsonl"
    is_ours = contender == "lockstep"
    command = [
        *(sys.executable if is_ours else arguments.contenders_python,),
        str(Path(__file__).with_name("fine_tune_contenders.py")),
        contender,
        *("--data", str(folder / "data"), "--weights", str(weights), "--model", arguments.model),
        *("--size", str(arguments.size), "--seed", str(seed)),
        *("--out", str(out), "--began", str(time.time())),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if result.returncode:
        return [], (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
    return [json.loads(line) for line in out.read_text().splitlines()], ""


def compare(curves: dict[str, list[Curve]], images: int) -> dict[str, Any]:
    """Return the accuracy that all contenders have to reach, and the seconds of each to it.

    It is the mean end of the slowest contender less the 95 % interval of one of its runs.
    """
    seconds = {name: median([c[-1]["seconds"] for c in own]) for name, own in curves.items()}
    slowest = max(seconds, key=lambda name: seconds[name])
    end = mean_end(curves[slowest])
    goal = 100 * wilson(round(end / 100 * images), images)[0]
    rows = {}
    for name, own in curves.items():
        reached = [find_seconds_to(goal, curve) for curve in own]
        rows[name] = {
            "seconds_to_goal": finite_or_none(median(reached)),
            "all_seconds_to_goal": [finite_or_none(value) for value in reached],
            "seconds": seconds[name],
            "top1_percent": round(mean_end(own), 2),
            "all_top1_percent": round_all([curve[-1]["top1_percent"] for curve in own]),
        }
    return {"slowest": slowest, "goal_top1_percent": round(goal, 2), "contenders": rows}


def mean_end(curves: list[Curve]) -> float:
    """Return the mean top-1 of the last evaluations, in percent."""
    return fmean(curve[-1]["top1_percent"] for curve in curves)


def find_seconds_to(goal: float, curve: Curve) -> float:
    """Return the seconds to the first evaluation with this top-1, infinite if there is none."""
    return min((p["seconds"] for p in curve if p["top1_percent"] >= goal), default=math.inf)


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main()
