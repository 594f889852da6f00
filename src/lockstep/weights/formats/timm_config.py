"""timm's `config.json`, and the options of its training script: the model, its preprocessing and
the names of its classes.

Sources: timm 1.0.31, train.py, data/config.py, data/transforms_factory.py, data/dataset_info.py,
models/_hub.py, models/_pretrained.py and models/resnet.py.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError, nearest
from lockstep.system.strict_json import Check, is_number, is_positive, is_text
from lockstep.system.text import format_count
from lockstep.weights.formats.torch_settings import find_effect, list_values
from lockstep.weights.known_preprocessing import PILLOW
from lockstep.weights.preprocessing import Changes
from lockstep.weights.weights_choice import DEFAULT_CHOICE

_MOST_COLOUR = 8
"""A larger mean or deviation is on the scale 0 to 255, which timm does not have."""
_NOT_OF_TIMM = ("resnet50-v1", "resnet101-v1", "resnet152-v1", "se-resnext101-32x4d")
_ARCHITECTURES = {
    name.replace("-", "_"): name
    for name, spec in MODELS.items()
    if name not in _NOT_OF_TIMM and spec.blur != "before"
}
"""Names of models by timm's names."""
_DEFAULTS: dict[str, Any] = {
    "num_classes": 1000,
    "input_size": [3, 224, 224],
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}
"""What timm assumes for fields that `config.json` does not name."""
_TRAINING_ARGS = ("drop_rate", "drop_path_rate", "drop_block_rate", "zero_init_last")
"""Arguments of timm's models that change training only."""
_MODEL_ARGS = {"in_chans": 3, "global_pool": "avg", "output_stride": 32}
"""Arguments of timm's models that have a single supported value."""
_OF_SCRIPT = ("input_size", "interpolation", "crop_pct", "crop_mode", "input_img_mode")
"""Options of timm's training script that say how images are prepared."""
_INFORMATION = """
url file hf_hub_id hf_hub_filename source tag license description origin_url notes paper_name
paper_ids min_input_size pool_size test_pool_size model_type transformers_version architectures
dtype torch_dtype initializer_range
"""
"""Fields that change neither the model nor the preprocessing."""
_KEYS = {
    **{name: {name} for name in ("interpolation", "mean", "std")},
    "eval_resize": {"crop_pct", "test_crop_pct"},
    "eval_crop": {"input_size", "test_input_size"},
}
"""The fields that say each value of the preprocessing."""
_AT_TOP = (
    *("architecture", "num_classes", "num_features", "global_pool", "model_args"),
    *("label_names", "label_descriptions", "multi_label", "problem_type"),
)
"""Fields next to `pretrained_cfg`; they take precedence over fields of the same name in it."""


def one_of(*expected: Any) -> Check:
    """Return a check that a value is one of these, of the same type."""
    return lambda value: any(type(value) is type(one) and value == one for one in expected)


def _is_triple(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3


def _is_square(value: Any) -> bool:
    return _is_triple(value) and all(map(is_positive, value)) and value[1] == value[2]


def _is_colour(value: Any) -> bool:
    return _is_triple(value) and all(is_number(n) and abs(n) <= _MOST_COLOUR for n in value)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(is_text, (*value, *value.values())))


_SQUARE = (_is_square, "[channels, height, width] with equal height and width")
OTHERS = "To keep any network, use lockstep export or convert to FILE.safetensors"
"""What is suggested for a network that a format of another program cannot hold."""
SHARE = (lambda value: is_number(value) and 0.001 <= value <= 1, "a number from 0.001 to 1")
_CHECKS: dict[str, tuple[Check, str]] = {
    "architecture": (is_text, "the name of a model"),
    "num_classes": (is_positive, "a whole number above 0: a classifier is needed"),
    "num_features": (is_positive, "a whole number above 0"),
    "global_pool": (one_of("avg"), "'avg', the only pooling that Lockstep's models have"),
    "model_args": (lambda value: isinstance(value, Mapping), "a table of arguments"),
    "custom_load": (one_of(False), "false: weights that timm has to convert cannot be read"),
    "label_offset": (one_of(0), "0: outputs of the classifier cannot be skipped"),
    "first_conv": (one_of("conv1", "conv1.0"), "'conv1' or 'conv1.0', the first of a ResNet"),
    "classifier": (one_of("fc"), "'fc', the classifier of a ResNet"),
    "input_size": _SQUARE,
    "test_input_size": _SQUARE,
    "fixed_input_size": (one_of(False, True), "true or false"),
    "interpolation": (one_of("bilinear", "bicubic"), "'bilinear' or 'bicubic'"),
    "crop_pct": SHARE,
    "test_crop_pct": SHARE,
    "crop_mode": (one_of("center"), "'center', the only way of cropping that Lockstep has"),
    "mean": (_is_colour, "three numbers on the scale 0 to 1, for red, green and blue"),
    "std": (
        lambda value: _is_colour(value) and min(value) > 0,
        "three numbers above 0, on the scale 0 to 1",
    ),
    "input_img_mode": (one_of("RGB"), "'RGB'"),
    "multi_label": (one_of(False), "false: each output of the model would be a sigmoid"),
    "problem_type": (
        one_of("single_label_classification"),
        "'single_label_classification': each output of the model would be a sigmoid, or a number",
    ),
    "label_descriptions": (_is_table, "a table of strings"),
}
"""Fields that have a meaning, each with what a message expects of it."""


def parse_model(name: str) -> str | None:
    """Return the model of a name of timm, torchvision or NVIDIA; None if there is none.

    >>> parse_model("hf-hub:timm/resnet50d.ra2_in1k"), parse_model("gluon_resnet50_v1c")
    ('resnet50d', 'resnet50c')
    """
    bare = name.lower().rpartition("/")[2].partition(".")[0].replace("-", "_")
    bare = re.sub("^(gluon|tv|ssl|swsl|ig)_", "", bare)
    bare = re.sub("_v1([bcds])$", lambda match: match[1].strip("b"), bare)
    return next((model for model in MODELS if model.replace("-", "_") == bare), None)


def read_timm_config(
    config: Mapping[str, Any], chosen: str | ModelSpec | None = None
) -> tuple[Changes, tuple[str, ...], tuple[str, ...]]:
    """Return the changes of `Recipe` fields in timm's `config.json`, the names of the classes, and
    remarks for the user.

    The fields are at the top or in `pretrained_cfg`. The model is the `chosen` one, if there is
    one. The changes are `model`, `logits`,
    `image_size` and all of `FIELDS`. Evaluation uses timm's sizes for tests, as its validation
    does; the shorter side is resized to floor(size / crop_pct). Names of classes are empty if there
    are none. A remark names every value that is assumed or not kept.

    Raises `CheckpointError` for a value of another type, and for a model or a preprocessing that
    Lockstep does not have.
    """
    own = merge_layouts(config)
    check_fields(own, _CHECKS)
    refuse_effects({name: own[name] for name in _list_unknown(own)}, own.get("num_classes"))
    fields = _DEFAULTS | own
    changes = _prepare(fields)
    changes |= {"model": _find_model(fields, chosen), "logits": fields["num_classes"]}
    try:
        Recipe.of(changes)
    except RecipeError as error:
        raise CheckpointError(f"these values do not make a recipe: {error}") from None
    classes, about_classes = read_classes(fields.get("label_names", ()), fields["num_classes"])
    return changes, classes, (*_describe_rest(own, *_read_sizes(fields)), *about_classes)


def refuse_effects(unknown: Mapping[str, Any], outputs: int | None = None) -> None:
    """Raise `CheckpointError` for an unknown field that may change the results of a network with
    these outputs."""
    for name, value in list_values(unknown, (), DEFAULT_CHOICE)[0].items():
        if effect := find_effect(name, value, outputs):
            field = name.partition(".")[0]
            raise CheckpointError(
                f"{name} is {value!r:.60}: {effect}; leave it out if it changes nothing: --ignore"
                f" {field}"
            )


def read_timm_args(args: Mapping[str, Any]) -> Changes:
    """Return the changes of `Recipe` fields in the options of timm's training script.

    Options without a value mean what the model's weights in timm have, which is not known here.
    Raises `CheckpointError` as `read_timm_config` does.
    """
    own = {name: args[name] for name in _OF_SCRIPT if args.get(name)}
    if args.get("img_size"):
        channels = args.get("in_chans") or args.get("chans") or 3
        own.setdefault("input_size", [channels, args["img_size"], args["img_size"]])
    for name in ("mean", "std"):
        value = args.get(name)
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value * 3
        if value is not None:
            own[name] = value
    own["global_pool"] = args.get("gp") or "avg"
    if own["global_pool"] in ("fast", "fastavg"):
        own["global_pool"] = "avg"
    own["model_args"] = args.get("model_kwargs") or {}
    check_fields(own, _CHECKS)
    arguments = {**own["model_args"], "bn_eps": args.get("bn_eps")}
    _check_arguments(arguments, arguments.get("num_classes"))
    changes = _prepare(_DEFAULTS | own)
    for field in list_assumed(own):
        del changes[field]
    if "input_size" not in own:
        del changes["image_size"]
    return changes


def list_assumed(own: Mapping[str, Any]) -> list[str]:
    """Return the preprocessing fields that a file with these fields does not set."""
    return [field for field, keys in _KEYS.items() if own.keys().isdisjoint(keys)]


def _prepare(fields: Mapping[str, Any]) -> Changes:
    """Return the changes of `Recipe` fields that prepare images."""
    trained, tested, share = _read_sizes(fields)
    changes: Changes = {"image_size": trained, "interpolation": fields["interpolation"], **PILLOW}
    for name in ("mean", "std"):
        changes[name] = tuple(round(255 * value, 9) for value in fields[name])
    return changes | {"eval_resize": math.floor(tested / share), "eval_crop": tested}


def check_fields(fields: Mapping[str, Any], checks: Mapping[str, tuple[Check, str]]) -> None:
    """Raise `CheckpointError` for a field that fails its check, with what the check expects."""
    for name, (check, expected) in checks.items():
        if name in fields and not check(fields[name]):
            raise CheckpointError(f"{name} is {fields[name]!r:.60}; expected {expected}")


def merge_layouts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of both layouts in one table, without nulls. Raises `CheckpointError`."""
    nested = config.get("pretrained_cfg")
    if nested is not None and not isinstance(nested, Mapping):
        raise CheckpointError(f"pretrained_cfg is {nested!r:.60}; expected a table of fields")
    fields = dict(config if nested is None else nested)
    for name in config.keys() - {"pretrained_cfg"}:
        # timm ignores other fields of `pretrained_cfg` here; a remark names what it does not know.
        if name in _AT_TOP or name not in _CHECKS:
            fields[name] = config[name]
    if fields.get("label_names") is None:
        fields["label_names"] = fields.pop("labels", None)  # the older name
    return {name: value for name, value in fields.items() if value is not None}


def _find_model(
    fields: Mapping[str, Any], chosen: str | ModelSpec | None = None
) -> str | ModelSpec:
    """Return the model: the one that the user chooses, or the one of its name. Raises
    `CheckpointError` if that differs from the model of this name here."""
    _check_arguments(fields.get("model_args", {}), fields["num_classes"])
    if chosen is not None:
        return chosen
    if "architecture" not in fields:
        raise CheckpointError("architecture is missing; expected a ResNet, such as resnet50")
    name = parse_model(fields["architecture"])
    if name is None or name not in _ARCHITECTURES.values():
        similar, _, _ = nearest(fields["architecture"], _ARCHITECTURES).partition("Known")
        raise CheckpointError(
            f"architecture is {fields['architecture']!r:.60}, which Lockstep does not have. If it"
            " computes the same as a Lockstep model, name that: --model resnet50."
            f" {similar}".rstrip()
        )
    outputs = MODELS[name].features
    if fields.get("num_features", outputs) != outputs:
        raise CheckpointError(f"num_features is {fields['num_features']}, but {name} has {outputs}")
    return name


def _check_arguments(arguments: Mapping[str, Any], outputs: int | None) -> None:
    """Raise `CheckpointError` if arguments of timm's function make a different model from what its
    name says."""
    supported = _MODEL_ARGS | {"num_classes": outputs}
    for argument, argued in arguments.items():
        if argued is None or argument in _TRAINING_ARGS:
            continue
        if supported.get(argument) != argued:
            known = ", ".join(f"{name} {value}" for name, value in supported.items() if value)
            raise CheckpointError(
                f"model_args: {argument} is {argued!r:.60}, which Lockstep lacks; supported:"
                f" {known}"
            )


def _read_sizes(fields: Mapping[str, Any]) -> tuple[int, int, float]:
    """Return the sides of images in training and in evaluation, and the crop's share of the resized
    image."""
    sizes = [fields["input_size"], fields["input_size"]]
    if "test_input_size" in fields and not fields.get("fixed_input_size"):
        sizes[1] = fields["test_input_size"]
    for channels, *_ in sizes:
        if channels != 3:
            raise CheckpointError(
                f"images have {format_count(channels, 'channel')}; expected 3 (red, green and blue)"
            )
    return sizes[0][1], sizes[1][1], fields.get("test_crop_pct", fields["crop_pct"])


def _describe_rest(
    own: Mapping[str, Any], trained: int, tested: int, share: float
) -> Iterator[str]:
    """Yield remarks on what is assumed, dropped or unknown."""
    defaults = dict(_DEFAULTS)
    if "test_crop_pct" in own:
        del defaults["crop_pct"]
    assumed = [f"{name} {value}" for name, value in defaults.items() if name not in own]
    if assumed:
        yield f"config.json does not say, so timm's default is assumed: {', '.join(assumed)}"
    if trained != tested:
        yield (
            f"evaluating at {tested} px with crop_pct {share:g}, the test sizes, as timm's"
            f" validation does; training was at {trained} px"
        )
    dropped = sorted({*_TRAINING_ARGS}.intersection(own.get("model_args", {})))
    if dropped:
        yield f"arguments that change training only were left out: {', '.join(dropped)}"
    if "label_descriptions" in own:
        yield "label_descriptions were left out: classes have the names of label_names"
    if unknown := _list_unknown(own):
        yield f"fields that Lockstep does not know were left out: {', '.join(unknown[:10])}"


def _list_unknown(own: Mapping[str, Any]) -> list[str]:
    return sorted(own.keys() - _CHECKS.keys() - {*_INFORMATION.split(), "label_names"})


def read_classes(
    labels: Any, logits: int, field: str = "label_names"
) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of the classes in order, which a field holds, and remarks. Raises
    `CheckpointError`."""
    if isinstance(labels, list | tuple):
        labels = dict(enumerate(labels))
    if not isinstance(labels, Mapping):
        raise CheckpointError(
            f"{field} is {labels!r:.60}; expected a list of names, or a table of names by index"
        )
    names = {}
    for key, name in labels.items():
        if not re.fullmatch("[0-9]{1,9}", str(key)):
            problem = f"the index {key!r:.60}; expected a whole number of at least 0"
            raise CheckpointError(f"{field} has {problem}")
        if not is_text(name):
            problem = f"the name of class {key} is {name!r:.60}; expected a string"
            raise CheckpointError(f"{field}: {problem}")
        if int(key) >= logits:
            problem = f"a class {int(key)}, but num_classes is {logits}"
            raise CheckpointError(f"{field} has {problem}")
        names[int(key)] = name
    classes = tuple(names.get(index, str(index)) for index in range(max(names, default=-1) + 1))
    [(most, times)] = Counter(classes).most_common(1) or [("", 0)]
    if times > 1:
        return (), [
            f"{field} has {most!r:.60} for several classes, so names were left out and classes"
            " are numbers"
        ]
    gaps = len(classes) - len(names)
    if not gaps:
        return classes, []
    return classes, [f"{field} has no names for {gaps} classes; they are called by their numbers"]


def build_timm_config(recipe: Recipe, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return timm's `config.json` for weights of a recipe: what `read_timm_config` reads.

    `classes` may be empty. timm resizes and crops as torchvision, and its models pad symmetrically:
    other ways of evaluation, `dct_scaling` and `padding` have no place in it. Raises
    `CheckpointError` if timm has no such model.
    """
    spec = recipe.spec
    architectures = [timm for timm, name in _ARCHITECTURES.items() if MODELS[name] == spec]
    if not architectures:
        name = recipe.model if isinstance(recipe.model, str) else "with these blocks and widths"
        raise CheckpointError(f"timm has no model {name}; expected one of its ResNets. {OTHERS}")
    share = _fit_crop_share(recipe.eval_crop, recipe.eval_resize)
    config = {
        "architecture": architectures[0],
        "num_classes": recipe.logits,
        "num_features": spec.features,
        "global_pool": "avg",
    }
    if classes:
        config["label_names"] = list(classes)
    config["pretrained_cfg"] = fields = {
        "custom_load": False,
        "input_size": [3, recipe.image_size, recipe.image_size],
        "fixed_input_size": False,
        "interpolation": recipe.interpolation,
        "crop_pct": share,
        "crop_mode": "center",
        "mean": [round(value / 255, 12) for value in recipe.mean],
        "std": [round(value / 255, 12) for value in recipe.std],
        "num_classes": recipe.logits,
        "pool_size": [-(-recipe.image_size // 32)] * 2,
        "first_conv": spec.list_stem()[0].name,
        "classifier": "fc",
    }
    if recipe.image_size != recipe.eval_crop:
        fields |= {"test_input_size": [3, recipe.eval_crop, recipe.eval_crop]}
        fields |= {"test_crop_pct": share}
    return config


def _fit_crop_share(crop: int, resize: int) -> float:
    """Return a share for which timm resizes to `resize`: the largest of at most crop / resize."""
    share = crop / resize
    while math.floor(crop / share) < resize:
        share = math.nextafter(share, 0)
    return share
