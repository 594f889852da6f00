"""Convert weights between all formats that can be read and written."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os.path import lexists
from pathlib import Path
from typing import Any

from lockstep.backends import FRAMEWORKS
from lockstep.data.class_order import describe_order
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes import Recipe
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import CheckpointError, as_path
from lockstep.system.files import give_names, staging, write_json
from lockstep.weights.calibration import UNCALIBRATED
from lockstep.weights.certificate import BOUND, REFERENCE, Certificate, certify
from lockstep.weights.class_names import UNNAMED, assume_classes
from lockstep.weights.formats.common import Written
from lockstep.weights.inspection import group_parts
from lockstep.weights.opened_weights import Weights
from lockstep.weights.opening import open_weights
from lockstep.weights.preprocessing import CERTIFICATE
from lockstep.weights.target_formats import TARGETS
from lockstep.weights.weights_choice import WeightsChoice

_PROVED = {
    "timm": (BOUND, "two programs in fp32 are each within 5e-5 of float64"),
    "transformers": (5e-3, "torchvision's resize rounds some pixels by one level of 255"),
}
"""Folders that their program loads and prepares images for: the bound of logits, as a share of the
largest logit, and its reason."""


def convert(
    choice: WeightsChoice,
    target: str | Path,
    *,
    to: str = "safetensors",
    certificate: bool = True,
    complete: Callable[..., list[str]] | None = None,
) -> dict[str, Any]:
    """Write weights in another format; arguments, result and errors are those of `Model.save`.

    Chosen preprocessing is written to formats that hold it, and to the certificate next to others,
    where `open_weights` finds it. `complete` adds files to a new folder, and returns their names;
    it is called as `write_card` in `lockstep.inference.card`.
    """
    target = as_path(target, "target")
    _check_target(target, to, choice)
    weights = open_weights(choice, momentum=True)
    _check_parts(weights, to)
    weights = _keep_velocities_of_sgd(weights)
    describes_network = to in ("safetensors", "transformers")
    can_read_back = describes_network or isinstance(weights.recipe.model, str)
    certified = certificate and can_read_back
    result = _write(weights, target, to, certified=certified, complete=complete)
    if not certificate and not TARGETS[to].has_metadata:
        result["remarks"].append("no certificate was written, and the format cannot record that")
    elif certificate and not can_read_back:
        result["remarks"].append(
            f"no certificate was written: {to} cannot be read back for a model without a name"
        )
    return result


def _keep_velocities_of_sgd(weights: Weights) -> Weights:
    """Return weights without the state of another optimizer than SGD, which no format can hold."""
    state = weights.state
    optimizer = weights.recipe.optimizer
    if OPTIMIZERS[optimizer].velocity == "sum" or not state.momentum:
        return weights
    remark = f"the state of the optimizer {optimizer} was left out: the format cannot hold it"
    state = replace(state, momentum={}, second_moments={})
    return replace(weights, state=state, remarks=(*weights.remarks, remark))


def _check_target(target: Path, to: str, choice: WeightsChoice) -> None:
    """Raise `CheckpointError` for an unknown format, or one without this name or its classes."""
    if not target.name or target.name == "..":
        raise CheckpointError(
            f"{target} is not a name for a new file; expected one such as weights.safetensors"
        )
    if to not in TARGETS:
        raise CheckpointError(
            f"there is no format {to!r} to convert to. Known: {', '.join(TARGETS)}. PyTorch and"
            " most of its programs read torchvision"
        )
    if choice.classes is not None and not TARGETS[to].has_classes:
        others = " or ".join(name for name, format in TARGETS.items() if format.has_classes)
        raise CheckpointError(
            f"{to} holds no names of classes; leave them out, or convert to {others}"
        )


def _check_parts(weights: Weights, to: str) -> None:
    """Raise `CheckpointError` if the model has a part that a format cannot hold."""
    missing = set(weights.recipe.spec.parts) - set(TARGETS[to].parts)
    if missing:
        others = [name for name, format in TARGETS.items() if missing <= set(format.parts)]
        raise CheckpointError(
            f"{to} has no place for {', '.join(sorted(missing))}, which the model of"
            f" {weights.source} has; convert to {', '.join(others)}"
        )


def _write(
    weights: Weights,
    target: Path,
    to: str,
    *,
    certified: bool,
    complete: Callable[..., list[str]] | None,
) -> dict[str, Any]:
    """Write all files in a hidden folder first; return what was written."""
    certificate = None
    try:
        with staging(target) as folder:
            leftover = _certificate_path(target)
            if lexists(leftover):
                raise CheckpointError(
                    f"{leftover} already exists, the certificate of an earlier {target.name};"
                    " delete both, or name a new file"
                )
            written = TARGETS[to].write(target, weights, certified, folder)
            files = [*written.files]
            remarks = [
                *weights.remarks,
                *written.remarks,
                *_describe_classes(to, weights),
                *_describe_losses(to, weights, certified=certified),
            ]
            if certified:
                certificate = _write_certificate(weights, target, to, written, folder, remarks)
                files.append(_certificate_path(target))
                if to in _PROVED:
                    files.append(target / "proof")
            if complete is not None and (folder / target.name).is_dir():
                plain = replace(weights, scales={})
                names = complete(folder / target.name, plain, to, certificate)
                files += map(target.joinpath, names)
            _give_names(folder, target, written)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from None
    return {
        "source": str(weights.source),
        "origin": weights.origin,
        "written": [str(path) for path in files],
        "model": weights.recipe.fields()["model"],
        "logits": weights.recipe.logits,
        "step": weights.state.step,
        "remarks": remarks,
        "certificate": certificate,
    }


def _certificate_path(target: Path) -> Path:
    return target.with_name(f"{target.name}{CERTIFICATE}")


def _describe_losses(to: str, weights: Weights, *, certified: bool) -> list[str]:
    """Return remarks on what a format does not hold of preprocessing, scales and temperature."""
    remarks = []
    differences = TARGETS[to].list_unlike_assumed(weights.recipe)
    if differences:
        remedy = "evaluate them with --set FIELD=VALUE"
        if certified:
            remedy = "Lockstep reads it from the certificate"
        remarks.append(
            f"{to} does not say how images are prepared; these weights need"
            f" {', '.join(differences)}; {remedy}"
        )
    if weights.scales and to != "safetensors":
        remarks.append(
            f"{to} holds no scales of {weights.recipe.quantisation}: its readers compute in float"
        )
    if weights.calibration != UNCALIBRATED and to != "safetensors":
        remarks.append(
            f"{to} holds no temperature: its readers compute probabilities that are not calibrated"
        )
    return remarks


def _write_certificate(
    weights: Weights, target: Path, to: str, written: Written, folder: Path, remarks: Sequence[str]
) -> Certificate:
    """Read back what was written into a folder, and write its certificate and proof there. Raises
    `CheckpointError` if it computes something else than the source."""
    places = {path: folder / path.relative_to(target.parent) for path in written.files}
    arrays = tuple(map(places.__getitem__, written.arrays))
    staged = replace(written, files=tuple(places.values()), arrays=arrays)
    copy = open_weights(staged.arrays[0])
    account = [f"{treatment}: {text}" for treatment, text in group_parts(weights.parts)]
    changes = [*remarks, *account, *written.added]
    certificate = certify(weights, copy, staged, TARGETS[to], changes, folder)
    if not certificate["holds"]:
        raise CheckpointError(
            f"{target} would compute differently from {weights.source}: logits differ by"
            f" {certificate['largest_difference']:.2g} of the largest logit; expected at most"
            f" {certificate['bound']:g}.{_explain_difference(weights.recipe, copy.recipe)} Nothing"
            " is written; --no-certificate writes it anyway"
        )
    write_json(folder / _certificate_path(target).name, certificate)
    if to in _PROVED:
        _prove(copy, to, folder / target.name)
    return certificate


def _prove(copy: Weights, to: str, folder: Path) -> None:
    """Write the proof of a folder of another program, which prepares images in its own way."""
    from lockstep.proof.folder import Subject, write_proof

    backend = REFERENCE
    if FRAMEWORKS[DEFAULT_BACKEND].version() is not None:
        backend = DEFAULT_BACKEND
    subject = Subject(
        target=to,
        precision="fp32",
        recipe=copy.recipe,
        tensors=copy.tensors,
        classes=copy.classes,
        takes="squares",
        batch=None,
        backend=backend,
        bound=_PROVED[to][0],
        why=_PROVED[to][1],
    )
    write_proof(folder, subject)


def _describe_classes(to: str, weights: Weights) -> Iterator[str]:
    """Yield the order of outputs that the target does not name, or how to name assumed classes."""
    order = describe_order(weights.classes)
    assumed = assume_classes(weights.recipe)
    if weights.has_classifier and not (weights.classes or assumed):
        yield UNNAMED
    elif assumed and not weights.classes and TARGETS[to].prepares and TARGETS[to].has_classes:
        code = r'import lockstep, sys; print(*lockstep.load(sys.argv[1]).classes, sep="\n")'
        yield (
            f"the weights name no classes, so {to} gets none; predict assumes ImageNet's for"
            f" {weights.recipe.logits} outputs. To write these: python -c '{code}'"
            f" {shlex.quote(str(weights.source))} > names.txt, and --classes names.txt"
        )
    elif order and not TARGETS[to].has_classes:
        yield f"{to} holds no names of classes; the outputs are in {order}"


def _give_names(folder: Path, target: Path, written: Written) -> None:
    """Move new files into place: the certificate first, what makes the rest readable last."""
    readable = written.arrays[0]
    paths = [path for path in written.files if path != readable]
    certificate = _certificate_path(target)
    if (folder / certificate.name).exists():
        paths.insert(0, certificate)
    # Of a file, or of a new folder around all of them.
    names = [path.relative_to(target.parent).parts[0] for path in (*paths, readable)]
    give_names(folder, list(dict.fromkeys(names)))


def _explain_difference(source: Recipe, target: Recipe) -> str:
    """Return, as a sentence, how the network of the target's format differs from the source's."""
    ours = source.fields()
    theirs = target.fields()
    names = [key for key in ("model", "padding", "bn_epsilon") if ours[key] != theirs[key]]
    if not names:
        return ""
    differences = [f"{name} {theirs[name]}, not {ours[name]}" for name in names]
    return f" Programs that read this format compute with {', '.join(differences)}."
