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
from lockstep.benchmark.failures import FAILED, MISSING, OK, OUT_OF_MEMORY, system_kills, why
from lockstep.benchmark.figures import NOTHING, figures
from lockstep.benchmark.fingerprint import gpus
from lockstep.benchmark.report_file import KIND, VERSION, BenchmarkReport, read_benchmark
from lockstep.data.sources import find_sources
from lockstep.inference.quantising import for_speed
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
    settings = plan.fields() | _machine()
    if plan.num_examples is not None and any(cell.data == SYNTHETIC for cell in cells):
        raise UserError(
            "num_examples works only with --data DIR, whose images it limits; synthetic data is one"
            " batch"
        )
    recipes = [
        plan.recipe_of(cell) for cell in cells
    ]  # all errors in them are reported before anything is measured
    for cell, recipe in zip(cells, recipes, strict=True):
        execution = plan.execution_of(cell)
        if cell.what == TRAIN:
            check_batch_norm(recipe, cell.ranks, execution.accumulation_steps)
        if cell.data != SYNTHETIC:
            find_sources(Path(cell.data))
    path = None if out is None else Path(out)
    report = _opened(path, settings) | {"command": command}
    if path is not None:
        try:
            write_json(path, report)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror}; give another -o"
            ) from None
    recorder = Recorder(listener)
    progress = recorder.progress("measuring")
    done = 0
    try:
        for done, (cell, recipe) in enumerate(zip(cells, recipes, strict=True)):
            progress(done, len(cells))
            at = _place(report, cell)
            is_kept = at is not None and report["cells"][at]["status"] in (OK, OUT_OF_MEMORY)
            if not is_kept:
                _enter(report, at, _measured(cell, plan, recipe, recorder), cell)
                if path is not None:
                    write_json(path, report)
            entry = report["cells"][len(report["cells"]) - 1 if at is None else at]
            recorder.tell({"kind": "cell", "cell": entry, "kept": is_kept})
        progress(len(cells), len(cells))
    except (KeyboardInterrupt, Interrupted) as stop:
        kept = (
            f"kept in {path}; the same command resumes"
            if path is not None
            else "not kept: -o was not given"
        )
        code = stop.exit_code if isinstance(stop, Interrupted) else EXIT_INTERRUPTED
        raise Interrupted(f"stopped after {done} of {len(cells)} cells, {kept}", code) from None
    return report


def _machine() -> dict[str, Any]:
    """Return what the cells of one report must share in addition to the plan."""
    found = gpus()
    return {
        "lockstep": version(),
        "processor": processor(),
        "cores": cores(),
        "gpus": [gpu["gpu"] for gpu in found],
        "driver": found[0]["driver"] if found else None,
    }


def _opened(path: Path | None, settings: dict[str, Any]) -> BenchmarkReport:
    """Return the existing report, or a new one without cells."""
    if path is None or not path.exists():
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
    report = read_benchmark(path)
    there = report.get("settings", {})
    other = {name: value for name, value in settings.items() if there.get(name) != value}
    if other:
        lines = [f"  {name}: {there.get(name)} there, {value} now" for name, value in other.items()]
        raise UserError(
            f"{path} holds measurements with other settings:\n"
            + "\n".join(lines)
            + "\nUse another -o."
        )
    return report


def key(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a cell in a report."""
    return tuple(entry[name] for name in Cell.__dataclass_fields__)


def _place(report: BenchmarkReport, cell: Cell) -> int | None:
    own = key(cell.fields())
    return next((i for i, entry in enumerate(report["cells"]) if key(entry) == own), None)


def entries_of(report: BenchmarkReport, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the report's entries of these cells. The report must have all of them."""
    places = {key(entry): entry for entry in report["cells"]}
    return [places[key(cell.fields())] for cell in cells]


def _enter(report: BenchmarkReport, at: int | None, found: dict[str, Any], cell: Cell) -> None:
    """Put a cell into the report, and update the machine's rates: the fastest that any cell
    measured."""
    environment = found.pop("environment", None)
    if environment is not None:
        name = cell.computes
        kept = report["environment"].setdefault(name, environment)
        now = environment.get(name)
        before = kept.get(name)
        if now != before:
            found["remarks"].append(f"measured with {name} {now}, earlier cells with {before}")
    roofline = found["roofline"]
    machine = report["machine"]
    if roofline is not None:
        machine["copy_gb_per_sec"] = _faster(
            machine["copy_gb_per_sec"], roofline["copy_gb_per_sec"]
        )
        products = machine["gemm_gflops"]
        products[cell.dtype] = _faster(products.get(cell.dtype), roofline["gemm_gflops"])
    if at is None:
        report["cells"].append(found)
    else:
        report["cells"][at] = found


def _faster(*rates: float | None) -> float | None:
    return max((rate for rate in rates if rate is not None), default=None)


def _measured(cell: Cell, plan: Plan, recipe: Recipe, recorder: Recorder) -> dict[str, Any]:
    """Measure a cell and return its entry. An entry with figures also has the `environment` of the
    measurement."""
    lengths = {name: getattr(plan, name) for name in ("iterations", "epochs", "warmup_epochs")}
    entry = cell.fields() | {"status": OK, "reason": None, "remarks": []} | lengths | NOTHING
    if cell.runtime == NATIVE:
        python = backends.find_interpreter(cell.backend)
        install = backends.FRAMEWORKS[cell.backend].install
    else:
        row = find_row(cell.runtime)
        python = None if row.missing() else Path(sys.executable)
        install = row.install
    if python is None:
        return entry | {"status": MISSING, "reason": install}
    with tempfile.TemporaryDirectory(
        prefix="lockstep-benchmark-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        try:
            exported = (
                _in_int8(recipe.replace(global_batch_images=1), cell.runtime)
                if cell.dtype == INT8
                else None
            )
        except LockstepError as error:
            return entry | {"status": FAILED, "reason": str(error)}
        save_task(folder, cell, plan, recipe, plan.execution_of(cell), exported)
        kills = system_kills()
        command: list[str | Path] = [python, "-P", "-m", "lockstep", "benchmark", "cell", folder]
        try:
            ended = carry_out(command, folder, recorder.progress("iterations"))
        except OSError as error:
            return entry | {"status": FAILED, "reason": f"{python} cannot be run: {error.strerror}"}
        ranks = _left(folder, "rank")
        if len(ranks) < cell.ranks or ended.code:
            status, reason = why(
                ended, _left(folder, "failure"), killed=system_kills() != kills, ranks=cell.ranks
            )
            return entry | {"status": status, "reason": reason}
    remarks = list(dict.fromkeys(remark for rank in ranks for remark in rank["remarks"]))
    found = entry | figures(cell, plan, recipe, ranks)
    return found | {"remarks": remarks, "environment": ranks[0]["environment"]}


@lru_cache(maxsize=2)
def _in_int8(recipe: Recipe, runtime: str) -> bytes:
    """Return an ONNX model of the recipe's initial weights in int8. Raises `BackendError` without
    ONNX Runtime."""
    images = np.random.default_rng(0).integers(
        0, 256, (2, recipe.eval_crop, recipe.eval_crop, 3), dtype=np.uint8
    )
    weights = Weights(recipe, initial_state(recipe), (), Path("initial weights"), LOCKSTEP)
    return for_speed(
        weights, images, symmetric=runtime in TARGETS and TARGETS[runtime].takes_symmetric_int8
    )


def _left(folder: Path, what: str) -> list[dict[str, Any]]:
    """Return what the ranks wrote into the folder, by rank."""
    files = sorted(folder.glob(f"{what}-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]
