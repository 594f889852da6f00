"""Preprocessing of weights that other programs trained, as changes of `Recipe` fields.

`KNOWN` holds it for origins whose files do not describe it. timm's `config.json` describes it:
`from_timm` and `to_timm`.

Sources: torchvision 0.29, transforms/_presets.py and models/resnet.py; MXNet 1.9.1,
gluon/model_zoo/vision/__init__.py and gluon/data/vision/transforms.py; timm 1.0.31, data/config.py,
data/transforms_factory.py, data/dataset_info.py, models/_hub.py, models/_pretrained.py and
models/resnet.py.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.models.architectures import MODELS, features, model_spec
from lockstep.recipes import Recipe
from lockstep.recipes.published import (
    resnet50_mxnet_90ep,
    resnet50_paddle_90ep,
    resnet50_tensorflow_90ep,
    resnext101_32x4d_pytorch_90ep,
)
from lockstep.recipes.recipe import PREPROCESSING
from lockstep.system.errors import CheckpointError, RecipeError, nearest
from lockstep.system.regular_files import WEIGHTS, open_regular
from lockstep.system.strict_json import Check, is_number, is_positive, is_text

Changes = dict[str, Any]
"""Values of `Recipe` fields."""

FIELDS = PREPROCESSING
"""The fields of `Recipe` that are the preprocessing of an evaluation; `antialias` is that of
training."""
OF_TRAINING = "antialias"
"""The one of `FIELDS` that evaluation does not use."""
_OF_PILLOW: Changes = {
    "antialias": True,
    "eval_antialias": True,
    "eval_side_rounding": "down",
    "eval_offset_rounding": "even",
    "eval_sampling": "half_pixel",
    "exif_orientation": False,
}
"""How torchvision and timm resize with Pillow, and crop."""
_IMAGENET = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}


def _evaluated_as(recipe: Recipe) -> Changes:
    return {name: getattr(recipe, name) for name in FIELDS}


KNOWN: dict[str, Changes] = {
    "torchvision-v1": (
        _IMAGENET | _OF_PILLOW | {"interpolation": "bilinear", "eval_resize": 256, "eval_crop": 224}
    ),
    "torchvision-v2": (
        _IMAGENET | _OF_PILLOW | {"interpolation": "bilinear", "eval_resize": 232, "eval_crop": 224}
    ),
    "timm": (
        _IMAGENET | _OF_PILLOW | {"interpolation": "bicubic", "eval_resize": 256, "eval_crop": 224}
    ),
    "gluon": (
        _IMAGENET
        | {"interpolation": "bilinear", "antialias": False, "eval_antialias": False}
        | {
            "eval_side_rounding": "down",
            "eval_offset_rounding": "down",
            "eval_sampling": "half_pixel",
        }
        | {"eval_resize": 256, "eval_crop": 224, "exif_orientation": False}
    ),
    "nvidia-paddle": _evaluated_as(resnet50_paddle_90ep()),
    "nvidia-mxnet": _evaluated_as(resnet50_mxnet_90ep()),
    "nvidia-pytorch": _evaluated_as(resnext101_32x4d_pytorch_90ep()),
    "nvidia-tensorflow": _evaluated_as(resnet50_tensorflow_90ep()),
}
"""The evaluation of known origins; each has all of `FIELDS`.

- torchvision-v1 and -v2: `IMAGENET1K_V1` and `IMAGENET1K_V2` of its ResNets.
- timm: what timm assumes where `config.json` says nothing.
- gluon: Gluon's model zoo. Its images are from 0 to 1 before mean and standard deviation; its
  resize is OpenCV's.
- nvidia-*: the published recipes.
"""

_OF_TORCHVISION = {
    "torchvision-v1": ("f37072fd", "b627a593", "0676ba61", "63fe2227", "394f9c45"),
    "torchvision-v2": ("11ad3fa6", "cd907fc2", "f82ba261"),
}
"""The files that torchvision downloads for its ResNets, by the first digits of their SHA-256, which
end their names."""
_WITHOUT_RECIPE = {"timm": "timm", "Gluon": "gluon"} | dict.fromkeys(
    ("torchvision", "PyTorch", "PaddleClas", "paddle.vision"), "torchvision-v1"
)
"""Origins without a published recipe, with the row of `KNOWN` that is assumed for them."""
_ONLY_COLOURS = ("Keras", "ONNX", "TensorFlow")
"""Origins whose mean and standard deviation are known, and nothing else."""


def assumed_preprocessing(
    origin: str, path: Path, given: Collection[str] = ()
) -> tuple[Changes, tuple[str, ...]]:
    """Return the preprocessing to use for weights of a file that does not describe it, and a remark
    if it is an assumption.

    The remark leaves out the fields `given`, which are known from elsewhere. If
    torchvision may have published the file, all of its bytes are read for their SHA-256. Both are empty
    if the origin has a published recipe, whose preprocessing is used.
    """
    if origin in _ONLY_COLOURS:
        changes = {
            name: value for name, value in KNOWN["torchvision-v1"].items() if name not in _IMAGENET
        }
        return changes, _assumption("torchvision-v1", changes, {"mean", "std", *given})
    if origin not in _WITHOUT_RECIPE:
        return {}, ()
    digest = ""
    if (
        path.suffix == ".pth" and path.is_file()
    ):  # torchvision's; a renamed file gets the note below
        with open_regular(path, WEIGHTS) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:8]
    known = next((name for name, digests in _OF_TORCHVISION.items() if digest in digests), None)
    name = known or _WITHOUT_RECIPE[origin]
    changes = KNOWN[name]
    if known is not None:
        return changes, ()
    return changes, _assumption(name, changes, given)


def _assumption(name: str, changes: Changes, known: Collection[str]) -> tuple[str, ...]:
    """Return a remark on what is assumed apart from known fields; none if all of it is known."""
    said = {
        "eval_resize": f"shorter side {changes['eval_resize']}",
        "eval_crop": f"crop {changes['eval_crop']}",
        "interpolation": changes["interpolation"],
        "mean": "ImageNet's mean",
        "std": "ImageNet's standard deviation",
    }
    parts = [part for field, part in said.items() if field not in known]
    if not {"mean", "std"} & {*known}:
        parts[-2:] = ["ImageNet's mean and standard deviation"]
    if not parts:
        return ()
    return (
        (
            f"the file does not say how its images were prepared; {name} is assumed:"
            f" {', '.join(parts)}"
        ),
    )


_ARCHITECTURES = {name.replace("-", "_"): name for name in MODELS if not name.endswith("-v1")}
"""Names of models by timm's names."""
_DEFAULTS: dict[str, Any] = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "interpolation": "bicubic",
    "crop_pct": 0.875,
    "crop_mode": "center",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}
"""What timm assumes for fields that `config.json` does not name."""
_TRAINING_ARGS = ("drop_rate", "drop_path_rate", "drop_block_rate", "zero_init_last")
"""Arguments of timm's models that change training only."""
_MODEL_ARGS = {"in_chans": 3, "global_pool": "avg", "output_stride": 32}
"""Arguments of timm's models that have a single supported value."""
_INFORMATION = (
    *(
        "url",
        "file",
        "hf_hub_id",
        "hf_hub_filename",
        "source",
        "tag",
        "license",
        "description",
        "origin_url",
        "notes",
    ),
    *(
        "paper_name",
        "paper_ids",
        "min_input_size",
        "pool_size",
        "test_pool_size",
        "model_type",
        "transformers_version",
    ),
)
"""Fields that change neither the model nor the preprocessing."""
_AT_TOP = (
    "architecture",
    "num_classes",
    "num_features",
    "global_pool",
    "model_args",
    "label_names",
    "label_descriptions",
)
"""Fields next to `pretrained_cfg`; they go before fields of the same name in it."""


def _is_only(value: Any) -> Check:
    return lambda found: type(found) is type(value) and found == value


def _is_square(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(map(is_positive, value))
        and value[1] == value[2]
    )


def _is_share(value: Any) -> bool:
    return is_number(value) and 0.001 <= value <= 1


def _is_colour(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(is_number(each) and 0 < each <= 1 for each in value)
    )


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(map(is_text, value))
        and all(map(is_text, value.values()))
    )


_COLOUR = "three numbers above 0 and at most 1, for red, green and blue"
_CHECKS: dict[str, tuple[Check, str]] = {
    "architecture": (is_text, "the name of a model"),
    "num_classes": (
        is_positive,
        "a whole number above 0; weights without a classifier cannot be used",
    ),
    "num_features": (is_positive, "a whole number above 0"),
    "global_pool": (_is_only("avg"), "'avg', the only pooling that Lockstep's models have"),
    "model_args": (lambda value: isinstance(value, Mapping), "a table of arguments"),
    "custom_load": (
        _is_only(False),
        "false: weights that timm converts while it loads them cannot be read",
    ),
    "label_offset": (_is_only(0), "0: outputs of the classifier cannot be skipped"),
    "first_conv": (_is_only("conv1"), "'conv1', the first convolution of a ResNet"),
    "classifier": (_is_only("fc"), "'fc', the classifier of a ResNet"),
    "input_size": (_is_square, "[channels, height, width] with equal height and width"),
    "test_input_size": (_is_square, "[channels, height, width] with equal height and width"),
    "fixed_input_size": (lambda value: isinstance(value, bool), "true or false"),
    "interpolation": (lambda value: value in ("bilinear", "bicubic"), "'bilinear' or 'bicubic'"),
    "crop_pct": (_is_share, "a number from 0.001 to 1"),
    "test_crop_pct": (_is_share, "a number from 0.001 to 1"),
    "crop_mode": (_is_only("center"), "'center', the only way of cropping that Lockstep has"),
    "mean": (_is_colour, _COLOUR),
    "std": (_is_colour, _COLOUR),
    "label_descriptions": (_is_table, "a table of texts"),
}


def from_timm(config: Mapping[str, Any]) -> tuple[Changes, tuple[str, ...], tuple[str, ...]]:
    """Return the changes of `Recipe` fields in timm's `config.json`, the names of the classes, and
    remarks for the user.

    The fields are at the top or in `pretrained_cfg`. The changes are `model`, `logits`,
    `image_size` and all of `FIELDS`. Evaluation uses timm's sizes for tests, as its validation
    does; the shorter side is resized to floor(size / crop_pct). Names of classes are empty if there
    are none. A remark names every value that is assumed or not kept.

    Raises `CheckpointError` for a value of another type, and for a model or a preprocessing that
    Lockstep does not have.
    """
    given = _given(config)
    for name, (check, expected) in _CHECKS.items():
        if name in given and not check(given[name]):
            raise CheckpointError(f"{name} is {given[name]!r:.60}; expected {expected}")
    fields = _DEFAULTS | given
    trained, tested, share = _sizes(fields)
    changes = {
        "model": _model(fields),
        "logits": fields["num_classes"],
        "image_size": trained,
        "mean": tuple(round(255 * value, 9) for value in fields["mean"]),
        "std": tuple(round(255 * value, 9) for value in fields["std"]),
        "interpolation": fields["interpolation"],
        **_OF_PILLOW,
        "eval_resize": math.floor(tested / share),
        "eval_crop": tested,
    }
    try:
        Recipe.of(changes)
    except RecipeError as error:
        raise CheckpointError(f"these values do not make a recipe: {error}") from None
    classes, about_classes = _classes(fields)
    return changes, classes, (*_remarks(given, trained, tested, share), *about_classes)


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of both layouts in one table, without nulls. Raises `CheckpointError`."""
    nested = config.get("pretrained_cfg")
    if nested is not None and not isinstance(nested, Mapping):
        raise CheckpointError(f"pretrained_cfg is {nested!r:.60}; expected a table of fields")
    fields = (
        dict(config)
        if nested is None
        else dict(nested) | {name: config[name] for name in _AT_TOP if name in config}
    )
    if fields.get("label_names") is None:
        fields["label_names"] = fields.pop("labels", None)  # the older name
    return {name: value for name, value in fields.items() if value is not None}


def _model(fields: Mapping[str, Any]) -> str:
    """Return the name of the model. Raises `CheckpointError` if it differs from the model of this
    name here."""
    if "architecture" not in fields:
        raise CheckpointError(
            f"architecture is missing; expected one of {', '.join(_ARCHITECTURES)}"
        )
    name = _ARCHITECTURES.get(fields["architecture"])
    if name is None:
        raise CheckpointError(
            f"architecture is {fields['architecture']!r:.60}, which Lockstep does not have. "
            f"{nearest(fields['architecture'], _ARCHITECTURES)}"
        )
    outputs = features(MODELS[name])
    if fields.get("num_features", outputs) != outputs:
        raise CheckpointError(f"num_features is {fields['num_features']}, but {name} has {outputs}")
    for argument, value in fields.get("model_args", {}).items():
        supported = _MODEL_ARGS | {"num_classes": fields["num_classes"]}
        if (
            value is not None
            and argument not in _TRAINING_ARGS
            and supported.get(argument) != value
        ):
            known = ", ".join(f"{each} {one}" for each, one in supported.items())
            raise CheckpointError(
                f"model_args: {argument} is {value!r:.60}, which is another model; supported:"
                f" {known}"
            )
    return name


def _sizes(fields: Mapping[str, Any]) -> tuple[int, int, float]:
    """Return the sides of images in training and in evaluation, and the crop's share of the resized
    image."""
    sizes = [fields["input_size"], fields["input_size"]]
    if "test_input_size" in fields and not fields.get("fixed_input_size"):
        sizes[1] = fields["test_input_size"]
    for channels, *_ in sizes:
        if channels != 3:
            raise CheckpointError(
                f"images have {channels} channels; expected 3 (red, green and blue)"
            )
    return sizes[0][1], sizes[1][1], fields.get("test_crop_pct", fields["crop_pct"])


def _remarks(given: Mapping[str, Any], trained: int, tested: int, share: float) -> Iterator[str]:
    assumed = {name: value for name, value in _DEFAULTS.items() if name not in given}
    if "test_crop_pct" in given:
        assumed.pop("crop_pct", None)
    if assumed:
        values = ", ".join(
            f"{name} {list(value) if isinstance(value, tuple) else value}"
            for name, value in assumed.items()
        )
        yield f"config.json does not say, so timm's default is assumed: {values}"
    if trained != tested:
        yield (
            f"evaluation is at {tested} px with crop_pct {share:g}, the sizes for tests, as in"
            f" timm's validation; training was at {trained} px"
        )
    dropped = [name for name in _TRAINING_ARGS if name in given.get("model_args", {})]
    if dropped:
        yield f"arguments that change training only were left out: {', '.join(dropped)}"
    if "label_descriptions" in given:
        yield "label_descriptions were left out: classes have the names of label_names"
    unknown = sorted(given.keys() - _CHECKS.keys() - {*_INFORMATION, "label_names"})
    if unknown:
        yield f"fields that Lockstep does not know were left out: {', '.join(unknown[:10])}"


def _classes(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the classes in order, and remarks. Raises `CheckpointError`."""
    found = fields.get("label_names", ())
    logits = fields["num_classes"]
    if isinstance(found, Mapping):
        names = {_index(key): name for key, name in found.items()}
    elif isinstance(found, list | tuple):
        names = dict(enumerate(found))
    else:
        raise CheckpointError(
            f"label_names is {found!r:.60}; expected a list of names, or a table of names by index"
        )
    for index, name in names.items():
        if not is_text(name):
            raise CheckpointError(
                f"label_names: the name of class {index} is {name!r:.60}; expected a text"
            )
        if index >= logits:
            raise CheckpointError(f"label_names has a class {index}, but num_classes is {logits}")
    classes = tuple(names.get(index, str(index)) for index in range(max(names, default=-1) + 1))
    twice = [name for name, times in Counter(classes).items() if times > 1]
    if twice:
        return (), (
            (
                f"label_names has {twice[0]!r:.60} for several classes, so names were left out and"
                " classes are numbers"
            ),
        )
    gaps = len(classes) - len(names)
    return classes, (
        (f"label_names has no names for {gaps} classes; they are called by their numbers",)
        if gaps
        else ()
    )


def _index(key: Any) -> int:
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        return key
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10:
        return int(key)
    raise CheckpointError(
        f"label_names has the index {key!r:.60}; expected a whole number of at least 0"
    )


def to_timm(recipe: Recipe, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return timm's `config.json` for weights of a recipe: what `from_timm` reads.

    `classes` may be empty. timm resizes and crops as torchvision, and its models pad symmetrically:
    other ways of evaluation, `dct_scaling` and `padding` have no place in it. Raises
    `CheckpointError` if timm has no such model.
    """
    spec = model_spec(recipe.model)
    architecture = next(
        (timm for timm, name in _ARCHITECTURES.items() if MODELS[name] == spec), None
    )
    if architecture is None:
        name = recipe.model if isinstance(recipe.model, str) else "with this specification"
        raise CheckpointError(f"timm has no model {name}; it has {', '.join(_ARCHITECTURES)}")
    share = _crop_share(recipe.eval_crop, recipe.eval_resize)
    tests: dict[str, Any] = {}
    if recipe.image_size != recipe.eval_crop:
        tests = {"test_input_size": [3, recipe.eval_crop, recipe.eval_crop], "test_crop_pct": share}
    return {
        "architecture": architecture,
        "num_classes": recipe.logits,
        "num_features": features(spec),
        "global_pool": "avg",
        **({"label_names": list(classes)} if classes else {}),
        "pretrained_cfg": {
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
            "first_conv": "conv1",
            "classifier": "fc",
            **tests,
        },
    }


def _crop_share(crop: int, resize: int) -> float:
    """Return a share for which timm resizes to `resize`: the largest of at most crop / resize."""
    share = crop / resize
    while math.floor(crop / share) < resize:
        share = math.nextafter(share, 0)
    return share
