"""Folders of Hugging Face's transformers with a `ResNetForImageClassification`.

    config.json               the network and the names of its classes
    model.safetensors         the weights by the names of its modules (`torch_contents`)
    pytorch_model.bin         the same, as PyTorch saves it, read if it is alone
    preprocessor_config.json  how images are prepared

The processor that is written is a `BitImageProcessor`: its shorter side and its crop are any two
sizes. `ConvNextImageProcessor` stretches images to a square from 384 pixels on.

Sources: transformers 5.24.0, models/resnet/*.py, models/convnext/image_processing_convnext.py,
image_processing_backends.py and image_transforms.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.models.architectures import ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.strict_json import Check, is_number, is_positive
from lockstep.weights.formats.account import split_ignored
from lockstep.weights.formats.common import Written, check_state, name_model
from lockstep.weights.formats.timm_config import (
    OTHERS,
    SHARE,
    check_fields,
    one_of,
    read_classes,
    refuse_effects,
)
from lockstep.weights.formats.timm_folder import (
    CONFIG,
    find_weights,
    read_arrays,
    read_json,
    write_folder,
)
from lockstep.weights.formats.torch_models import read_state_dict
from lockstep.weights.formats.torch_writer import build_state_dict, describe_model
from lockstep.weights.known_preprocessing import PILLOW
from lockstep.weights.opened_weights import Weights
from lockstep.weights.original import Original
from lockstep.weights.preprocessing import FIELDS, Changes
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "transformers"

PROCESSOR = "preprocessor_config.json"
_CLASS = "ResNetForImageClassification"
_LAST_LAYER = re.compile(r"layer([1-4])\.(\d+)\.(?:conv(\d)|bn(\d)|downsample\.([01]))\.(\w+)")
_DEFAULTS: dict[str, Any] = {
    **{"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]},
    **{"layer_type": "bottleneck", "downsample_in_bottleneck": False},
    **{"crop_pct": 0.875, "rescale_factor": 1 / 255},
}
"""What transformers assumes for fields that are not there."""
_INFORMATION = """
architectures model_type transformers_version torch_dtype dtype out_features out_indices stage_names
_name_or_path finetuning_task id2label label2id num_labels
"""
_OF_PROCESSOR = """
image_processor_type feature_extractor_type processor_class _valid_processor_keys return_tensors
data_format input_data_format device disable_grouping do_convert_rgb do_center_crop do_rescale
do_normalize
"""
"""Fields of processors without a check."""
_CROPPING = ("BitImageProcessor", "CLIPImageProcessor")
_STRETCHING = 384


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(is_positive, value))


def _are_three(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(is_number, value))


def _list_sides(size: Any) -> list[Any]:
    return list(size.values()) if isinstance(size, dict) else [size]


def _is_square(value: Any) -> bool:
    sides = _list_sides(value)
    return all(map(is_positive, sides)) and len(set(sides)) == 1


def _is_shorter_side(value: Any) -> bool:
    """Return whether a size keeps the aspect ratio: a number, or a table with `shortest_edge`."""
    return _is_square(value) and not (isinstance(value, dict) and {*value} != {"shortest_edge"})


_CONFIG_CHECKS: dict[str, tuple[Check, str]] = {
    "num_channels": (one_of(3), "3 (red, green and blue)"),
    "hidden_act": (one_of("relu"), "'relu', the only activation that Lockstep has"),
    "downsample_in_first_stage": (one_of(False), "false: Lockstep's first stage has stride 1"),
    "downsample_in_bottleneck": (one_of(False, True), "true or false"),
    "layer_type": (one_of("basic", "bottleneck"), "'basic' or 'bottleneck'"),
    "embedding_size": (is_positive, "a whole number above 0"),
    **dict.fromkeys(("hidden_sizes", "depths"), (_are_sizes, "four whole numbers above 0")),
    "problem_type": (one_of("single_label_classification"), "'single_label_classification'"),
}
_PROCESSOR_CHECKS: dict[str, tuple[Check, str]] = {
    "size": (
        _is_shorter_side,
        "shortest_edge, a whole number above 0: other sizes stretch images; to set the"
        " preprocessing yourself: --ignore image_processor_type, or feature_extractor_type",
    ),
    "crop_size": (_is_square, "equal height and width, whole numbers above 0"),
    "crop_pct": SHARE,
    "resample": (one_of(2, 3), "2 (bilinear) or 3 (bicubic)"),
    "do_resize": (one_of(True), "true: images have one size"),
    "rescale_factor": (lambda value: is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("image_mean", "image_std"), (_are_three, "three numbers")),
}
_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of interpolations."""


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file belongs to a transformers folder."""
    return find(path) is not None


def find(path: Path) -> Path | None:
    """Return the weights file of a transformers folder that a path names; None if there is none.

    Raises `CheckpointError` as `find_weights` does.
    """
    return find_weights(path, NAME, _is_transformers)


def _is_transformers(config: Any) -> bool:
    if not isinstance(config, dict) or "architecture" in config:
        return False
    return config.get("model_type") == "resnet" or config.get("architectures") == [_CLASS]


def read(path: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read the weights file that `find` returns, and the configurations next to it. There are no
    velocities.

    Raises `CheckpointError` if a file is damaged, or if the network or its preprocessing is not
    supported.
    """
    config, ignored = _read_fields(path.parent / CONFIG, choice)
    processor: Mapping[str, Any] = {}
    others = [path.parent / CONFIG]
    if (path.parent / PROCESSOR).is_file():
        others.append(path.parent / PROCESSOR)
        processor, more = _read_fields(others[-1], choice)
        ignored += more
    try:
        spec = _read_network(config)
        changes = _read_processor(processor)
        Recipe.of(changes)
    except (CheckpointError, RecipeError) as error:
        raise CheckpointError(f"{path.parent}: {error}") from None
    model = name_model(spec)
    weights = read_state_dict(path, read_arrays(path), choice=replace(choice, model=model))
    labels = config.get("id2label", {})
    try:
        classes, about = read_classes(labels, weights.recipe.logits, "id2label")
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent / CONFIG}: {error}") from None
    if weights.has_classifier and len(labels) not in (0, weights.recipe.logits):
        raise CheckpointError(
            f"{path} has {weights.recipe.logits} classes, but {CONFIG} has names of {len(labels)}"
        )
    if weights.stated and changes:
        raise CheckpointError(
            f"{path} has a module that normalises images, but {PROCESSOR} says how to prepare them"
        )
    if all(name == f"LABEL_{index}" for index, name in enumerate(classes)):
        classes = ()
    recipe = weights.recipe.replace(**changes)
    return replace(
        weights,
        recipe=recipe,
        classes=classes,
        origin=NAME,
        remarks=(*weights.remarks, *about, *["there are no velocities"] * momentum),
        stated=frozenset(FIELDS).intersection(changes),
        parts=(*weights.parts, *ignored),
        others=tuple(others),
        original=Original(NAME, partial(_write_original, recipe, weights.state)),
    )


def _write_original(recipe: Recipe, state: State, folder: Path) -> None:
    write(folder / "model", recipe, state, ())


def _read_fields(path: Path, choice: WeightsChoice) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the fields of a configuration that the user does not leave out, and the account of the
    others. Raises `CheckpointError`."""
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is a {type(fields).__name__}; expected a table of fields")
    return split_ignored({name: v for name, v in fields.items() if v is not None}, choice)


def _read_network(config: Mapping[str, Any]) -> ModelSpec:
    """Return the network of a `config.json`. Raises `CheckpointError` if Lockstep does not have it,
    or for a field that may change its results."""
    known = {*_CONFIG_CHECKS, *_INFORMATION.split()}
    refuse_effects({name: value for name, value in config.items() if name not in known})
    check_fields(config, _CONFIG_CHECKS)
    fields = _DEFAULTS | dict(config)
    expansion = {"basic": 1, "bottleneck": 4}[fields["layer_type"]]
    if any(size % expansion for size in fields["hidden_sizes"]):
        raise CheckpointError(
            f"hidden_sizes is {fields['hidden_sizes']}; expected multiples of {expansion}"
        )
    is_v1 = expansion == 4 and fields["downsample_in_bottleneck"]
    return ModelSpec(
        block=fields["layer_type"],
        layers=tuple(fields["depths"]),
        stem_width=fields["embedding_size"],
        widths=tuple(size // expansion for size in fields["hidden_sizes"]),
        expansion=expansion,
        stride_in="1x1" if is_v1 else "3x3",
    )


def _read_processor(fields: Mapping[str, Any]) -> Changes:
    """Return the preprocessing of a `preprocessor_config.json`; none without a type of processor.
    Raises `CheckpointError` if Lockstep cannot prepare images like this."""
    place = "image_processor_type"
    if place not in fields:
        place = "feature_extractor_type"  # the older name
    if place not in fields:
        return {}
    kind = str(fields[place])
    for name in sorted(fields.keys() - {*_PROCESSOR_CHECKS, *_OF_PROCESSOR.split()}):
        if fields[name] is not False:
            raise CheckpointError(
                f"{name} is {fields[name]!r:.60}: it may change how images are prepared; leave it"
                f" out if it changes nothing: --ignore {name}"
            )
    for name in sorted({"size", "resample", "image_mean", "image_std"} - fields.keys()):
        raise CheckpointError(f"{name} is missing in {PROCESSOR}; expected it with {kind}")
    check_fields(fields, _PROCESSOR_CHECKS)
    full = _DEFAULTS | dict(fields)
    bare = re.sub("(Fast|Pil)$", "", kind).replace("FeatureExtractor", "ImageProcessor")
    resize = crop = _list_sides(full["size"])[0]
    crops = full.get("do_center_crop", False)
    if bare == "ConvNextImageProcessor" and resize < _STRETCHING and not crops:
        resize = int(crop / full["crop_pct"])
    elif bare in _CROPPING and crops and "crop_size" in full:
        crop = _list_sides(full["crop_size"])[0]
    else:
        raise CheckpointError(
            f"{kind} with size {full['size']!r:.60} stretches images, or prepares them in a way"
            f" that Lockstep does not have; expected {' or '.join(_CROPPING)} with do_center_crop,"
            f" or ConvNextImageProcessor below {_STRETCHING} pixels; to set the preprocessing"
            f" yourself: --ignore {place}"
        )
    # As transformers, images from 0 to 255 are scaled first.
    scale = full["rescale_factor"] if full.get("do_rescale", True) else 1
    if not full.get("do_normalize", True):
        full |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    return {
        **PILLOW,
        **{"image_size": crop, "eval_resize": resize, "eval_crop": crop},
        **{"eval_offset_rounding": "down", "exif_orientation": True},
        "interpolation": _INTERPOLATIONS[full["resample"]],
        "mean": tuple(round(value / scale, 9) for value in full["image_mean"]),
        "std": tuple(round(value / scale, 9) for value in full["image_std"]),
    }


def write(
    target: Path,
    recipe: Recipe,
    state: State,
    classes: tuple[str, ...],
    into: Path | None = None,
    *,
    certified: bool = True,
) -> Written:
    """Write a new folder for transformers; return its files and remarks on what they do not hold.

    The folder appears when it is complete. `into` is as in `write_new`. Raises `CheckpointError` if
    the folder exists, or transformers' ResNet cannot be this network.
    """
    config = _build_config(recipe, classes)
    processor = _build_processor(recipe)
    expected = check_state(recipe.spec, recipe.logits, state)
    weights = build_state_dict(expected, state.tensors, to_transformers_name, step=state.step)
    files = {CONFIG: config, PROCESSOR: processor}
    written = write_folder(target, weights, files, into, certified=certified)
    return replace(written, remarks=tuple(_describe_differences(recipe, state, processor)))


def to_transformers_name(name: str) -> str:
    """Return transformers' name of a canonical tensor.

    >>> to_transformers_name("layer1.0.downsample.1.bias")
    'resnet.encoder.stages.0.layers.0.shortcut.normalization.bias'
    """
    if name.startswith("fc."):
        return name.replace("fc.", "classifier.1.")
    match = _LAST_LAYER.fullmatch(name)
    if match is None:
        kind = "convolution" if name.startswith("conv1.") else "normalization"
        return f"resnet.embedder.embedder.{kind}.{name.rpartition('.')[2]}"
    stage, block, conv, norm, shortcut, leaf = match.groups()
    kind = "convolution" if conv or shortcut == "0" else "normalization"
    layer = "shortcut" if shortcut else f"layer.{int(conv or norm) - 1}"
    return f"resnet.encoder.stages.{int(stage) - 1}.layers.{block}.{layer}.{kind}.{leaf}"


def _build_config(recipe: Recipe, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return `config.json`. Raises `CheckpointError` if transformers' ResNet cannot be the
    recipe's network."""
    spec = recipe.spec
    config = {
        **{"architectures": [_CLASS], "model_type": "resnet", "torch_dtype": "float32"},
        **{"num_channels": 3, "embedding_size": spec.stem_width, "depths": list(spec.layers)},
        "hidden_sizes": [width * spec.expansion for width in spec.widths],
        **{"layer_type": spec.block, "hidden_act": "relu", "downsample_in_first_stage": False},
        "downsample_in_bottleneck": spec.block == "bottleneck" and spec.stride_in == "1x1",
    }
    limits: dict[str, Any] = {"groups": 1, "expansion": 4}
    if spec.block == "basic":
        limits = {"groups": 1, "expansion": 1, "stride_in": "3x3"}
    differences = [
        f"{name} is {getattr(spec, name)}, expected {limit}"
        for name, limit in limits.items()
        if getattr(spec, name) != limit
    ]
    if differences:
        raise CheckpointError(
            f"transformers' ResNet cannot be this network: {'; '.join(differences)}. {OTHERS}; timm"
            " has more networks with a name, and transformers loads its folder if timm is installed"
        )
    names = classes or tuple(f"LABEL_{index}" for index in range(recipe.logits))
    config["id2label"] = {str(index): name for index, name in enumerate(names)}
    config["label2id"] = {name: index for index, name in enumerate(names)}
    return config | {"problem_type": "single_label_classification"}


def _build_processor(recipe: Recipe) -> dict[str, Any]:
    """Return `preprocessor_config.json`."""
    side = recipe.eval_crop
    return {
        **{"image_processor_type": _CROPPING[0], "do_convert_rgb": True, "do_resize": True},
        "size": {"shortest_edge": recipe.eval_resize},
        "resample": {name: number for number, name in _INTERPOLATIONS.items()}[
            recipe.interpolation
        ],
        **{"do_center_crop": True, "crop_size": {"height": side, "width": side}},
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        "image_mean": [round(value / 255, 12) for value in recipe.mean],
        "image_std": [round(value / 255, 12) for value in recipe.std],
    }


def _describe_differences(
    recipe: Recipe, state: State, processor: Mapping[str, Any]
) -> Iterator[str]:
    fields = recipe.fields()
    differences = []
    for name, value in Recipe.of(_read_processor(processor)).fields().items():
        if name in FIELDS and name != "antialias" and fields[name] != value:
            differences.append(f"{name} {value}, not {fields[name]}")
    if recipe.dct_scaling:
        differences.append("JPEGs at full size, not with dct_scaling")
    if differences:
        yield f"transformers' image processor prepares images with {', '.join(differences)}"
    for remark in describe_model(recipe, "transformers' ResNet"):
        if not remark.startswith("this is a v1 model"):
            yield remark
    if state.momentum:
        yield "velocities were left out, since the folder holds only weights"
