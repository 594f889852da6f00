"""`lockstep benchmark scaling`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lockstep.cli import options, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.benchmark.scaling import Cluster, Prediction, Step
    from lockstep.benchmark.scaling_fit import Compared, Fit, Measured
    from lockstep.benchmark.scaling_published import Base, Scaled

_MOST_GPUS = 1_000_000
_WIDTH = 500
"""Columns that a line may take. A table row is one line on any terminal, so that tools can search
and cut it."""


def command(
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Measured steps to fit: reports of `benchmark train`, of benchmarks/scaling.py.",
        ),
    ] = None,
    counts: Annotated[
        str, typer.Option("-n", metavar="8,64", help="Numbers of GPUs to predict.")
    ] = "8,16,32,64,128,256,512,1024",
    system: Annotated[
        str, typer.Option(help="Predict only for dgx-1, dgx-2, dgx-a100 or dgx-h100.")
    ] = "",
    global_batch: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="IMAGES",
            help="Images of a step in strong scaling, on all GPUs together.",
        ),
    ] = 2048,
    loader: Annotated[
        float,
        typer.Option(
            min=0, metavar="RATE", help="Images per second that a computer loads; 0: no limit."
        ),
    ] = 0.0,
    as_json: options.AsJson = False,
) -> None:
    """Predict the speed of up to 1,024 GPUs.

    Without --measured: from published speeds of one GPU, and next to those of several. With
    --measured: from your own.
    """
    from lockstep.benchmark.scaling_published import build_clusters
    from lockstep.cli.benchmark_grid import parse_numbers
    from lockstep.system.errors import UserError

    ranks = parse_numbers(counts, "-n")
    if not all(1 <= count <= _MOST_GPUS for count in ranks):
        raise UserError(f"-n is {counts}, expected numbers of GPUs from 1 to {_MOST_GPUS:,}")
    if not math.isfinite(loader):
        raise UserError(f"--loader is {loader}, expected images per second, or 0 for no limit")
    systems = build_clusters(system, loader)
    if measured:
        predictions = _fit(measured, systems, ranks, global_batch)
    else:
        predictions = _predict_published(systems, ranks, global_batch)
    if as_json:
        terminal.print_json(_make_plain(predictions))
    else:
        _show(predictions)


def _fit(
    files: list[Path], systems: "dict[str, Cluster]", ranks: list[int], global_batch: int
) -> dict[str, Any]:
    """Return a fit to measured steps, and what it predicts for the last system."""
    from lockstep.benchmark.scaling_fit import compare_steps, fit_steps, read_measured

    rows = [row for path in files for row in read_measured(path)]
    fit = fit_steps(rows)
    name, cluster = list(systems.items())[-1]
    predictions: dict[str, Any] = {"fit": fit, "measured": compare_steps(fit, rows, cluster)}
    if any(row.on_gpu for row in rows):
        predictions["predicted"] = [_predict_largest(fit, rows, name, cluster, ranks, global_batch)]
    return predictions


def _predict_published(
    systems: "dict[str, Cluster]", ranks: list[int], global_batch: int
) -> dict[str, Any]:
    from lockstep.benchmark.scaling_published import (
        BASES,
        build_base_step,
        predict_mlperf,
        predict_speedups,
    )
    from lockstep.recipes.published_speeds import read_speeds

    predicted = []
    for base in BASES:
        if base.system in systems:
            cluster = systems[base.system]
            predicted.append(_predict(base, build_base_step(base), cluster, ranks, global_batch))
    return {
        "published": predict_speedups(read_speeds(), systems),
        "mlperf": predict_mlperf() if "dgx-h100" in systems else [],
        "predicted": predicted,
    }


def _predict_largest(
    fit: "Fit",
    rows: "list[Measured]",
    name: str,
    cluster: "Cluster",
    ranks: list[int],
    global_batch: int,
) -> dict[str, Any]:
    """Return predictions from the largest measured batch of one GPU."""
    from lockstep.benchmark.scaling_published import Base

    largest = max((row for row in rows if row.ranks == 1), key=lambda row: row.batch)
    rate = largest.batch / largest.step_sec
    base = Base(largest.model, name, largest.batch, rate, "measured")
    return _predict(base, fit.step(largest), cluster, ranks, global_batch)


def _predict(
    base: "Base", step: "Step", cluster: "Cluster", ranks: list[int], global_batch: int
) -> dict[str, Any]:
    from lockstep.benchmark.scaling import predict_strong_scaling, predict_weak_scaling

    return {
        "base": base,
        "global_batch": global_batch,
        "weak": predict_weak_scaling(step, cluster, ranks, base.batch),
        "strong": predict_strong_scaling(step, cluster, ranks, base.batch, global_batch),
    }


def _make_plain(value: Any) -> Any:
    """Return dataclasses as dictionaries, with the properties that tables show."""
    from dataclasses import fields, is_dataclass

    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if is_dataclass(value):
        own = {field.name: _make_plain(getattr(value, field.name)) for field in fields(value)}
        properties = ("published_speedup", "predicted_speedup", "difference")
        return own | {name: getattr(value, name) for name in properties if hasattr(value, name)}
    if isinstance(value, dict):
        return {name: _make_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return value


# Tables


def _show(predictions: dict[str, Any]) -> None:
    console = terminal.make_console(width=_WIDTH)
    if "fit" in predictions:
        _show_fit(console, predictions["fit"], predictions["measured"])
    if predictions.get("published"):
        _show_title(
            console,
            "published speed-ups, and those predicted from the speed of one GPU in the same table",
        )
        console.print(_build_speedups(predictions["published"]))
    if predictions.get("mlperf"):
        _show_title(
            console,
            "MLPerf's ResNet-50 on H100: the model is fitted to 8 and 64 GPUs, and predicts 3,584",
        )
        console.print(_build_mlperf(predictions["mlperf"]))
    for prediction in predictions.get("predicted", []):
        base = prediction["base"]
        _show_title(
            console,
            f"predicted: {base.model} on {base.system}, from {base.images_per_sec:.0f} images/s of"
            f" one GPU ({base.source}); weak scaling: {base.batch} images a GPU; strong scaling:"
            f" {prediction['global_batch']} images on all GPUs",
        )
        console.print(_build_predictions(prediction["weak"], prediction["strong"]))


def _show_title(console: "Console", text: str) -> None:
    console.print(f"\n{text}", markup=False)


def _make_table(*columns: str, words: int = 0) -> Table:
    """Return a table whose first columns are of words, which are aligned left."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right")
    return table


def _show_fit(console: "Console", fit: "Fit", rows: "list[Compared]") -> None:
    _show_title(console, "fitted parameters")
    table = _make_table("", "value", words=1)
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
    _show_title(console, "measured and predicted steps")
    columns = ("ranks", "hosts", "Mbit/s", "batch", "exchange, MB")
    times = ("measured, s", "predicted, s", "difference")
    table = _make_table("", *columns, *times, words=1)
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
        _show_title(console, f"the largest difference of a check is {max(checks):.1%}")


def _build_speedups(rows: "list[Scaled]") -> Table:
    columns = ("batch", "GPUs", "images/s of one", "images/s")
    compared = ("published", "predicted", "difference")
    table = _make_table("", "", "", "", *columns, *compared, words=4)
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


def _build_mlperf(rows: list[Any]) -> Table:
    table = _make_table("", "GPUs", "batch", "images/s", "predicted", "difference", words=1)
    for number, (row, rate) in enumerate(rows):
        figures = (
            f"{row.images_per_sec:.0f}",
            f"{rate:.0f}",
            f"{rate / row.images_per_sec - 1:+.1%}",
        )
        table.add_row("fitted" if number < 2 else "check", str(row.gpus), str(row.batch), *figures)
    return table


def _build_predictions(weak: "list[Prediction]", strong: "list[Prediction]") -> Table:
    columns = ("batch", "images/s", "speed-up", "bound by")
    table = _make_table(
        "GPUs", *(f"{name} {column}" for name in ("weak:", "strong:") for column in columns)
    )
    for column in (4, 8):
        table.columns[column].justify = "left"
    strong_by_ranks = {prediction.ranks: prediction for prediction in strong}
    for prediction in weak:
        other = strong_by_ranks.get(prediction.ranks)
        cells = ("-",) * len(columns)
        if other is not None:
            cells = _format_cells(other)
        table.add_row(str(prediction.ranks), *_format_cells(prediction), *cells)
    return table


def _format_cells(row: "Prediction") -> tuple[str, ...]:
    return (str(row.batch), f"{row.images_per_sec:.0f}", f"{row.speedup:.2f}", row.bound_by)
