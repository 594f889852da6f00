"""Fine-tune weights at several peak learning rates; record the accuracy before the first step
and at the end."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lockstep
from lockstep.models.accuracy_interval import wilson
from lockstep.system.event_log import read_log
from measuring import record


def describe_accuracy(top1_percent: float, images: int) -> dict[str, Any]:
    low, high = wilson(round(top1_percent * images / 100), images)
    return {
        "top1_percent": round(top1_percent, 2),
        "interval_percent": [round(100 * low, 1), round(100 * high, 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="Training and validation images.")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 2e-3, 6e-3])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--name", default="fine_tune_rates", help="Name of the result.")
    arguments = parser.parse_args()
    rows = []
    for rate in arguments.rates:
        with tempfile.TemporaryDirectory() as folder:
            lockstep.train(
                data=arguments.data,
                out=Path(folder) / "run",
                weights=arguments.weights,
                changes={"lr": rate, "epochs": arguments.epochs},
                execution=lockstep.Execution(evaluate_every_epochs=arguments.epochs, loggers=()),
            )
            recipe = lockstep.load_recipe(Path(folder) / "run")
            entries = read_log(Path(folder) / "run" / "log.jsonl")
        evaluations = [entry for entry in entries if entry["kind"] == "evaluate"]
        row: dict[str, Any] = {"lr": rate, "global_batch_images": recipe.global_batch_images}
        for entry in evaluations:
            when = "before" if entry["step"] == 0 else "after"
            row[f"{when}_{entry['weights']}"] = describe_accuracy(
                entry["top1_percent"], entry["images"]
            )
        rows.append(row)
        print(row, flush=True)
    record(arguments.name, {"epochs": arguments.epochs, "rates": rows}, "torch")


if __name__ == "__main__":
    main()
