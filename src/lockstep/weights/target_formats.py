"""The formats that weights are converted to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import PARTS, SQUEEZE
from lockstep.recipes import Recipe
from lockstep.system.registry import Row
from lockstep.weights import checkpoint
from lockstep.weights.formats.common import Written, describe_omitted_parts
from lockstep.weights.known_preprocessing import KNOWN
from lockstep.weights.opened_weights import Weights
from lockstep.weights.preprocessing import FIELDS


@dataclass(frozen=True)
class Target:
    """A format to convert to."""

    write: Callable[[Path, Weights, bool, Path], Written]
    """Writes weights for a path into a folder, from which they are moved there. Its arguments are
    the path, the weights, whether they get a certificate, for formats with metadata, and the
    folder."""
    read_arrays: Callable[[Path], Any]
    """Reads a file as it is stored, for the comparison with its framework's own reader: dicts and
    lists of arrays and plain values."""
    parts: tuple[str, ...] = ()
    """Those of `PARTS` that it can hold."""
    has_classes: bool = False
    """Whether it holds names of classes."""
    has_metadata: bool = False
    """Whether it has a place to say that there is no certificate."""
    missing_fields: tuple[str, ...] = ("mean", "std")
    """The preprocessing that it cannot hold, so that its users have to set it."""
    assumed: str = ""
    """The preprocessing, in `KNOWN`, that whoever reads it assumes; "" if the format or its writer
    says it."""

    prepares: str = ""
    """The program that prepares images for it in its own way, which the reader of the format knows;
    "" if users of the format prepare them."""
    prepared_fields: tuple[str, ...] = FIELDS
    """The fields of the preprocessing that this program sets."""

    def list_unlike_assumed(self, recipe: Recipe) -> list[str]:
        """Return what evaluation needs other than whoever reads this format assumes, as texts."""
        if not self.assumed:
            return []
        fields = recipe.fields()
        differences = []
        for name in FIELDS:
            value = KNOWN[self.assumed][name]
            plain = list(value) if isinstance(value, tuple) else value
            if fields[name] != plain and name != "antialias":  # which is that of training
                differences.append(f"{name} {fields[name]}, not {plain}")
        return differences


def _call(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module of formats, which is imported when the function is called."""
    row = Row(module, f"lockstep.weights.formats.{module}")
    return lambda *values, **settings: getattr(row.load(), name)(*values, **settings)


def _write_safetensors(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
    _call("lockstep_files", "write")(target, weights, folder, certified=certified)
    return Written((target,), (target,), describe_omitted_parts(weights.state))


def _write_folder(module: str) -> Callable[[Path, Weights, bool, Path], Written]:
    """Return `Target.write` of a hub's folder with classes and metadata, which `module` writes."""

    def write_weights(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
        written = _call(module, "write")(
            target, weights.recipe, weights.state, weights.classes, folder, certified=certified
        )
        return _add_remark_on_averages(written, weights)

    return write_weights


def _write_nvidia_pytorch(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
    return _call("torch_writer", "write_nvidia_pytorch")(
        target, weights.recipe, weights.state, folder, epochs=weights.epochs or 0
    )


def _write_by(module: str, name: str) -> Callable[[Path, Weights, bool, Path], Written]:
    """Return `Target.write` of a format without a moving average, classes and metadata, which a
    function of a module writes."""

    def write_weights(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
        written = _call(module, name)(target, weights.recipe, weights.state, folder)
        return _add_remark_on_averages(written, weights)

    return write_weights


def _add_remark_on_averages(written: Written, weights: Weights) -> Written:
    """Add a remark on moving averages that were left out, unless there is one."""
    if not weights.state.ema or any("moving averages" in remark for remark in written.remarks):
        return written
    remark = "the moving averages were left out; --ema converts them instead of the weights"
    return replace(written, remarks=(*written.remarks, remark))


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    return checkpoint.read_weights(path)[0]


def _read_bundle(index: Path) -> dict[str, np.ndarray]:
    bundle = _call("tensor_bundle", "Bundle")(index.with_suffix(""))
    return {name: bundle.read(name) for name in bundle.entries}


def _read_keras(path: Path) -> dict[str, np.ndarray]:
    with _call("keras_variables", "open_variables")(path) as variables:
        return {name: variables.read(place) for name, place in variables.list_names().items()}


TARGETS: dict[str, Target] = {
    "safetensors": Target(
        _write_safetensors,
        _read_safetensors,
        parts=PARTS,
        has_classes=True,
        has_metadata=True,
        missing_fields=(),
    ),
    "torchvision": Target(
        _write_by("torch_writer", "write_torchvision"),
        _call("torch_file", "load"),
        parts=PARTS,
        assumed="torchvision-v1",
    ),
    "timm": Target(
        _write_folder("timm_folder"),
        _read_safetensors,
        parts=PARTS,
        has_classes=True,
        has_metadata=True,
        missing_fields=(),
        prepares="timm's loader",
    ),
    "transformers": Target(
        _write_folder("transformers_folder"),
        _read_safetensors,
        has_classes=True,
        has_metadata=True,
        missing_fields=(),
        prepares="transformers' image processor",
    ),
    "keras": Target(
        _write_by("keras_file", "write_keras"),
        _read_keras,
        missing_fields=("mean",),
        prepares="keras.applications.resnet.preprocess_input, after Lockstep's resize",
        prepared_fields=("mean", "std"),
    ),
    "nvidia-pytorch": Target(
        _write_nvidia_pytorch,
        _call("torch_file", "load"),
        parts=(SQUEEZE,),
        assumed="nvidia-pytorch",
    ),
    "nvidia-tensorflow": Target(
        _write_by("nvidia_tensorflow", "write"),
        _read_bundle,
        parts=(SQUEEZE,),
        assumed="nvidia-tensorflow",
    ),
    "nvidia-paddle": Target(
        _write_by("nvidia_paddle", "write"),
        lambda path: _call("paddle_pickle", "load")(path).arrays,
        assumed="nvidia-paddle",
    ),
    "flax": Target(
        _write_by("flax_file", "write_flax"), _call("flax_file", "load"), assumed="flax"
    ),
    "torchax": Target(
        _write_by("flax_file", "write_torchax"),
        _call("flax_file", "load"),
        parts=PARTS,
        assumed="torchvision-v1",
    ),
    "nvidia-mxnet": Target(
        _write_by("nvidia_mxnet", "write"), _call("mxnet_params", "load"), assumed="nvidia-mxnet"
    ),
}
