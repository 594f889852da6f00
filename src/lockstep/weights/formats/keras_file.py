"""Files of Keras' ResNet50, ResNet101 and ResNet152: conversion from and to canonical names and
layouts.

`keras.applications` has v1 of these models: the first 1x1 of a block has the stride. Names of
layers are:

    conv1_conv, conv1_bn                          the stem
    conv<stage>_block<i>_<j>_{conv,bn}            a block; stages count from 2, blocks from 1
    predictions                                   the classifier; missing with include_top=False

j is 1 to 3, and 0 for the shortcut.

Files of 2015 to 2018 have other names and another epsilon: `keras_variables`.

Kernels are HWIO, the classifier is [in, out], and batch norm's epsilon is 1.001e-5. Convolutions
have a bias. In front of a batch norm it is the same as a smaller running mean, so reading subtracts
it and writing stores zeros.

`keras.applications.resnet.preprocess_input` gives images as BGR minus (103.939, 116.779, 123.68),
without a standard deviation. No weights file says what its images were. These functions assume that
preprocessing, and turn the stem's input channels from BGR to RGB and back.

Source: keras/src/applications/resnet.py and imagenet_utils.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

import numpy as np

from lockstep.models.architectures import MODELS, Conv, ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights.formats import keras_process, keras_variables, refuse_many
from lockstep.weights.formats.account import refuse_leftover, split_ignored
from lockstep.weights.formats.common import (
    Names,
    Written,
    check_state,
    describe_converted,
    describe_omitted_parts,
    is_stem,
    write_new,
)
from lockstep.weights.formats.keras_calls import MODELS as INNER_MODELS
from lockstep.weights.formats.keras_calls import WITH_ARRAYS
from lockstep.weights.formats.keras_layers import (
    IN_TRAINING,
    Translation,
    write_application,
    write_original,
)
from lockstep.weights.formats.keras_variables import VARS, Variables
from lockstep.weights.formats.network_walk import KERAS_MEAN, KERAS_STD, follow
from lockstep.weights.formats.shape_matching import BATCH_NORM
from lockstep.weights.formats.table import HWIO, name_arrays, name_convolutions, name_layers
from lockstep.weights.opened_weights import Weights, list_arrays
from lockstep.weights.original import Original
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "Keras"

EPSILON = 1.001e-5
MEAN = KERAS_MEAN
STD = KERAS_STD
_MODELS = {"resnet50-v1": "ResNet50", "resnet101-v1": "ResNet101", "resnet152-v1": "ResNet152"}
_HEAD = "predictions"
_CONTAINERS = ("layers", "_layer_checkpoint_dependencies")
"""Groups of a model's layers in files that number them."""
_NAMES = re.compile(r"conv\d_(block\d+_)?(\d_)?(relu|add|out|pad)|pool1_(pad|pool)|avg_pool")
"""Names of layers of Keras' ResNets that have no variables."""
_CLASSES = {
    **{"add": "add", "out": "relu", "activation": "relu", "pad": "zeropadding2d"},
    **{"pool": "maxpooling2d", "globalaveragepooling2d": "averagepooling2d"},
}
"""Classes of layers by what their names end with, and by others that compute the same."""
_PASSING = ("input", "inputlayer", "flatten", "identity", *INNER_MODELS, "toplevelmodelweights")
"""Classes that change nothing, in small letters without `_`."""
_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError, RecipeError)
_UNDESCRIBED = (
    "it holds only weights. Assumed: the network is that of keras.applications, without further"
    " layers, and with softmax after the classifier"
)
_OLD = (
    "its layer names are those of Keras until 2018. Assumed: batch norms add"
    f" {keras_variables.OLD_EPSILON:g} to the variance; kernels are stored as by the TensorFlow"
    " backend; the first pool's input is padded by 1 (versions without a layer pool1_pad do not"
    " pad)"
)


matches = keras_variables.is_keras


def find(path: Path) -> Path | None:
    """Return the path if it is a file whose name ends as Keras' do; None otherwise."""
    return path if path.suffix in (".h5", ".keras") and path.is_file() else None


def read(path: Path, *, momentum: bool = False, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a ResNet that a file describes, or the weights of one of `keras.applications`.

    No velocities are read, whatever `momentum` is. Raises `CheckpointError` if the file is damaged,
    incomplete or of another model, and `BackendError` if h5py is missing.
    """
    keras_variables.require_h5py()
    keras_process.check(path)
    with keras_variables.open_variables(path) as variables:
        refuse_many(path, len(variables.datasets))
        if variables.description is not None:
            places = {place: place for place in variables.datasets}
            return _read_model(variables, variables.description, places, choice)
        names = variables.list_names()
        is_old = keras_variables.has_branches(names)
        if is_old:
            names = keras_variables.rename_variables(path, names)
        titles = [title for group, title in variables.groups.items() if group != VARS]
        is_numbered = not any(titles) and "conv2d/kernel" in names
        places = {place: place for place in names.values()} if is_numbered else names
        head = _find_head(names, choice)
        spec = _choose_spec(path, names, choice, is_numbered=is_numbered)
        epsilon = keras_variables.OLD_EPSILON if is_old else EPSILON
        description = _describe_network(spec, head, epsilon)
        weights = _read_model(variables, description, places, choice, _list_strangers(variables))
        original = None
        if head and not is_numbered and not is_old and weights.recipe.model in _MODELS:
            renamed = {name.replace(f"{head}/", f"{_HEAD}/"): name for name in names}
            arrays = {name: variables.read(names[old]) for name, old in renamed.items()}
            model = _MODELS[str(weights.recipe.model)]
            about = {"model": model, "classes": weights.recipe.logits}
            write = partial(write_application, about, arrays)
            original = Original(NAME, write, "bgr", channels_last=True)
        return replace(weights, original=original).add_remarks(_OLD if is_old else _UNDESCRIBED)


def _read_model(
    variables: Variables,
    description: Any,
    places: Mapping[str, str],
    choice: WeightsChoice,
    strangers: Sequence[str] = (),
) -> Weights:
    """Read a model from its description and the paths of its arrays. `strangers` are layers that
    the description does not have."""
    path = variables.path
    unknown: list[str] = []
    try:
        model = Translation(description, places, variables, choice)
        unknown = model.unknown
        network = follow(model.graph)
        recipe = network.build_recipe()
    except _ERRORS as error:
        hint = ""
        if unknown:
            hint = (
                ". If a layer has no effect on inference, leave it out: lockstep convert"
                f" {quote(str(path))} weights.safetensors --ignore {quote(unknown[0])}"
            )
        raise CheckpointError(f"{path} is not a ResNet that can be read: {error}{hint}") from None
    used = {*model.places.values(), *(part.name for part in model.parts)}
    rest: dict[str, tuple[int, ...]] = dict.fromkeys(strangers, ())
    rest |= {
        name: variables.datasets[place].shape for name, place in places.items() if place not in used
    }
    leftover, parts = split_ignored(rest, choice)
    if leftover:
        raise refuse_leftover(path, "a Keras ResNet", sorted(leftover))
    halves = [name for name in places if variables.find_type(places[name]) != "float32"]
    remarks = [*network.remarks, *network.describe_units(), *describe_converted(halves)]
    if model.rounds:
        remarks.append("its layers compute in 16 bits; here they compute in float32")
    write = partial(write_original, model, network.head.output)
    tensors = network.build_tensors()
    if not model.has_classifier:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("fc.")}
        remarks.append("it has no classifier")
    return Weights(
        recipe,
        State(0, tensors, {}),
        (),
        path,
        NAME,
        tuple(remarks),
        stated=network.stated,
        assumed_as="" if network.has_keras_names else "torchvision-v1",
        parts=(*variables.parts, *model.parts, *network.parts, *parts),
        original=network.describe_original(NAME, write, rounds=bool(halves) or model.rounds),
        stored=list_arrays(variables.describe_arrays(), network.list_sources(model.graph)),
    )


def _choose_spec(
    path: Path, names: Mapping[str, str], choice: WeightsChoice, *, is_numbered: bool
) -> ModelSpec:
    """Return the network that the user chooses, or the largest one of `keras.applications` whose
    convolutions a file has. Raises `CheckpointError` if there is none."""
    if choice.model is not None:
        return next(iter(choice.list_models().values()))
    count = sum(bool(re.fullmatch(r"conv2d(_\d+)?/kernel", name)) for name in names)
    for name in reversed(_MODELS):
        scopes = _name_scopes(MODELS[name]).values()
        has_all = all(f"{scope}_conv/kernel" in names for scope in scopes)
        if (is_numbered and count == len(scopes)) or has_all:
            return MODELS[name]
    raise CheckpointError(
        f"{path} is not a complete ResNet as Keras saves it: expected the variables of"
        f" {', '.join(_MODELS.values())}, or a model that describes its layers; the first of its"
        f" {len(names)} arrays are {sorted(names)[:3]}"
    )


def _find_head(names: Iterable[str], choice: WeightsChoice) -> str:
    """Return the layer of the classifier: `predictions`, or else the only other layer with a kernel
    that is none of the network's; "" if there is none."""
    layers = {name.rpartition("/")[0] for name in names if name.endswith("/kernel")}
    heads = [layer for layer in layers if not layer.endswith("_conv") and layer[:6] != "conv2d"]
    heads = [layer for layer in heads if not choice.is_ignored(f"{layer}/kernel")]
    if _HEAD in heads:
        return _HEAD
    return heads[0] if len(heads) == 1 else ""


def _describe_network(spec: ModelSpec, head: str, epsilon: float) -> dict[str, Any]:
    """Return the description of a network of `keras.applications`, with its layers in the order in
    which Keras creates them. `head` is the name of its classifier, "" if it has none."""
    layers: list[dict[str, Any]] = []

    def add(kind: str, name: str, *inputs: str, **config: Any) -> str:
        nodes = [[[value, 0, 0] for value in inputs]]
        layers.append(
            {"class_name": kind, "config": {"name": name, **config}, "inbound_nodes": nodes}
        )
        return name

    def convolve(value: str, conv: Conv) -> str:
        scope = scopes[conv]
        value = add("ZeroPadding2D", f"{scope}_pad", value, padding=conv.kernel // 2)
        settings = {"strides": conv.stride, "groups": conv.groups, "padding": "valid"}
        return add("Conv2D", f"{scope}_conv", value, **settings)

    def normalise(value: str) -> str:
        return add("BatchNormalization", value.replace("_conv", "_bn"), value, epsilon=epsilon)

    scopes = _name_scopes(spec)
    [stem, *_] = spec.list_stem()
    value = add("ReLU", "conv1_relu", normalise(convolve("image", stem)))
    value = add("ZeroPadding2D", "pool1_pad", value, padding=1)
    value = add("MaxPooling2D", "pool1_pool", value, padding="valid", pool_size=3, strides=2)
    for block in spec.list_blocks():
        main = value
        for conv in block.convs[:-1]:
            norm = normalise(convolve(main, conv))
            main = add("ReLU", f"{norm}_relu", norm)
        if block.shortcut is not None:
            value = convolve(value, block.shortcut)
        main = convolve(main, block.convs[-1])
        if block.shortcut is not None:
            value = normalise(value)
        value = add("Add", f"{block.name}_add", value, normalise(main))
        value = add("ReLU", f"{block.name}_out", value)
    value = add("GlobalAveragePooling2D", "avg_pool", value)
    if head:
        value = add("Dense", head, value)
    ends = {"input_layers": [["image", 0, 0]], "output_layers": [[value, 0, 0]]}
    return {"class_name": "Functional", "config": {"layers": layers, **ends}}


def _list_strangers(variables: Variables) -> list[str]:
    """Return the layers without variables that Keras' ResNets do not have, as far as the file lists
    its layers."""
    filled = {str(above) for path in variables.datasets for above in PurePosixPath(path).parents}
    layers = []
    for group in variables.groups.keys() - filled:
        above, _, last = group.rpartition("/")
        if last != VARS and (not above or above.endswith(_CONTAINERS)):
            name = variables.groups.get(f"{group}/{VARS}") or last
            kind = re.sub(r"_\d+$", "", last).replace("_", "")
            is_known = _NAMES.fullmatch(name) is not None
            if is_known and name != "avg_pool":
                kind = name.rpartition("_")[2]
            layers.append((not is_known, len(last), last, name, _CLASSES.get(kind, kind)))
    blocks = sum(len(data.shape) == 4 for data in variables.datasets.values()) // 3 - 1
    most = {"add": blocks, "relu": 3 * blocks + 1, "zeropadding2d": 2, "maxpooling2d": 1}
    most |= {"averagepooling2d": 1, "avgpool": 1}
    strangers = []
    for *_, name, kind in sorted(layers):
        if kind not in _PASSING and not IN_TRAINING.fullmatch(kind):
            most[kind] = most.get(kind, 0) - 1
            if most[kind] < 0:
                strangers.append(name)
    return strangers


def _name_scopes(spec: ModelSpec) -> dict[Conv, str]:
    """Return what the names of the layers of every convolution and its batch norm begin with."""
    block = "conv{after}_block{number}_"
    return name_convolutions(spec, "conv1", f"{block}{{conv}}", f"{block}0")


def _name_tensors(spec: ModelSpec) -> Names:
    """Return the variable of every canonical tensor, `<layer>/<variable>`."""
    scopes = _name_scopes(spec)
    ends = ("_conv/kernel", "_bn/")
    return name_layers(scopes, scopes, BATCH_NORM, (f"{_HEAD}/kernel", f"{_HEAD}/bias"), ends)


def write_keras(target: Path, recipe: Recipe, state: State, into: Path | None = None) -> Written:
    """Write weights that `keras.applications.ResNet50(weights=target, classes=recipe.logits)`
    loads; return remarks too.

    A target that ends in `.weights.h5` gets the layout of Keras 3, one that ends in `.h5` the older
    one, which Keras 2 and 3 load. `into` is as in `write_new`. Raises `CheckpointError` if Keras
    does not have the model, the name ends otherwise or the file exists already, and `BackendError`
    if h5py is missing.
    """
    if recipe.model not in _MODELS:
        named = recipe.model if isinstance(recipe.model, str) else "such model"
        raise CheckpointError(
            f"keras.applications has no {named}: its ResNets have their stride in the first 1x1."
            f" Expected weights of {', '.join(_MODELS)}"
        )
    if target.suffix != ".h5":
        raise CheckpointError(
            f"{target}: expected a name that ends in .weights.h5 or .h5, as Keras does"
        )
    if recipe.padding != "symmetric":
        raise CheckpointError(
            "keras.applications pads symmetrically; these weights have the padding"
            f" {recipe.padding}"
        )
    h5py = keras_variables.require_h5py()
    converted = _convert_tensors(recipe, state)
    values, _ = name_arrays(HWIO, _name_tensors(recipe.spec), recipe, converted)
    for scope in _name_scopes(recipe.spec).values():
        outputs = values[f"{scope}_conv/kernel"].shape[-1]
        values[f"{scope}_conv/bias"] = np.zeros(outputs, np.float32)
    layers: dict[str, dict[str, np.ndarray]] = {}
    for layer in _describe_network(recipe.spec, _HEAD, EPSILON)["config"]["layers"]:
        if layer["class_name"] in WITH_ARRAYS:
            layers[layer["config"]["name"]] = {}
    for name, value in values.items():
        layer, _, variable = name.rpartition("/")
        layers[layer][variable] = value
    store = keras_variables.store_named
    if target.name.endswith(".weights.h5"):
        store = keras_variables.store_numbered
    write_new(target, {target: lambda path: store(h5py, path, layers)}, into=into)
    biases = (
        "a bias of zeros was added to every convolution: Keras' layers have one; no result changes"
    )
    return Written((target,), (target,), tuple(_describe_differences(recipe, state)), (biases,))


def _convert_tensors(recipe: Recipe, state: State) -> State:
    """Return a state for images and an epsilon as Keras has them."""
    tensors = dict(state.tensors)
    for tensor in check_state(recipe.spec, recipe.logits, state):
        values = tensors[tensor.name]
        if is_stem(tensor):
            std = np.array(recipe.std).reshape(1, 3, 1, 1)
            tensors[tensor.name] = (values / std).astype(np.float32)[:, ::-1]
        if tensor.role == "bn_scale" and recipe.bn_epsilon != EPSILON:
            norm = tensor.name.removesuffix(".weight")
            variance = state.tensors[f"{norm}.running_var"].astype(np.float64)
            factors = np.sqrt((variance + EPSILON) / (variance + recipe.bn_epsilon))
            tensors[tensor.name] = (values * factors).astype(np.float32)
    return replace(state, tensors=tensors)


def _describe_differences(recipe: Recipe, state: State) -> Iterator[str]:
    stem = "the stem takes BGR, as keras.applications.resnet.preprocess_input gives it"
    if recipe.std != STD:
        stem += "; the recipe's std is in its kernel"
    yield stem
    if recipe.mean != MEAN:
        yield (
            f"these weights were trained with the mean {list(recipe.mean)} of RGB; preprocess_input"
            f" subtracts {list(MEAN)}, so results differ slightly, unless you subtract the first"
            " yourself"
        )
    if recipe.bn_epsilon != EPSILON:
        yield (
            f"scales of batch norm were changed for Keras' epsilon {EPSILON}, to keep results equal"
        )
    yield from describe_omitted_parts(state)
