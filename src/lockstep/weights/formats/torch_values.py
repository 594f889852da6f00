"""Values next to a state_dict in a file of PyTorch: what they say of the network, of its classes
and of images, and an account of all of them.

A value describes the training if all words of its name do, and then changes nothing in inference.
Any other value may change results.

`args` of timm's and of torchvision's training scripts say how images are prepared. Those of other
programs may mean anything, so nothing is taken from them.

Sources: timm 1.0.31, train.py and utils/checkpoint_saver.py; torchvision 0.28,
references/classification/train.py and presets.py; Lightning's
trainer/connectors/checkpoint_connector.py.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import MODELS
from lockstep.system.errors import CheckpointError
from lockstep.system.strict_json import is_count, is_number, is_text
from lockstep.weights.formats import numbers
from lockstep.weights.formats.account import Part, describe_key, refuse_leftover
from lockstep.weights.formats.timm_config import read_timm_args
from lockstep.weights.known_preprocessing import KNOWN, PILLOW
from lockstep.weights.preprocessing import Changes

Values = Mapping[Any, Any]

ARGS = "args"
_ARCHITECTURES = ("arch", "architecture", "model_name", "model")
_CLASSES = (
    *("classes", "class_names", "class_to_idx", "idx_to_class", "label_names", "labels"),
    *("categories", "id2label", "label2id"),
)
_OF_TORCHVISION = {"val_resize_size": "eval_resize", "val_crop_size": "eval_crop"}
_OF_TORCHVISION |= {"interpolation": "interpolation", "train_crop_size": "image_size"}
"""Fields of recipes by options of torchvision's script."""
_DESCRIPTIVE = re.compile(
    r"a|n|fp|id|it|to|wd|logs?|logg(?:er|ing)|(?:acc|adv|amp|arch|arg|auc|av|batch|best|call|categ|cfg|check|ckpt|commit"
    r"|class(?!if)|conf(?!us)|count|crit|cuda|curr|dat|dec|desc|dev|dict|dtype|dur|early|elapsed|ema"
    r"|epoch|err|eval|file|final|fit|fold|git|gpu|grad|glob|group|hash|hist|hparam|hyper|idx|info"
    r"|init|iou|iter|label|last|learn|lic|lightning|loop|loss|lr|max|metric|min|mix|mode"
    r"|momentum|monitor|name|nat|num|opt(?!imal)|param|path|pati|prec|prev|prog|py|rand|rank|rate"
    r"|recall|result|resume|rng|run|sampl|save|saving|scaler|sched|score|seed|sha|start|stat|step|stop|test"
    r"|time|top|torch|total|train|type|url|val|ver|wandb|warm|weight|world).*",
    re.IGNORECASE,
)
"""Words in the names of values that change nothing in inference."""
_OF_ANY_SHAPE = re.compile(r"(?:.*[\W_])?(?:opt|callback|ema|rng)", re.IGNORECASE)
"""Names of such values that may hold tensors of any shape."""
_SEVERAL_CLASSES = re.compile(r"multi[_-]?label", re.IGNORECASE)
_PREPARATION = re.compile(
    r"mean|std|.*(crop|resize|resol|interpol|normali[sz]).*|(im|img|image|input)_?size",
    re.IGNORECASE,
)


def account_for_values(
    path: Path, network: str, root: Values, used: Collection[str | None]
) -> Iterator[Part]:
    """Yield what becomes of the values of a file that are not `used`. Raises `CheckpointError` that
    names those that may change results."""
    leftover = []
    for key, value in root.items():
        name = describe_key(key)
        if key in used or value is None:
            continue
        if _is_descriptive(name, value):
            yield Part(name, "without effect", "it describes the training")
        else:
            leftover.append(name)
    if leftover:
        raise refuse_leftover(path, network, leftover, "values")


def _is_descriptive(name: str, value: Any) -> bool:
    """Return whether a value changes nothing in inference."""
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+", name.replace("amp_scaling", "amp"))
    is_of_training = bool(words) and all(map(_DESCRIPTIVE.fullmatch, words))
    return is_of_training and (bool(_OF_ANY_SHAPE.match(name)) or not _has_matrix(value))


def _has_matrix(value: Any) -> bool:
    """Return whether a value holds an array of floats with at least two axes."""
    left = [value]
    visited = set[int]()
    while left:
        part = left.pop()
        if isinstance(part, np.ndarray) and part.ndim > 1 and numbers(part).dtype.kind == "f":
            return True
        if id(part) in visited:
            continue
        visited.add(id(part))
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
    return False


def find_model(path: Path, root: Values) -> str | None:
    """Return the model that a file names; None if it names none.

    Raises `CheckpointError` for a name of another network: it may have the same tensors and compute
    something else.
    """
    names = [*map(root.get, _ARCHITECTURES), _read_args(root)[1].get("model")]
    # timm's saver without arguments stores the name of the class: resnet.
    texts = (name for name in names if isinstance(name, str) and name not in ("", "resnet"))
    name = next(texts, None)
    model = name and parse_model(name)
    if name and not model:
        raise CheckpointError(
            f"{path} says that its network is {name!r:.60}, which Lockstep does not have. If it"
            " computes as one of Lockstep's, name that: --model resnet50"
        )
    return model


def parse_model(name: str) -> str | None:
    """Return the model of a name of timm, torchvision or NVIDIA; None if there is none.

    >>> parse_model("hf-hub:timm/resnet50d.ra2_in1k"), parse_model("gluon_resnet50_v1c")
    ('resnet50d', 'resnet50c')
    """
    bare = name.lower().rpartition("/")[2].partition(".")[0].replace("-", "_")
    bare = re.sub("^(gluon|tv|ssl|swsl|ig)_", "", bare)
    bare = re.sub("_v1([bcds])$", lambda match: match[1].strip("b"), bare)
    return next((model for model in MODELS if model.replace("-", "_") == bare), None)


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


def read_changes(path: Path, root: Values) -> tuple[Changes, list[str], list[str]]:
    """Return the fields of a recipe that a file says, the names of the values that say them, and
    remarks. Raises `CheckpointError` for what Lockstep does not have."""
    changes: Changes = {}
    used = []
    remarks: list[str] = []
    script, args = _read_args(root)
    if script:
        used.append(ARGS)
    if script == "timm":
        try:
            changes, remarks = read_timm_args(args)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: in args of timm, {error}") from None
    elif "val_crop_size" in args:
        known = KNOWN["torchvision-v1"]
        changes = PILLOW | {"mean": known["mean"], "std": known["std"]}
        for option in _OF_TORCHVISION.keys() & args.keys():
            changes[_OF_TORCHVISION[option]] = args[option]
        if str(args.get("backend", "pil")).lower() != "pil":
            remarks.append("its program resized tensors; here images are rounded as Pillow does")
    colours = scale_colours({"mean": root.get("mean"), "std": root.get("std")})
    if colours:
        used += colours
    for key, value in root.items():
        if key not in used and isinstance(value, dict):
            remarks += _describe_unused(path, describe_key(key), value)
    return changes | colours, used, remarks


def scale_colours(colours: Mapping[str, Any]) -> Changes:
    """Return mean and standard deviation of images from 0 to 1 on the scale 0 to 255; none unless
    each has three numbers from 0 to 1."""
    changes = {}
    for name, value in colours.items():
        if isinstance(value, np.ndarray):
            value = numbers(value).ravel().tolist()
        if not isinstance(value, list | tuple) or len(value) != 3:
            return {}
        if not all(is_number(number) and 0 <= number <= 1 for number in value):
            return {}
        # The shortest decimal of a float32: 0.485.
        changes[name] = tuple(round(255 * float(str(np.float32(n))), 9) for n in value)
    return changes


def _describe_unused(path: Path, name: str, options: Values) -> Iterator[str]:
    """Yield a remark on options of a program that may say how images are prepared. Raises
    `CheckpointError` if they say that an image has several classes."""
    prepared = []
    for key, value in options.items():
        if not isinstance(key, str) or value is None or isinstance(value, np.ndarray):
            continue
        if _PREPARATION.fullmatch(key):
            prepared.append(key)
        is_several = isinstance(value, str) and _SEVERAL_CLASSES.search(value)
        is_set = isinstance(value, str | int | float) and value
        if is_several or (is_set and _SEVERAL_CLASSES.search(key)):
            raise CheckpointError(
                f"{path}: {name} says {key}: {value!r:.40}, so each output is a sigmoid; expected"
                " one class an image, a softmax"
            )
    if prepared:
        yield (
            f"{name} has {', '.join(prepared[:5])}, which Lockstep does not use; say how images are"
            " prepared with --set"
        )


def read_classes(root: Values, logits: int) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of classes that a file has, and remarks. A list has them, or a table by name
    or by index. Names must be those of all outputs, each once."""
    for key in _CLASSES:
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
