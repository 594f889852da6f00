"""The fastest runtime that keeps the bound: measured once for a machine and weights, and remembered
in the user's cache."""

import hashlib
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from lockstep.backends import FRAMEWORKS
from lockstep.inference.runtimes import (
    NATIVE,
    RUNTIMES,
    choose_device,
    explain_refusal,
    list_installed,
    open_runtime,
)
from lockstep.recipes import Execution
from lockstep.runs.recorder import Recorder
from lockstep.system.errors import BackendError, LockstepError
from lockstep.system.files import user_cache, write_json
from lockstep.system.machine import cores, processor
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.schema import Rate, matches
from lockstep.system.strict_json import parsed, to_json
from lockstep.system.version import version
from lockstep.weights import Weights, certificate

BOUNDS = {"fp32": certificate.BOUND, "bf16": 0.1, "fp16": 1.2e-2}
"""Logits may differ from the native runtime's by this share of the largest: twice what `lockstep
verify` allows to each."""
QUANTISED_BOUND = 1e-2
"""The same for weights in int8, where rounding decides which integer a value becomes."""
WARMUP = 1
TIMED = 4
"""Batches of a runtime that are not timed, and those that are."""
_KIND = "lockstep-runtimes"
_MOST = 200
"""The newest choices that are kept."""


def choose_fastest(weights: Weights, execution: Execution, recorder: Recorder) -> str:
    """Return the name of the fastest installed runtime whose logits keep the bound. The native
    runtime always keeps it.

    A runtime that loads another framework than the execution's is not considered, since two of them
    cannot share a process.
    """
    names = _list_candidates(weights, execution)
    if len(names) == 1:
        return names[0]
    key = _compute_key(weights, execution, names)
    file = user_cache() / "runtimes.json"
    known = _read(file)
    if key in known and known[key]["runtime"] in names:
        return str(known[key]["runtime"])
    recorder.note(
        f"measuring the runtimes {', '.join(names)} once for this machine and these weights;"
        " this takes seconds"
    )
    rates, left_out = _measure_all(names, weights, execution)
    for name, why in left_out.items():
        recorder.note(f"the runtime {name} is not used: {why}")
    chosen = max(rates, key=lambda name: rates[name])
    ordered = sorted(rates.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {rate:.3g}" for name, rate in ordered)
    recorder.note(f"using the runtime {chosen} (images/s: {text}); remembered in {file}")
    known.pop(key, None)
    newest = [*known.items()][1 - _MOST :]
    kept = [*newest, (key, {"runtime": chosen, "images_per_sec": rates})]
    with suppress(OSError):  # measured again the next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"kind": _KIND, "choices": dict(kept)})
    return chosen


def _list_candidates(weights: Weights, execution: Execution) -> list[str]:
    installed = list_installed(execution.backend)
    if NATIVE not in installed:
        raise BackendError(
            f"{NATIVE}, with which the other runtimes are compared, is not installed:"
            f" {FRAMEWORKS[execution.backend].install}; or name a runtime:"
            f" {', '.join(installed or RUNTIMES)}"
        )
    others = [name for name in installed if name != NATIVE]
    return [NATIVE, *(name for name in others if _can_compute(name, weights, execution))]


def _can_compute(name: str, weights: Weights, execution: Execution) -> bool:
    row = RUNTIMES[name]
    precision = weights.recipe.precision
    if (
        row.framework not in ("", execution.backend)
        or (weights.scales and not row.quantises)
        or precision not in BOUNDS
    ):
        return False
    try:
        return not explain_refusal(name, precision, choose_device(name, execution))
    except LockstepError:  # it does not have the device
        return False


def _compute_key(weights: Weights, execution: Execution, names: list[str]) -> str:
    """Return a digest of what the choice depends on: machine, versions, model, weights and
    settings."""
    digest = hashlib.blake2b(digest_size=16)
    versions = {name: RUNTIMES[name].version() for name in names if name != NATIVE}
    recipe = weights.recipe.fields()
    facts = {
        "lockstep": version(),
        "processor": processor(),
        "cores": cores(),
        "native": FRAMEWORKS[execution.backend].version(),
        "versions": versions,
        "recipe": {
            name: recipe[name] for name in ("model", "precision", "eval_crop", "quantisation")
        },
        "execution": {
            name: execution.fields()[name] for name in ("backend", "device", "compile", "layout")
        },
    }
    digest.update(to_json(facts).encode())
    for name, value in weights.tensors.items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


def _measure_all(
    names: list[str], weights: Weights, execution: Execution
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the images per second of the runtimes that keep the bound, and why the others are left
    out."""
    images = certificate.draw_images(weights.recipe.eval_crop)
    bound = QUANTISED_BOUND if weights.scales else BOUNDS[weights.recipe.precision]
    rates: dict[str, float] = {}
    left_out: dict[str, str] = {}
    expected = np.zeros(0)
    for name in names:
        try:
            logits, rate = _measure_one(name, weights, execution, images)
        except Exception as error:  # such as of a library that does not load
            if name == NATIVE:
                raise
            left_out[name] = f"{type(error).__name__}: {error}"
            continue
        if name == NATIVE:
            expected = logits
            rates[name] = rate
            continue
        difference = float(np.abs(logits - expected).max() / (np.abs(expected).max() or 1.0))
        if difference <= bound:  # false for NaN
            rates[name] = rate
        else:
            left_out[name] = (
                f"its logits differ by {difference:.1e} of the largest, more than the bound of"
                f" {bound:.0e}"
            )
    return rates, left_out


def _measure_one(
    name: str, weights: Weights, execution: Execution, images: np.ndarray
) -> tuple[np.ndarray, float]:
    """Return a runtime's logits of some images in float64, and its images per second."""
    with open_runtime(name, weights, execution, most_images=len(images)) as runtime:
        for _ in range(WARMUP):
            logits = runtime.predict(images)
        times = []
        for _ in range(TIMED):
            began = time.perf_counter()
            runtime.predict(images)
            times.append(time.perf_counter() - began)
    return logits.astype(np.float64), len(images) / statistics.median(times)


class _Choice(TypedDict):
    """The runtime that was the fastest, and the speeds of all."""

    runtime: str
    images_per_sec: dict[str, Rate]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the choices in a file; none if it is missing or damaged."""
    try:
        content = parsed(read_regular(file, TEXT))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        return {}
    choices = content.get("choices")
    if not isinstance(choices, dict):
        return {}
    return {key: choice for key, choice in choices.items() if matches(choice, _Choice)}
