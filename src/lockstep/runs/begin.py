"""How a run begins or resumes: its engine, its log, and notes for the user."""

import sys
import time
from pathlib import Path
from typing import Any

from lockstep.models.state import State
from lockstep.recipes import Recipe, difference
from lockstep.recipes.published import RECIPES
from lockstep.runs.context import RunContext
from lockstep.runs.environment import (
    describe_environment,
    describe_plug_ins,
    list_changed_plug_ins,
)
from lockstep.runs.evaluate import evaluate, lacks_evaluation
from lockstep.runs.initial_state import load_state
from lockstep.runs.notes import collect_notes, note_determinism_cost
from lockstep.runs.save import write_for_mxnet
from lockstep.runs.trust import list_links, list_names, remember
from lockstep.system.files import write_json
from lockstep.system.ranks import find_restart
from lockstep.weights.run_identity import read_identity


def begin(run: RunContext, state: State, damaged: list[str]) -> None:
    """Give the engine its state, open the log, repeat an interrupted evaluation, and print what the
    linear probe found.

    `damaged` are the reasons why checkpoints were skipped.
    """
    if run.leads:
        (run.out / "report.json").unlink(missing_ok=True)  # this file marks the run as finished
        write_for_mxnet(run, state)  # again, in case the run ended between a checkpoint and this
    load_state(run, state)
    evaluates_again = run.world.any(run.leads and lacks_evaluation(run, state.step))
    _open_log(run, state.step, damaged, evaluates_again)
    if evaluates_again:
        evaluate(run, state.step)
    if run.probe_began is not None:
        _answer_first(run, run.probe_began)


def _open_log(run: RunContext, step: int, damaged: list[str], evaluates_again: bool) -> None:
    """Open the log and record where training starts."""
    environment = _describe(run)
    identity = read_identity(run.out)
    names = list_names(run.execution.fields(), run.sets.name, run.recipe)
    remember(run.out, (*names, *list_links(run.out)))
    if identity is not None and identity.adopted_step == step >= 0:
        run.details.append(f"the run did not have an id: it gets {identity.id}")
    if step == 0:
        run.details += note_determinism_cost(run.recipe, run.execution, run.world)
    if run.leads:
        run.notes += list_changed_plug_ins(run.out, run.recipe)
        about = {name: environment[name] for name in ("recipe", "device", "ranks", "data")}
        run.recorder.open(
            run.out,
            step,
            run.rates,
            evaluates_again=evaluates_again,
            about=run.recipe.fields() | about,
        )
        write_json(run.out / "environment.json", environment)
    run.recorder.log(
        {
            "kind": "start",
            "step": step,
            "run": "" if identity is None else identity.id,
            "total": run.total_steps,
            "steps_per_epoch": run.steps_per_epoch,
            "damaged": damaged,
            "notes": collect_notes(run, step),
            "details": run.details,
            "changed": _find_changed_fields(run.recipe),
            "environment": environment,
            "selection": run.recipe.selection,
            "early_stopping_epochs": run.recipe.early_stopping_epochs,
            "best": run.find_best(),
            "evaluates": run.weights_to_evaluate,
            "probes": run.probe_began is not None,
        }
    )
    restart = find_restart()
    if restart is not None:
        number, reason = restart
        run.recorder.log({"kind": "restart", "step": step, "restart": number, "reason": reason})


def _describe(run: RunContext) -> dict[str, Any]:
    """Return the contents of environment.json."""
    training = run.sets.training
    validation = run.sets.validation
    environment: dict[str, Any] = describe_environment(run.execution.backend) | {
        "recipe": run.recipe.based_on,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "device": run.world.device,
        "ranks": run.world.ranks,
        "execution": run.execution.fields(),
        "data": run.sets.name,
        "classes": len(training.classes),
        "train": training.describe(),
        "val": validation.describe(),
    }
    plug_ins = describe_plug_ins(run.recipe)
    return environment | ({"plug_ins": plug_ins} if plug_ins else {})


def _find_changed_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the fields in which a recipe differs from the published one it is based on; empty if
    it is based on none."""
    if recipe.based_on not in RECIPES:
        return {}
    changed = difference(RECIPES[recipe.based_on](), recipe)
    return {name: own for name, (_, own) in changed.items()}


def _answer_first(run: RunContext, began: float) -> None:
    """Send the listener the accuracy of the linear probe, which this process fitted from `began`
    on, on the validation images if they are evaluated."""
    if not run.recorder.evaluations:
        return
    first = run.recorder.evaluations[0]
    run.recorder.send(
        {
            "kind": "linear_probe",
            "top1_percent": first["top1_percent"],
            "images": first["images"],
            "seconds": time.perf_counter() - began,
        }
    )
