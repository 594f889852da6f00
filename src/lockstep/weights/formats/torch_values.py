"""Values next to a state_dict in a PyTorch file: what they say about the network, its classes and
images, and an account of all of them.

`torch_settings` says what each value would do in inference. `args` of timm's and of torchvision's
training scripts say how images are prepared, as mean and standard deviation of any program do.

Sources: timm 1.0.31, train.py and utils/checkpoint_saver.py; torchvision 0.28,
references/classification/train.py and presets.py; Lightning's
trainer/connectors/checkpoint_connector.py.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import CheckpointError
from lockstep.system.strict_json import is_count, is_number, is_text
from lockstep.weights.formats import numbers
from lockstep.weights.formats.account import Part, refuse_leftover
from lockstep.weights.formats.timm_config import parse_model, read_timm_args
from lockstep.weights.formats.torch_settings import CLASSES, find_effect
from lockstep.weights.known_preprocessing import KNOWN, PILLOW
from lockstep.weights.preprocessing import Changes

Values = Mapping[Any, Any]

ARGS = "args"
_ARCHITECTURES = ("arch", "architecture", "model_name", "model")
_OTHER_ARCHITECTURES = re.compile(
    r"(?:.*\.)?(?:arch|architecture|backbone|encoder|base_model|model|model_arch|model_name|network)"
)
"""Paths of values, at any depth, that may name the network."""
_A_RESNET = re.compile(r".*res(?:net|next|nest)\w*\d.*")
_OF_TORCHVISION = {"val_resize_size": "eval_resize", "val_crop_size": "eval_crop"}
_OF_TORCHVISION |= {"interpolation": "interpolation", "train_crop_size": "image_size"}
"""Fields of recipes by options of torchvision's script."""
_OF_TIMM = {"bce_loss", "bn_eps", "chans", "gp", "in_chans", "input_img_mode", "mean", "std"}
"""Options of timm's script that `read_timm_args` reads, or that change training only there."""
_PREPARATION = re.compile(
    r"mean|std|.*(crop|resize|resol|interpol|normali[sz]).*|(im|img|image|input)_?size",
    re.IGNORECASE,
)
_COLOURS = re.compile(r"((?:.*[._])?)(mean|std)(s?)", re.IGNORECASE)


def account_for_values(
    path: Path, network: str, values: Values, used: Collection[str], logits: int | None
) -> Iterator[Part]:
    """Yield what becomes of the values of a file, of which some paths are used. Raises
    `CheckpointError` that names those that may change the results of a network with these
    outputs."""
    leftover: dict[str, list[str]] = {}
    others = {}
    for name in filter(lambda name: name not in used, values):
        if effect := find_effect(name, values[name], logits):
            leftover.setdefault(effect, []).append(name)
        top = name.partition(".")[0]
        if top:  # the whole file is called "" if it has nothing but tensors
            others[top] = Part(top, "without effect", "it describes the training")
    plain = [name for name, value in values.items() if not isinstance(value, np.ndarray)]
    for effect, names in leftover.items():
        problem = "also has values that Lockstep would ignore"
        raise refuse_leftover(path, network, names, problem, effect, plain)
    yield from others.values()


def find_model(path: Path, root: Values, values: Values) -> str | None:
    """Return the model that a file names; None if there is none.

    Raises `CheckpointError` for the name of a network that Lockstep does not have: it may have the
    same tensors and compute something else.
    """
    names = [*map(root.get, _ARCHITECTURES), _read_args(root)[1].get("model")]
    # timm's saver without arguments stores the name of the class: resnet.
    texts = [name for name in names if isinstance(name, str) and name not in ("", "resnet")]
    for place, value in values.items():
        is_resnet = isinstance(value, str) and (
            parse_model(value) or _A_RESNET.match(value.lower())
        )
        if is_resnet and _OTHER_ARCHITECTURES.fullmatch(place):
            texts.append(value)
    name = next(iter(texts), None)
    model = name and parse_model(name)
    if name and not model:
        raise CheckpointError(
            f"{path} says that its network is {name!r:.60}, which Lockstep does not have. If it"
            " computes the same as a Lockstep model, name that: --model resnet50"
        )
    return model


def _read_args(root: Values) -> tuple[str, dict[str, Any]]:
    """Return whose training script wrote a file, "timm" or "torchvision", and its options; "" and
    none for any other program."""
    args = root.get(ARGS)
    if not isinstance(args, dict):
        return "", {}
    options = {str(name): _simplify(value) for name, value in args.items() if is_text(name)}
    if {"arch", "version"} <= root.keys() or {"crop_pct", "img_size"} <= options.keys():
        return "timm", options
    if options.keys() & {"val_resize_size", "train_crop_size", "lr_step_size"}:
        return "torchvision", options
    return "", {}


def _simplify(value: Any, most: int = 16) -> Any:
    """Return a plain value, and a list or a table of a few; the name of its type for any other,
    since a message that names one could be endless."""
    if isinstance(value, dict) and len(value) <= most:
        return {str(name): _simplify(item, 0) for name, item in value.items()}
    if isinstance(value, list | tuple) and len(value) <= most:
        return [_simplify(item, 0) for item in value]
    is_small = not isinstance(value, int) or abs(value) < 2**53
    is_plain = isinstance(value, str | float | int | None)
    return value if is_plain and is_small else f"a {type(value).__name__}"


def read_changes(path: Path, root: Values, values: Values) -> tuple[Changes, list[str], list[str]]:
    """Return the fields of a recipe that a file says, the paths of the values that say them, and
    remarks. Raises `CheckpointError` for what Lockstep does not have."""
    changes: Changes = {}
    remarks: list[str] = []
    used = []
    script, args = _read_args(root)
    if script == "timm":
        used = [f"{ARGS}.{name}" for name in _OF_TIMM]
        used += filter(lambda name: name.startswith(f"{ARGS}.model_kwargs"), values)
        try:
            changes = read_timm_args(args)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: in args of timm, {error}") from None
    elif "val_crop_size" in args:
        known = KNOWN["torchvision-v1"]
        changes = PILLOW | {"mean": known["mean"], "std": known["std"]}
        for option in _OF_TORCHVISION.keys() & args.keys():
            changes[_OF_TORCHVISION[option]] = args[option]
        if str(args.get("backend", "pil")).lower() != "pil":
            remarks.append("its program resized tensors; Lockstep rounds like Pillow")
    others = dict(values)
    for name in filter(lambda name: script and name.startswith(f"{ARGS}."), values):
        del others[name]
    colours, places = _read_colours(path, others)
    prepared: dict[str, list[str]] = {}
    for name, value in others.items():
        scope, _, key = name.rpartition(".")
        is_read = name in places or isinstance(value, np.ndarray)
        if _PREPARATION.fullmatch(key) and value is not None and not is_read:
            prepared.setdefault(scope, []).append(key)
    for scope, keys in prepared.items():
        remarks.append(
            f"{scope or 'the file'} has {', '.join(keys[:5])}, which Lockstep does not use; say how"
            " images are prepared with --set"
        )
    return changes | colours, [*used, *places], remarks


def _read_colours(path: Path, values: Values) -> tuple[Changes, list[str]]:
    """Return mean and standard deviation of images, and the paths of the values that say them.
    Raises `CheckpointError` if several values differ."""
    pairs: dict[str, dict[str, str]] = {}
    for name in values:
        if match := _COLOURS.fullmatch(name):
            pairs.setdefault(f"{match[1]}mean{match[3]}", {})[match[2].lower()] = name
    changes: Changes = {}
    places: list[str] = []
    for names in pairs.values():
        colours = scale_colours({kind: values[name] for kind, name in names.items()})
        if changes and colours and colours != changes:
            raise CheckpointError(
                f"{path} has several means and standard deviations of images:"
                f" {', '.join([*places, *names.values()])}; leave out all but one pair with"
                " --ignore"
            )
        changes |= colours
        if colours:
            places += names.values()
    return changes, places


def scale_colours(colours: Mapping[str, Any]) -> Changes:
    """Return mean and standard deviation of images on the scale 0 to 255; none unless each has
    three numbers, and for ImageNet's mean in the order blue, green, red, whose images are not RGB.
    Both are of images from 0 to 1 unless one is larger than 1."""
    triples = {}
    for name, value in colours.items():
        if isinstance(value, np.ndarray):
            value = numbers(value).ravel().tolist()
        if not isinstance(value, list | tuple) or len(value) != 3:
            return {}
        if not all(is_number(number) and 0 <= number <= 255 for number in value):
            return {}
        # The shortest decimal of a float32: 0.485.
        triples[name] = np.array(list(map(str, map(np.float32, value))), np.float64)
    if len(triples) < 2 or not triples["std"].all():
        return {}
    scale = 255
    if max(map(np.max, triples.values())) > 1:
        scale = 1
        if 0 < triples["mean"].max() <= 1 or triples["std"].max() < 1:
            return {}
    if np.allclose(scale * triples["mean"][::-1], KNOWN["torchvision-v1"]["mean"], rtol=0.02):
        return {}
    return {name: tuple((scale * triple).round(9).tolist()) for name, triple in triples.items()}


def read_classes(root: Values, logits: int) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of classes that a file has, and remarks. A list has them, or a table by name
    or by index. Names must be those of all outputs, each once."""
    for key in CLASSES:
        names = root.get(key)
        if isinstance(names, list | tuple):
            names = dict(enumerate(names))
        if not isinstance(names, dict):
            continue
        by_index = {}
        for index, name in names.items():
            if is_count(name):
                index, name = name, index
            if is_text(name) and (is_count(index) or is_text(index)):
                by_index[str(index)] = name
        classes = tuple(by_index.get(str(index), "") for index in range(logits))
        if len(names) == logits == len({*classes} - {""}):
            return classes, []
        return (), [f"{key} does not name each of the {logits} outputs once, so it is not used"]
    return (), []
