"""`calibration.json` in a checkpoint's folder: what turns its logits into probabilities, and which
probabilities are too small.

It is written after the checkpoint, which never changes, and names the weights by their SHA-256. So
it stays with a checkpoint that is copied, and does not fit another one. `model.safetensors` and
`ema.safetensors` have an entry each.
"""

from pathlib import Path
from typing import Any

from lockstep.models.calibration import UNCALIBRATED, Calibration, TemperatureFit, Threshold
from lockstep.system.errors import CheckpointError
from lockstep.system.files import write_json
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import is_number, is_rate, parsed
from lockstep.weights.checkpoint import read_digest
from lockstep.weights.formats import naming_target

FILE = "calibration.json"
KEY = "calibration"
"""The key of a calibration in the metadata of other files."""


def write_calibration(
    file: Path, fit: TemperatureFit | None, threshold: Threshold | None = None
) -> None:
    """Write the calibration of a checkpoint's file of weights next to it.

    Without `fit` the stored temperature stays. Without `threshold` the stored threshold stays, if
    it belongs to the same temperature. Raises `CheckpointError` if the file cannot be written.
    """
    path = file.parent / FILE
    entries = _read_entries(path)
    digest = read_digest(file)
    entry: Any = entries.get(file.name)
    if not isinstance(entry, dict) or entry.get("sha256") != digest:
        entry = {"sha256": digest, "temperature": 1.0}
    if fit is not None and fit["temperature"] != entry.get("temperature"):
        entry = {"sha256": digest}
    entries[file.name] = entry | dict(fit or {}) | dict(threshold or {})
    with naming_target(path):
        write_json(path, entries)


def read_calibration(file: Path) -> tuple[Calibration, tuple[str, ...]]:
    """Return what was found for a checkpoint's file of weights, and remarks. Raises
    `CheckpointError` if `calibration.json` is damaged."""
    path = file.parent / FILE
    entry = _read_entries(path).get(file.name)
    if entry is None:
        return UNCALIBRATED, ()
    if not isinstance(entry, dict) or entry.get("sha256") != read_digest(file):
        return UNCALIBRATED, (f"{path} is of other weights, and was left out",)
    return parse_calibration(entry, path), ()


def describe_calibration(calibration: Calibration) -> dict[str, Any]:
    """Return a calibration as the metadata of other files have it."""
    return {"temperature": calibration.temperature, "unknown_below": calibration.unknown_below}


def parse_calibration(value: Any, source: Path) -> Calibration:
    """Return the calibration in metadata. Raises `CheckpointError` if it is none."""
    values = value if isinstance(value, dict) else {}
    temperature = values.get("temperature")
    threshold = values.get("unknown_below", 0.0)
    if not is_rate(temperature) or not is_number(threshold) or not 0 <= threshold <= 1:
        raise CheckpointError(
            f"{source}: {KEY} is {value!r:.100}; expected a temperature above 0, and perhaps a"
            " threshold from 0 to 1. Calibrate its run again: lockstep evaluate RUN --data DATA"
            " --calibrate"
        )
    return Calibration(float(values["temperature"]), float(threshold))


def _read_entries(path: Path) -> dict[str, Any]:
    """Return the entries of a `calibration.json` by file; none if there is no such file."""
    try:
        entries = parsed(read_regular(path, TEXT))
        if not isinstance(entries, dict):
            raise ValueError("expected an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; remove it to continue without it"
        ) from None
    return entries
