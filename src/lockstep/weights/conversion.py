"""Convert weights between all formats that can be read and written."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.deprecation import accept_old_names
from lockstep.system.errors import CheckpointError, nearest
from lockstep.system.files import give_names, staging, write_json
from lockstep.weights import checkpoint
from lockstep.weights.certificate import Certificate, Reader, certify
from lockstep.weights.class_names import Classes
from lockstep.weights.formats import (
    keras_file,
    lockstep_files,
    mxnet_params,
    nvidia_mxnet,
    nvidia_paddle,
    nvidia_tensorflow,
    paddle_pickle,
    refuse_existing,
    tensor_bundle,
    timm_folder,
    torch_file,
    torch_writing,
)
from lockstep.weights.formats.common import Written, describe_omitted_parts
from lockstep.weights.known_preprocessing import KNOWN
from lockstep.weights.opened_weights import Weights
from lockstep.weights.opening import open_weights
from lockstep.weights.preprocessing import CERTIFICATE, FIELDS, Preprocessing


@accept_old_names(which="checkpoint")
def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str = "safetensors",
    checkpoint: str = "newest",
    ema: bool = False,
    classes: Classes | None = None,
    model: str | None = None,
    certificate: bool = True,
    preprocessing: Preprocessing | None = None,
) -> dict[str, Any]:
    """Write weights in another format; return what was written, with remarks and the certificate.

    `source` is whatever `evaluate` accepts: a run, a checkpoint, or another program's weights
    (docs/weights.md). `to` is one of these; `target` is a new file, folder or prefix:

    - "safetensors": a single file with torchvision's names, the recipe and the names of the
      classes.
    - "torchvision": a `state_dict` in a file that `torch.load` reads, for `torchvision.models`.
    - "timm": a folder with `config.json` and `model.safetensors`, for timm and the hub.
    - "keras": a file of weights for `keras.applications`.
    - "nvidia-pytorch", "nvidia-tensorflow", "nvidia-paddle", "nvidia-mxnet": a checkpoint for
      NVIDIA's code. For MXNet, `target` can also be `<prefix>-0090.params`. Velocities, epoch and
      step are written as far as source and format have them.

    `classes` replaces the names of the classes: names, class 0 first, or a file that lists them.
    `model` names the model of a source that fits several, such as resnet50 and resnet50-v1.
    `preprocessing` is how images are prepared: fields of a recipe such as `{"image_size": 48}`, or
    a recipe. It is written to formats that hold it, and to the certificate next to others, where
    `open_weights` finds it.

    With `certificate`, the target is read back, and source and target compute the same images, each
    in its own framework if it is installed. The target's framework also reads the target with its
    own reader. `TARGET.certificate.json` has the result. If the logits differ by more than the
    bound, or the framework reads other values, nothing is written.

    Nothing is overwritten. All files are written to the hidden folder `.TARGET.unfinished` first,
    and the certificate gets its name before them. A remark names whatever cannot be carried over.
    Raises `CheckpointError`, and `DataError` if `classes` does not fit the weights.

    >>> import lockstep
    >>> result = lockstep.convert("run", "weights.safetensors")
    >>> result["written"], result["logits"], result["certificate"]["largest_difference"]
    (['weights.safetensors', 'weights.safetensors.certificate.json'], 10, 0.0)
    """
    target = Path(target)
    if not target.name or target.name == "..":
        raise CheckpointError(
            f"{target} is no name for a new file; expected a name such as weights.safetensors"
        )
    if to not in TARGETS:
        raise CheckpointError(f"there is no format {to!r} to convert to. {nearest(to, TARGETS)}")
    if classes is not None and not TARGETS[to].has_classes:
        named = " or ".join(name for name, each in TARGETS.items() if each.has_classes)
        raise CheckpointError(
            f"{to} holds no names of classes; leave them out, or convert to {named}"
        )
    chosen: dict[str, Any] = {
        "checkpoint": checkpoint,
        "ema": ema,
        "model": model,
        "preprocessing": preprocessing,
    }
    weights = open_weights(source, momentum=True, **chosen).with_classes(classes)
    is_certified = certificate and (to == "safetensors" or isinstance(weights.recipe.model, str))
    remarks: list[str] = []
    found: Certificate | None = None
    try:
        with staging(target) as folder:
            refuse_existing(_certificate_of(target))
            written = TARGETS[to].write(target, weights, certificate, folder)
            remarks += [
                *written.remarks,
                *_unlike_assumed(TARGETS[to], to, weights.recipe, certified=is_certified),
            ]
            if weights.scales and to != "safetensors":
                remarks.append(
                    f"{to} holds no scales of {weights.recipe.quantisation}: its readers compute in"
                    " float"
                )
            if is_certified:
                found = _certified(
                    weights, target, written, folder, [*weights.remarks, *remarks], TARGETS[to]
                )
            _give_names(folder, target, written)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from None
    if not certificate and not TARGETS[to].has_metadata:
        remarks.append("there is no certificate, and the format has no place to say so")
    elif not is_certified and certificate:
        remarks.append(
            f"there is no certificate: {to} cannot be read back for a model that has no name"
        )
    return {
        "source": str(weights.source),
        "origin": weights.origin,
        "written": [
            str(path) for path in (*written.files, *([_certificate_of(target)] if found else ()))
        ],
        "model": weights.recipe.fields()["model"],
        "logits": weights.recipe.logits,
        "step": weights.state.step,
        "remarks": [*weights.remarks, *remarks],
        "certificate": found,
    }


def _certificate_of(target: Path) -> Path:
    return target.with_name(f"{target.name}{CERTIFICATE}")


def _certified(
    weights: Weights,
    target: Path,
    written: Written,
    folder: Path,
    remarks: Sequence[str],
    format: "Target",
) -> Certificate:
    """Return the certificate of what was written into a folder, and write it there. Raises
    `CheckpointError` without one."""
    files, arrays = (
        [folder / path.relative_to(target.parent) for path in paths]
        for paths in (written.files, written.arrays)
    )
    staged = replace(written, files=tuple(files), arrays=tuple(arrays))
    found_there = open_weights(staged.arrays[0])
    changes = [*remarks, *_dropped(weights, remarks), *written.added]
    found = certify(weights, found_there, staged, format.read_arrays, changes, format.unsaid)
    if not found["holds"]:
        raise CheckpointError(
            f"{target} would not compute as {weights.source} does: logits differ by"
            f" {found['largest_difference']:.2g} of the largest; expected at most"
            f" {found['bound']:g}.{_why(weights.recipe, found_there.recipe)} Nothing is written;"
            " --no-certificate writes it anyway"
        )
    write_json(folder / _certificate_of(target).name, found)
    return found


def _dropped(weights: Weights, remarks: Sequence[str]) -> Iterator[str]:
    """Yield what names the arrays of the source that are not used, apart from those that a remark
    names."""
    names = [
        each.name
        for each in weights.stored
        if not each.tensors and not any(each.name in remark for remark in remarks)
    ]
    if names:
        kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
        yield (
            f"{len(names)} arrays were left out ({kinds:.200}), since no tensor of the model is"
            " made of them"
        )


def _give_names(folder: Path, target: Path, written: Written) -> None:
    """Let what was written into a folder appear: the certificate first, last the file that makes
    the others readable."""
    readable = written.arrays[0]
    paths = [*(path for path in written.files if path != readable), readable]
    names = [
        path.relative_to(target.parent).parts[0] for path in paths
    ]  # of a file or, around all of them, a new folder
    certificate = _certificate_of(target).name
    give_names(
        folder, [*([certificate] if (folder / certificate).exists() else []), *dict.fromkeys(names)]
    )


def _why(source: Recipe, target: Recipe) -> str:
    """Return, as a sentence, in what the network of the target's format is another than that of the
    source."""
    ours = source.fields()
    theirs = target.fields()
    unlike = [
        f"{name} {theirs[name]}, not {ours[name]}"
        for name in ("model", "padding", "bn_epsilon")
        if ours[name] != theirs[name]
    ]
    return f" Programs that read this format compute with {', '.join(unlike)}." if unlike else ""


def _unlike_assumed(
    target: "Target", name: str, recipe: Recipe, *, certified: bool
) -> tuple[str, ...]:
    """Return a remark if evaluation needs another preprocessing than whoever reads the target's
    format assumes."""
    assumed = KNOWN.get(target.assumed, {})
    needed = {
        field: recipe.fields()[field]
        for field in FIELDS
        if field in assumed and field != "antialias"  # evaluation does not use it
    }
    unlike = {
        field: value for field, value in needed.items() if value != _plain_value(assumed[field])
    }
    described = ", ".join(
        f"{field} {value}, not {_plain_value(assumed[field])}" for field, value in unlike.items()
    )
    if not unlike:
        return ()
    how = (
        "Lockstep reads it from the certificate"
        if certified
        else "evaluate them with --set FIELD=VALUE"
    )
    return (f"{name} does not say how images are prepared; these weights need {described}; {how}",)


def _plain_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _to_safetensors(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
    lockstep_files.write(target, weights, folder, certified=certified)
    return Written((target,), (target,), describe_omitted_parts(weights.state))


def _to_timm(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
    written = timm_folder.write(
        target, weights.recipe, weights.state, weights.classes, folder, certified=certified
    )
    return _saying_averages(written, weights)


def _to_nvidia_pytorch(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
    return torch_writing.write_nvidia_pytorch(
        target, weights.recipe, weights.state, folder, epochs=weights.epochs or 0
    )


def _plain(
    write: Callable[[Path, Recipe, State, Path], Written],
) -> Callable[[Path, Weights, bool, Path], Written]:
    """Return a function that writes a checkpoint without a moving average and without names of
    classes."""

    def written(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
        return _saying_averages(write(target, weights.recipe, weights.state, folder), weights)

    return written


def _saying_averages(written: Written, weights: Weights) -> Written:
    """Add a remark on moving averages that were left out, unless there is one."""
    if not weights.state.ema or any("moving averages" in remark for remark in written.remarks):
        return written
    remark = "the moving averages were left out; --ema converts them instead of the weights"
    return replace(written, remarks=(*written.remarks, remark))


def _arrays_of_safetensors(path: Path) -> dict[str, np.ndarray]:
    return checkpoint.read_weights(path)[0]


def _arrays_of_bundle(index: Path) -> dict[str, np.ndarray]:
    bundle = tensor_bundle.Bundle(index.with_suffix(""))
    return {name: bundle.read(name) for name in bundle.entries}


def _arrays_of_paddle(path: Path) -> dict[str, np.ndarray]:
    return paddle_pickle.load(path).arrays


@dataclass(frozen=True)
class Target:
    """A format to convert to."""

    write: Callable[[Path, Weights, bool, Path], Written]
    """Writes weights for a path into a folder, from which they are moved there. Its arguments are
    the path, the weights, whether they get a certificate, for formats with metadata, and the
    folder."""
    read_arrays: Reader
    """Reads a file as it is stored, for the comparison with its framework's own reader."""
    has_classes: bool = False
    """Whether it holds names of classes."""
    has_metadata: bool = False
    """Whether it has a place to say that there is no certificate."""
    unsaid: tuple[str, ...] = ("mean", "std")
    """The preprocessing that it cannot hold, so that its users have to set it."""
    assumed: str = ""
    """The preprocessing, in `KNOWN`, that whoever reads it assumes; "" if the format or its writer
    says it."""


TARGETS: dict[str, Target] = {
    "safetensors": Target(
        _to_safetensors, _arrays_of_safetensors, has_classes=True, has_metadata=True, unsaid=()
    ),
    "torchvision": Target(
        _plain(torch_writing.write_torchvision), torch_file.load, assumed="torchvision-v1"
    ),
    "timm": Target(
        _to_timm, _arrays_of_safetensors, has_classes=True, has_metadata=True, unsaid=()
    ),
    "keras": Target(_plain(keras_file.write_keras), keras_file.stored, unsaid=("mean",)),
    "nvidia-pytorch": Target(_to_nvidia_pytorch, torch_file.load, assumed="nvidia-pytorch"),
    "nvidia-tensorflow": Target(
        _plain(nvidia_tensorflow.write), _arrays_of_bundle, assumed="nvidia-tensorflow"
    ),
    "nvidia-paddle": Target(
        _plain(nvidia_paddle.write), _arrays_of_paddle, assumed="nvidia-paddle"
    ),
    "nvidia-mxnet": Target(_plain(nvidia_mxnet.write), mxnet_params.load, assumed="nvidia-mxnet"),
}
