"""Predict the speed of up to 1,024 GPUs: see docs/explanation/scaling.md.

Without --measured: from published speeds of one GPU, and next to those of several. With --measured:
from your own.
"""

import argparse
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from benchmarks.scaling.fit import Compared, Fit, Measured, compare_steps, fit_steps, read_measured
from benchmarks.scaling.model import (
    Cluster,
    Prediction,
    Step,
    predict_strong_scaling,
    predict_weak_scaling,
)
from benchmarks.scaling.published import (
    BASES,
    Base,
    Scaled,
    build_base_step,
    build_clusters,
    predict_mlperf,
    predict_speedups,
)
from lockstep.cli import terminal
from lockstep.cli.benchmark_grid import parse_numbers
from lockstep.recipes.published_speeds import read_speeds
from lockstep.system.errors import UserError

MOST_GPUS = 1_000_000
WIDTH = 500
"""Columns that a line may take. A table row is one line on any terminal, so that tools can search
and cut it."""


def main(words: list[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(words)
    try:
        predictions = predict(options)
    except UserError as error:
        parser.error(str(error))
    if options.json:
        terminal.print_json(make_plain(predictions))
    else:
        show(predictions)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    add = parser.add_argument
    add(
        "--measured",
        type=Path,
        action="append",
        metavar="FILE",
        help="Measured steps to fit: reports of `lockstep benchmark train`, or what"
        " benchmarks.scaling.campaign wrote. Can be repeated.",
    )
    counts = "8,16,32,64,128,256,512,1024"
    add("-n", default=counts, metavar="8,64", help="Numbers of GPUs to predict.")
    add("--system", default="", help="Predict only for dgx-1, dgx-2, dgx-a100 or dgx-h100.")
    add(
        "--global-batch",
        type=int,
        default=2048,
        metavar="IMAGES",
        help="Images of a step in strong scaling, on all GPUs together.",
    )
    add(
        "--loader",
        type=float,
        default=0.0,
        metavar="RATE",
        help="Images per second that a computer loads; 0: no limit.",
    )
    add("--json", action="store_true", help="Print JSON.")
    return parser


def predict(options: argparse.Namespace) -> dict[str, Any]:
    """Return the predictions. Raises `UserError` for options that make no sense."""
    ranks = parse_numbers(options.n, "-n")
    if not all(1 <= count <= MOST_GPUS for count in ranks):
        raise UserError(f"-n is {options.n}, expected numbers of GPUs from 1 to {MOST_GPUS:,}")
    if not 0 <= options.loader < math.inf:
        raise UserError(
            f"--loader is {options.loader}, expected images per second, or 0 for no limit"
        )
    if options.global_batch < 1:
        raise UserError(f"--global-batch is {options.global_batch}, expected at least 1 image")
    systems = build_clusters(options.system, options.loader)
    if options.measured:
        return predict_measured(options.measured, systems, ranks, options.global_batch)
    return predict_published(systems, ranks, options.global_batch)


def predict_measured(
    files: list[Path], systems: dict[str, Cluster], ranks: list[int], global_batch: int
) -> dict[str, Any]:
    """Return a fit to measured steps, and what it predicts for the last system."""
    rows = [row for path in files for row in read_measured(path)]
    fit = fit_steps(rows)
    name, cluster = list(systems.items())[-1]
    predictions: dict[str, Any] = {"fit": fit, "measured": compare_steps(fit, rows, cluster)}
    if any(row.on_gpu for row in rows):
        predictions["predicted"] = [predict_largest(fit, rows, name, cluster, ranks, global_batch)]
    return predictions


def predict_published(
    systems: dict[str, Cluster], ranks: list[int], global_batch: int
) -> dict[str, Any]:
    predicted = []
    for base in BASES:
        if base.system in systems:
            cluster = systems[base.system]
            predicted.append(
                predict_base(base, build_base_step(base), cluster, ranks, global_batch)
            )
    return {
        "published": predict_speedups(read_speeds(), systems),
        "mlperf": predict_mlperf() if "dgx-h100" in systems else [],
        "predicted": predicted,
    }


def predict_largest(
    fit: Fit,
    rows: list[Measured],
    name: str,
    cluster: Cluster,
    ranks: list[int],
    global_batch: int,
) -> dict[str, Any]:
    """Return predictions from the largest measured batch of one GPU."""
    largest = max((row for row in rows if row.ranks == 1), key=lambda row: row.batch)
    rate = largest.batch / largest.step_sec
    base = Base(largest.model, name, largest.batch, rate, "measured")
    return predict_base(base, fit.step(largest), cluster, ranks, global_batch)


def predict_base(
    base: Base, step: Step, cluster: Cluster, ranks: list[int], global_batch: int
) -> dict[str, Any]:
    return {
        "base": base,
        "global_batch": global_batch,
        "weak": predict_weak_scaling(step, cluster, ranks, base.batch),
        "strong": predict_strong_scaling(step, cluster, ranks, base.batch, global_batch),
    }


def make_plain(value: Any) -> Any:
    """Return dataclasses as dictionaries, with the properties that tables show."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if is_dataclass(value):
        own = {field.name: make_plain(getattr(value, field.name)) for field in fields(value)}
        properties = ("published_speedup", "predicted_speedup", "difference")
        return own | {name: getattr(value, name) for name in properties if hasattr(value, name)}
    if isinstance(value, dict):
        return {name: make_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [make_plain(item) for item in value]
    return value


# Tables


def show(predictions: dict[str, Any]) -> None:
    console = terminal.make_console(width=WIDTH)
    if "fit" in predictions:
        show_fit(console, predictions["fit"], predictions["measured"])
    if predictions.get("published"):
        show_title(
            console,
            "published speed-ups, and those predicted from the speed of one GPU in the same table",
        )
        console.print(build_speedups(predictions["published"]))
    if predictions.get("mlperf"):
        show_title(
            console,
            "MLPerf's ResNet-50 on H100: the model is fitted to 8 and 64 GPUs, and predicts 3,584",
        )
        console.print(build_mlperf(predictions["mlperf"]))
    for prediction in predictions.get("predicted", []):
        base = prediction["base"]
        show_title(
            console,
            f"predicted: {base.model} on {base.system}, from {base.images_per_sec:.0f} images/s of"
            f" one GPU ({base.source}); weak scaling: {base.batch} images a GPU; strong scaling:"
            f" {prediction['global_batch']} images on all GPUs",
        )
        console.print(build_predictions(prediction["weak"], prediction["strong"]))


def show_title(console: Console, text: str) -> None:
    console.print(f"\n{text}", markup=False)


def make_table(*columns: str, words: int = 0) -> Table:
    """Return a table whose first columns are of words, which are aligned left."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right")
    return table


def show_fit(console: Console, fit: Fit, rows: list[Compared]) -> None:
    show_title(console, "fitted parameters")
    table = make_table("", "value", words=1)
    table.add_row("fixed time of a step of one rank", f"{fit.fixed_sec * 1000:.1f} ms")
    table.add_row("time of an image", f"{fit.image_sec * 1000:.2f} ms")
    table.add_row("standard deviation of steps of one rank", f"{fit.variation:.1%}")
    if fit.sharing is not None:
        table.add_row("n ranks that share the cores take n times", f"{fit.sharing:.3f}")
        table.add_row(
            "bytes of messages that the cores handle",
            f"{fit.handling.bytes_per_sec / 1e9:.2f} GB/s",
        )
        table.add_row("handling of a message", f"{fit.handling.latency_sec * 1e6:.0f} µs")
    if any(row.measured.hosts > 1 and row.measured.fitted for row in rows):
        table.add_row("share of a link's rate that carries gradients", f"{fit.efficiency:.1%}")
        table.add_row(
            "share of the backward pass in which they are exchanged", f"{fit.overlap:.1%}"
        )
    console.print(table)
    show_title(console, "measured and predicted steps")
    columns = ("ranks", "hosts", "Mbit/s", "batch", "exchange, MB")
    times = ("measured, s", "predicted, s", "difference")
    table = make_table("", *columns, *times, words=1)
    for row in rows:
        own = row.measured
        is_fitted = own.fitted and (own.ranks == 1 or not own.on_gpu)
        rate = ""
        if own.bits_per_sec is not None:
            rate = f"{own.bits_per_sec / 1e6:.0f}"
        where = (str(own.ranks), str(own.hosts), rate, str(own.batch), str(own.all_reduce_mb))
        figures = (f"{own.step_sec:.4f}", f"{row.predicted_sec:.4f}", f"{row.difference:+.1%}")
        table.add_row("fitted" if is_fitted else "check", *where, *figures)
    console.print(table)
    checks = [abs(row.difference) for row in rows if not row.measured.fitted]
    if checks:
        show_title(console, f"the largest difference of a check is {max(checks):.1%}")


def build_speedups(rows: list[Scaled]) -> Table:
    columns = ("batch", "GPUs", "images/s of one", "images/s")
    compared = ("published", "predicted", "difference")
    table = make_table("", "", "", "", *columns, *compared, words=4)
    for scaled in rows:
        row = scaled.row
        table.add_row(
            row.model,
            ", ".join(filter(None, (row.framework, row.variant))),
            row.accelerator,
            row.precision or "-",
            str(row.batch_images or "-"),
            str(row.accelerators),
            f"{scaled.one.images_per_sec:.0f}",
            f"{row.images_per_sec:.0f}",
            f"{scaled.published_speedup:.2f}",
            f"{scaled.predicted_speedup:.2f}",
            f"{scaled.predicted_speedup / scaled.published_speedup - 1:+.1%}",
        )
    return table


def build_mlperf(rows: list[Any]) -> Table:
    table = make_table("", "GPUs", "batch", "images/s", "predicted", "difference", words=1)
    for number, (row, rate) in enumerate(rows):
        figures = (
            f"{row.images_per_sec:.0f}",
            f"{rate:.0f}",
            f"{rate / row.images_per_sec - 1:+.1%}",
        )
        table.add_row("fitted" if number < 2 else "check", str(row.gpus), str(row.batch), *figures)
    return table


def build_predictions(weak: list[Prediction], strong: list[Prediction]) -> Table:
    columns = ("batch", "images/s", "speed-up", "bound by")
    table = make_table(
        "GPUs", *(f"{name} {column}" for name in ("weak:", "strong:") for column in columns)
    )
    for column in (4, 8):
        table.columns[column].justify = "left"
    strong_by_ranks = {prediction.ranks: prediction for prediction in strong}
    for prediction in weak:
        other = strong_by_ranks.get(prediction.ranks)
        cells = ("-",) * len(columns)
        if other is not None:
            cells = format_cells(other)
        table.add_row(str(prediction.ranks), *format_cells(prediction), *cells)
    return table


def format_cells(row: "Prediction") -> tuple[str, ...]:
    return (str(row.batch), f"{row.images_per_sec:.0f}", f"{row.speedup:.2f}", row.bound_by)


if __name__ == "__main__":
    main()
