"""Fine-tuning beside training from scratch in the same time, on several data sets and backends:
top-1 on the validation images with its 95 % interval.

    python benchmarks/fine_tune_or_scratch.py --data photos=FOLDER --weights weights.pth

`train --weights` runs first. Then `my-images` trains the same network at the same size from
scratch, with as many epochs as fit into the same time: its schedule ends with it. Both are whole
commands, and times are the processor's, so that other programs do not change them. A data set
without validation images is divided into five folds.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from lockstep.models.accuracy_interval import wilson
from measuring import RESULTS, record

TRIAL_EPOCHS = 2
"""Epochs of a trial from scratch. The second one is timed: the first one compiles."""
FOLDS = 5


def main() -> None:
    arguments = parse_arguments()
    stored = RESULTS / f"{arguments.name}.json"
    rows = []
    if arguments.extend and stored.exists():
        rows = json.loads(stored.read_text())["rows"]
    for entry in arguments.data:
        name, _, folder = entry.partition("=")
        for backend in arguments.backends:
            with tempfile.TemporaryDirectory() as out:
                row = compare(Path(folder), backend, arguments, Path(out))
            rows = [r for r in rows if (r["data"], r["backend"]) != (name, backend)]
            rows.append({"data": name, "backend": backend, **row})
            print(rows[-1], flush=True)
            record(arguments.name, {"rows": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument(
        "--weights", required=True, help="As `lockstep train --weights` takes them."
    )
    parser.add_argument("--backends", nargs="+", default=["torch", "tensorflow", "paddle", "mxnet"])
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="Of the fine-tuning."
    )
    parser.add_argument(
        "--scratch-epochs", type=int, help="Of the training from scratch; by default a trial tells."
    )
    parser.add_argument("--name", default="fine_tune_or_scratch", help="Name of the result.")
    parser.add_argument("--extend", action="store_true", help="Keep the rows of the last result.")
    return parser.parse_args()


def compare(data: Path, backend: str, arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Return seconds, accuracy and interval of both ways, and whether their intervals are apart."""
    common = ["--data", str(data), "--backend", backend, "--no-tensorboard"]
    runs = 1 if (data / "val").exists() else FOLDS
    parts = ["--folds", str(FOLDS)] if runs > 1 else []
    options = [*common, *parts, "--weights", arguments.weights]
    for setting in arguments.set:
        options += ["--set", setting]
    tuned = train(out / "tuned", options)
    recipe = yaml.safe_load((find_runs(out / "tuned")[0] / "recipe.yaml").read_text())
    options = [*common, "--recipe", "my-images"]
    for field in ("model", "image_size", "eval_resize", "eval_crop"):
        options += ["--set", f"{field}={json.dumps(recipe[field])}"]
    epochs = arguments.scratch_epochs
    if not epochs:
        part = ["--split", str(1 / FOLDS)] if runs > 1 else []
        trial = train(out / "trial", [*options, *part, "--set", f"epochs={TRIAL_EPOCHS}"])
        spent_sec = tuned["processor_sec"] / runs - trial["start_sec"]
        epochs = max(math.ceil(spent_sec / trial["epoch_sec"]), 1)
    scratch = train(out / "scratch", [*options, *parts, "--set", f"epochs={epochs}"])
    return {
        "model": recipe["model"],
        "image_size": recipe["image_size"],
        "settings": arguments.set,
        "weights": Path(arguments.weights).name,
        "fine_tuned": tuned,
        "from_scratch": scratch,
        "intervals_are_apart": tuned["interval_percent"][0] > scratch["interval_percent"][1],
    }


def train(out: Path, options: list[str]) -> dict[str, Any]:
    """Return what a command took, and what its best checkpoints reach on all images that were set
    apart for them."""
    command = [sys.executable, "-m", "lockstep", "train", "--out", str(out), *options]
    began = time.perf_counter(), read_processor_sec()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began[0]
    return read_results(out, seconds, read_processor_sec() - began[1])


def read_results(out: Path, seconds: float, processor_sec: float) -> dict[str, Any]:
    """Return the results of a command that took these seconds."""
    epoch_sec = 0.0
    evaluations = hits = images = 0
    for run in find_runs(out):
        report = json.loads((run / "report.json").read_text())
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        times = [entry["elapsed_sec"] for entry in log if entry["kind"] == "evaluate"]
        # Other programs take the same share of all of the command.
        epoch_sec = (times[-1] - times[0]) / max(len(times) - 1, 1) * processor_sec / seconds
        evaluations = len(times)
        hits += round(report["best"]["top1_percent"] * report["best"]["images"] / 100)
        images += report["best"]["images"]
    return {
        "seconds": round(seconds, 1),
        "processor_sec": round(processor_sec, 1),
        "epochs": report["epochs"],
        "epoch_sec": round(epoch_sec, 3),
        "start_sec": round(processor_sec - epoch_sec * evaluations, 1),
        "top1_percent": round(100 * hits / images, 1),
        "interval_percent": [round(100 * bound, 1) for bound in wilson(hits, images)],
        "images": images,
    }


def read_processor_sec() -> float:
    """Return the processor's seconds of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def find_runs(out: Path) -> list[Path]:
    """Return the folder of a run, or those of all folds."""
    return sorted(out.glob("fold-*")) or [out]


if __name__ == "__main__":
    main()
