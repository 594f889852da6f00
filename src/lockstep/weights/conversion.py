"""Convert weights between all formats that can be read and written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, nearest
from lockstep.system.files import write_json
from lockstep.weights import checkpoint
from lockstep.weights.certificate import Certificate, certify
from lockstep.weights.class_names import Classes
from lockstep.weights.formats import (
    keras_file,
    nvidia_mxnet,
    nvidia_paddle,
    nvidia_tensorflow,
    refuse_existing,
    timm_folder,
    torch_writing,
)
from lockstep.weights.formats.common import Written, left_out
from lockstep.weights.opening import Opened, open_weights
from lockstep.weights.preprocessing import KNOWN


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str = "safetensors",
    which: str = "newest",
    ema: bool = False,
    classes: Classes | None = None,
    model: str | None = None,
    certificate: bool = True,
) -> dict[str, Any]:
    """Write weights in another format; return what was written, with remarks and the certificate.

    `source` is whatever `evaluate` accepts: a run, a checkpoint, or another program's weights (docs/weights.md). `to` is one
    of these; `target` is a new file, folder or prefix:

    - "safetensors": a single file with torchvision's names, the recipe and the names of the classes.
    - "torchvision": a `state_dict` in a file that `torch.load` reads, for `torchvision.models`.
    - "timm": a folder with `config.json` and `model.safetensors`, for timm and the hub.
    - "keras": a file of weights for `keras.applications`.
    - "nvidia-pytorch", "nvidia-tensorflow", "nvidia-paddle", "nvidia-mxnet": a checkpoint for NVIDIA's code. For MXNet,
      `target` can also be `<prefix>-0090.params`. Velocities, epoch and step are written as far as source and format have
      them.

    `classes` replaces the names of the classes: names, class 0 first, or a file that lists them. `model` names the model of
    a source that fits several, such as resnet50 and resnet50-v1.

    With `certificate`, the target is read back, and source and target compute the same images, each in its own framework if
    it is installed. `TARGET.certificate.json` has the result. If the logits differ by more than the bound, nothing is
    written.

    Nothing is overwritten. A remark names whatever cannot be carried over. Raises `CheckpointError`, and `DataError` if
    `classes` does not fit the weights.

    >>> import lockstep
    >>> result = lockstep.convert("run", "weights.safetensors")
    >>> result["written"], result["logits"], result["certificate"]["largest_difference"]
    (['weights.safetensors', 'weights.safetensors.certificate.json'], 10, 0.0)
    """
    target = Path(target)
    if not target.name or target.name == "..":
        raise CheckpointError(f"{target} is no name for a new file; expected a name such as weights.safetensors")
    if to not in TARGETS:
        raise CheckpointError(f"there is no format {to!r} to convert to. {nearest(to, TARGETS)}")
    if classes is not None and not TARGETS[to].has_classes:
        named = " or ".join(name for name, each in TARGETS.items() if each.has_classes)
        raise CheckpointError(f"{to} holds no names of classes; leave them out, or convert to {named}")
    refuse_existing(_certificate_of(target))
    weights = open_weights(source, which=which, ema=ema, momentum=True, model=model).with_classes(classes)
    files, remarks = TARGETS[to].write(target, weights, certificate)
    remarks = (*remarks, *_unlike_assumed(TARGETS[to], to, weights.recipe))
    found: Certificate | None = None
    if certificate and (to == "safetensors" or isinstance(weights.recipe.model, str)):
        found = _certified(weights, target, files, [*weights.remarks, *remarks], TARGETS[to])
    elif not certificate and to != "safetensors":
        remarks = (*remarks, "there is no certificate, and the format has no place to say so")
    elif certificate:
        remarks = (*remarks, f"there is no certificate: {to} cannot be read back for a model that has no name")
    return {
        "source": str(weights.source),
        "origin": weights.origin,
        "written": [str(path) for path in (*files, *([_certificate_of(target)] if found else ()))],
        "model": weights.recipe.fields()["model"],
        "logits": weights.recipe.logits,
        "step": weights.state.step,
        "remarks": [*weights.remarks, *remarks],
        "certificate": found,
    }


def _certificate_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.certificate.json")


def _certified(
    weights: Opened, target: Path, files: Sequence[Path], remarks: Sequence[str], format: "Target"
) -> Certificate:
    """Return the certificate, and write it. If there is none, or it does not hold, remove the files that were written."""
    try:
        # By a file: a prefix or folder may also name something that was there before.
        readable = next(path for path in files if not path.name.endswith(_BESIDE))
        written = open_weights(readable)
        changes = [*remarks, *([format.invents] if format.invents else [])]
        found = certify(weights, written, files, changes, format.unsaid)
        if not found["holds"]:
            raise CheckpointError(
                f"{target} would not compute as {weights.source} does: logits differ by "
                f"{found['largest_difference']:.2g} of the largest; expected at most {found['bound']:g}."
                f"{_why(weights.recipe, written.recipe)} Nothing is written; --no-certificate writes it anyway"
            )
        write_json(_certificate_of(target), found)
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        if files[0].parent == target:  # it was made for these files
            target.rmdir()
        raise
    return found


def _why(source: Recipe, target: Recipe) -> str:
    """Return, as a sentence, in what the network of the target's format is another than that of the source."""
    ours, theirs = source.fields(), target.fields()
    unlike = [
        f"{name} {theirs[name]}, not {ours[name]}"
        for name in ("model", "padding", "bn_epsilon")
        if ours[name] != theirs[name]
    ]
    return f" Programs that read this format compute with {', '.join(unlike)}." if unlike else ""


_BESIDE = (".json", ".momentum.params")
"""How the names of files end from which the other files of a conversion are not found."""


def _unlike_assumed(target: "Target", name: str, recipe: Recipe) -> tuple[str, ...]:
    """Return a remark if weights need another preprocessing than whoever reads the target's format assumes."""
    assumed = KNOWN.get(target.assumed, {})
    needed = {field: value for field, value in recipe.fields().items() if field in assumed}
    unlike = {field: value for field, value in needed.items() if value != _plain_value(assumed[field])}
    described = ", ".join(f"{field} {value}, not {_plain_value(assumed[field])}" for field, value in unlike.items())
    return (f"{name} does not say how images are prepared; these weights need {described}",) if unlike else ()


def _plain_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _to_safetensors(target: Path, weights: Opened, certified: bool) -> Written:
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target}: the name of a safetensors file ends in .safetensors")
    about: dict[str, Any] = {"recipe": weights.recipe.fields(), "classes": list(weights.classes)}
    if not certified:
        about["certificate"] = "none"
    checkpoint.write_weights(target, weights.tensors, about)
    return (target,), left_out(weights.state)


def _to_timm(target: Path, weights: Opened, certified: bool) -> Written:
    files, remarks = timm_folder.write(target, weights.recipe, weights.state, weights.classes)
    return files, (*remarks, *_about_averages(weights.state))


def _to_nvidia_pytorch(target: Path, weights: Opened, certified: bool) -> Written:
    return torch_writing.write_nvidia_pytorch(target, weights.recipe, weights.state, epochs=weights.epochs or 0)


def _plain(write: Callable[[Path, Recipe, State], Written]) -> Callable[[Path, Opened, bool], Written]:
    """Return a function that writes a checkpoint without a moving average and without names of classes."""

    def written(target: Path, weights: Opened, certified: bool) -> Written:
        files, remarks = write(target, weights.recipe, weights.state)
        is_said = any("moving averages" in remark for remark in remarks)
        return files, (*remarks, *(() if is_said else _about_averages(weights.state)))

    return written


def _about_averages(state: State) -> tuple[str, ...]:
    return ("the moving averages were left out; --ema converts them instead of the weights",) if state.ema else ()


_COUNTERS = "num_batches_tracked of every batch norm was added, since its modules expect it; it changes no result"


@dataclass(frozen=True)
class Target:
    """A format to convert to."""

    write: Callable[[Path, Opened, bool], Written]
    """Writes weights under a name, and returns the files and remarks. The last argument says whether they get a certificate,
    for formats with metadata."""
    has_classes: bool = False
    """Whether it holds names of classes."""
    invents: str = ""
    """What it holds that no source has, for the certificate."""
    unsaid: tuple[str, ...] = ("mean", "std")
    """The preprocessing that it cannot hold, so that its users have to set it."""
    assumed: str = ""
    """The preprocessing, in `KNOWN`, that whoever reads it assumes; "" if the format or its writer says it."""


TARGETS: dict[str, Target] = {
    "safetensors": Target(_to_safetensors, has_classes=True, unsaid=()),
    "torchvision": Target(_plain(torch_writing.write_torchvision), invents=_COUNTERS, assumed="torchvision-v1"),
    "timm": Target(_to_timm, has_classes=True, invents=_COUNTERS, unsaid=()),
    "keras": Target(_plain(keras_file.write_keras), unsaid=("mean",)),
    "nvidia-pytorch": Target(_to_nvidia_pytorch, invents=_COUNTERS, assumed="nvidia-pytorch"),
    "nvidia-tensorflow": Target(_plain(nvidia_tensorflow.write), assumed="nvidia-tensorflow"),
    "nvidia-paddle": Target(_plain(nvidia_paddle.write), assumed="nvidia-paddle"),
    "nvidia-mxnet": Target(_plain(nvidia_mxnet.write), assumed="nvidia-mxnet"),
}
