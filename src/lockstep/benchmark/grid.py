"""Measure a grid of cells, each in new processes, and keep a report of the results so far."""

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import backends
from lockstep.benchmark.cell_process import save_task
from lockstep.benchmark.cells import INT8, SYNTHETIC, TRAIN, Cell, Plan
from lockstep.benchmark.failures import (
    FAILED,
    MISSING,
    OK,
    OUT_OF_MEMORY,
    count_kills,
    explain_failure,
)
from lockstep.benchmark.figures import NOTHING, compute_figures
from lockstep.benchmark.fingerprint import query_gpus
from lockstep.benchmark.report_file import KIND, VERSION, BenchmarkReport, read_benchmark
from lockstep.data.sources import find_sources
from lockstep.inference.int8 import quantise_for_speed
from lockstep.inference.runtimes import NATIVE, find_row
from lockstep.inference.targets import TARGETS
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.recipes.order import check_batch_norm
from lockstep.runs.events import Listener
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import EXIT_INTERRUPTED, Interrupted, LockstepError, UserError
from lockstep.system.files import write_json
from lockstep.system.machine import cores, processor
from lockstep.system.version import version
from lockstep.system.workers import carry_out
from lockstep.weights import LOCKSTEP, Weights


def benchmark(
    cells: Sequence[Cell],
    plan: Plan | None = None,
    *,
    out: str | Path | None = None,
    command: str = "",
    listener: Listener | None = None,
) -> BenchmarkReport:
    """Measure cells and return the report. `out` holds the report from the start and is complete at
    every moment.

    If started again with the same `out`, cells that have figures, or ran out of memory, are not
    measured again; cells that failed are. The report contains `command`. A cell that cannot be
    measured has a `status` other than "ok" and a reason.

    Raises `UserError` for a wrong cell or plan, or an `out` that holds something else, and
    `Interrupted` after Ctrl-C, or when the handler of a signal raises it.
    """
    plan = plan or Plan()
    settings = plan.fields() | _describe_machine()
    recipes = _check_cells(cells, plan)
    path = None if out is None else Path(out)
    report = _open_report(path, settings) | {"command": command}
    if path is not None:
        try:
            write_json(path, report)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; use another -o") from None
    recorder = Recorder(listener)
    progress = recorder.progress("measuring")
    done = 0
    try:
        for done, (cell, recipe) in enumerate(zip(cells, recipes, strict=True)):
            progress(done, len(cells))
            number = _find_entry(report, cell)
            entry = {} if number is None else report["cells"][number]
            is_kept = entry.get("status") in (OK, OUT_OF_MEMORY)
            if not is_kept:
                entry = _measure_cell(cell, plan, recipe, recorder)
                _enter(report, number, entry, cell)
                if path is not None:
                    write_json(path, report)
            recorder.send({"kind": "cell", "cell": entry, "kept": is_kept})
        progress(len(cells), len(cells))
    except (KeyboardInterrupt, Interrupted) as stop:
        kept = "not kept: -o was not given"
        if path is not None:
            kept = f"kept in {path}; the same command resumes"
        code = stop.exit_code if isinstance(stop, Interrupted) else EXIT_INTERRUPTED
        raise Interrupted(f"stopped after {done} of {len(cells)} cells, {kept}", code) from None
    return report


def _check_cells(cells: Sequence[Cell], plan: Plan) -> list[Recipe]:
    """Return the recipes of cells, so that all errors in them are reported before anything is
    measured. Raises `UserError`."""
    recipes = []
    for cell in cells:
        if plan.num_examples is not None and cell.data == SYNTHETIC:
            raise UserError(
                "num_examples works only with --data DIR, whose images it limits; synthetic data is"
                " one batch"
            )
        recipes.append(plan.make_recipe(cell))
        execution = plan.make_execution(cell)
        if cell.what == TRAIN:
            check_batch_norm(recipes[-1], cell.ranks, execution.accumulation_steps)
        if cell.data != SYNTHETIC:
            find_sources(Path(cell.data))
    return recipes


def _describe_machine() -> dict[str, Any]:
    """Return what the cells of one report must share in addition to the plan."""
    devices = query_gpus()
    return {
        "lockstep": version(),
        "processor": processor(),
        "cores": cores(),
        "gpus": [device["gpu"] for device in devices],
        "driver": devices[0]["driver"] if devices else None,
    }


def _open_report(path: Path | None, settings: dict[str, Any]) -> BenchmarkReport:
    """Return the existing report, or a new one without cells."""
    if path is not None and path.exists():
        report = read_benchmark(path)
        _refuse_other_settings(path, report.get("settings", {}), settings)
        return report
    if path is not None and not path.parent.is_dir():
        raise UserError(
            f"{path.parent} is not a folder, so no report can be written there; create it first"
        )
    machine: dict[str, Any] = {"gemm_gflops": {}, "copy_gb_per_sec": None}
    return {
        "kind": KIND,
        "version": VERSION,
        "command": "",
        "settings": settings,
        "environment": {},
        "machine": machine,
        "cells": [],
    }


def _refuse_other_settings(path: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    lines = []
    for name, value in now.items():
        if there.get(name) != value:
            lines.append(f"  {name}: {there.get(name)} there, {value} now")
    if lines:
        differences = "\n".join(lines)
        raise UserError(
            f"{path} holds measurements with other settings:\n{differences}\nUse another -o."
        )


def identify(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a cell in a report."""
    return tuple(entry[name] for name in Cell.__dataclass_fields__)


def _find_entry(report: BenchmarkReport, cell: Cell) -> int | None:
    """Return the position of a cell's entry in the report."""
    for number, entry in enumerate(report["cells"]):
        if identify(entry) == identify(cell.fields()):
            return number
    return None


def find_entries(report: BenchmarkReport, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the report's entries of these cells. The report must have all of them."""
    entries = {identify(entry): entry for entry in report["cells"]}
    return [entries[identify(cell.fields())] for cell in cells]


def _enter(report: BenchmarkReport, number: int | None, entry: dict[str, Any], cell: Cell) -> None:
    """Put a cell's entry into the report, and update the machine's rates: the fastest that any cell
    measured."""
    environment = entry.pop("environment", None)
    if environment is not None:
        name = cell.computes
        kept = report["environment"].setdefault(name, environment)
        now = environment.get(name)
        before = kept.get(name)
        if now != before:
            entry["remarks"].append(f"measured with {name} {now}, earlier cells with {before}")
    roofline = entry["roofline"]
    machine = report["machine"]
    if roofline is not None:
        copy = (machine["copy_gb_per_sec"], roofline["copy_gb_per_sec"])
        machine["copy_gb_per_sec"] = _choose_faster(*copy)
        products = machine["gemm_gflops"]
        products[cell.dtype] = _choose_faster(products.get(cell.dtype), roofline["gemm_gflops"])
    if number is None:
        report["cells"].append(entry)
    else:
        report["cells"][number] = entry


def _choose_faster(*rates: float | None) -> float | None:
    return max((rate for rate in rates if rate is not None), default=None)


def _measure_cell(cell: Cell, plan: Plan, recipe: Recipe, recorder: Recorder) -> dict[str, Any]:
    """Measure a cell and return its entry. An entry with figures also has the `environment` of the
    measurement."""
    lengths = {name: getattr(plan, name) for name in ("iterations", "epochs", "warmup_epochs")}
    entry = cell.fields() | {"status": OK, "reason": None, "remarks": []} | lengths | NOTHING
    if cell.runtime == NATIVE:
        python = backends.find_interpreter(cell.backend)
        install = backends.FRAMEWORKS[cell.backend].install
    else:
        row = find_row(cell.runtime)
        python = None if row.is_missing() else Path(sys.executable)
        install = row.install
    if python is None:
        return entry | {"status": MISSING, "reason": install}
    with tempfile.TemporaryDirectory(
        prefix="lockstep-benchmark-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        try:
            exported = None
            if cell.dtype == INT8:
                exported = _export_int8(recipe.replace(global_batch_images=1), cell.runtime)
        except LockstepError as error:
            return entry | {"status": FAILED, "reason": str(error)}
        save_task(folder, cell, plan, recipe, plan.make_execution(cell), exported)
        kills = count_kills()
        command: list[str | Path] = [python, "-P", "-m", "lockstep", "benchmark", "cell", folder]
        try:
            ended = carry_out(command, folder, recorder.progress("iterations"))
        except OSError as error:
            return entry | {"status": FAILED, "reason": f"cannot run {python}: {error.strerror}"}
        ranks = _read_results(folder, "rank")
        if len(ranks) < cell.ranks or ended.code:
            failures = _read_results(folder, "failure")
            killed = count_kills() != kills
            status, reason = explain_failure(ended, failures, killed=killed, ranks=cell.ranks)
            return entry | {"status": status, "reason": reason}
    remarks = list(dict.fromkeys(remark for rank in ranks for remark in rank["remarks"]))
    entry |= compute_figures(cell, plan, recipe, ranks)
    return entry | {"remarks": remarks, "environment": ranks[0]["environment"]}


@lru_cache(maxsize=2)
def _export_int8(recipe: Recipe, runtime: str) -> bytes:
    """Return an ONNX model of the recipe's initial weights in int8. Raises `BackendError` without
    ONNX Runtime."""
    images = np.random.default_rng(0).integers(
        0, 256, (2, recipe.eval_crop, recipe.eval_crop, 3), dtype=np.uint8
    )
    weights = Weights(recipe, initial_state(recipe), (), Path("initial weights"), LOCKSTEP)
    symmetric = runtime in TARGETS and TARGETS[runtime].takes_symmetric_int8
    return quantise_for_speed(weights, images, symmetric=symmetric)


def _read_results(folder: Path, what: str) -> list[dict[str, Any]]:
    """Return what the ranks wrote into the folder, by rank."""
    files = sorted(folder.glob(f"{what}-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]
