"""A model as Keras computes it, rebuilt from the layers that the reader accounted for: `write`.

`lockstep.backends.tensorflow.original` computes it. Of configurations only plain settings are kept:
Keras imports the modules that others name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.files import write_json
from lockstep.weights.formats.keras_calls import Call
from lockstep.weights.formats.keras_layers import IN_TRAINING, Translation

_SETTINGS = {
    *("activation", "axis", "center", "dilation_rate", "epsilon", "filters", "groups", "invert"),
    *("keepdims", "kernel_size", "mean", "offset", "padding", "pool_size", "scale", "strides"),
    *("target_shape", "units", "use_bias", "variance"),
}
_IDENTITIES = ("identity", "cast")


def write(model: Translation, output: str, folder: Path) -> None:
    """Write the layers of a model, and their variables by path. Raises `ValueError` if a layer has
    a setting that is not plain."""
    arrays = model.arrays
    rows: list[dict[str, Any]] = [{"class_name": "InputLayer", "name": model.graph.inputs[0]}]
    sources = {call.output: call.inputs[0] for call in model.calls if _is_same(call)}
    for call in model.calls:
        if call.output in sources:
            continue
        paths = model.variables_of.get(call.output, [])
        config = _keep_settings(call)
        if call.kind == "normalization" and paths:
            config |= {"mean": arrays[paths[0]].tolist(), "variance": arrays[paths[1]].tolist()}
            paths = []
        rows.append(
            {
                "class_name": call.label,
                "name": call.output,
                "config": config,
                "inputs": [_find_source(sources, name) for name in call.inputs],
                "variables": paths,
            }
        )
    rows.append({"class_name": "Output", "name": _find_source(sources, output)})
    write_json(folder / "layers.json", rows)
    np.savez(folder / "layers.npz", **arrays)  # type: ignore[arg-type]


def _is_same(call: Call) -> bool:
    """Return whether a layer returns its input in inference."""
    return call.kind in _IDENTITIES or IN_TRAINING.fullmatch(call.kind) is not None


def _find_source(sources: Mapping[str, str], value: str) -> str:
    """Return the value that a value is."""
    while value in sources:
        value = sources[value]
    return value


def write_application(about: dict[str, Any], arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Write the arrays of a model of `keras.applications` by layer and variable; `about` has its
    "model" and its number of "classes"."""
    write_json(folder / "application.json", about)
    np.savez(folder / "layers.npz", **arrays)  # type: ignore[arg-type]


def _keep_settings(call: Call) -> dict[str, Any]:
    """Return the settings of a layer that say what it computes."""
    settings = {name: call.config[name] for name in _SETTINGS & call.config.keys()}
    for name, value in settings.items():
        if not isinstance(value, bool | int | float | str | list | None):
            raise ValueError(f"{name} of {call.label} {call.name!r} is not rebuilt")
    return settings
