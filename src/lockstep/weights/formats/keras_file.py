"""Files of Keras' ResNet50, ResNet101 and ResNet152: conversion from and to canonical names and
layouts.

`keras.applications` has v1 of these models: the first 1x1 of a block has the stride. Names of
layers are:

    conv1_conv, conv1_bn                          the stem
    conv<stage>_block<i>_<j>_{conv,bn}            a block; stages count from 2, blocks from 1
    predictions                                   the classifier; missing with include_top=False

j is 1 to 3, and 0 for the shortcut.

Files of 2015 to 2018 have other names and another epsilon: `keras_branches`.

Kernels are HWIO, the classifier is [in, out], and batch norm's epsilon is 1.001e-5. Convolutions
have a bias. In front of a batch norm it is the same as a smaller running mean, so reading subtracts
it and writing stores zeros.

`keras.applications.resnet.preprocess_input` gives images as BGR minus (103.939, 116.779, 123.68),
without a standard deviation. No weights file says what its images were. These functions assume that
preprocessing, and turn the stem's input channels from BGR to RGB and back.

Source: keras/src/applications/resnet.py and imagenet_utils.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import MODELS, Block, Conv, ModelSpec, Tensor
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import keras_branches, keras_process, keras_variables
from lockstep.weights.formats.common import (
    Matching,
    Names,
    Shape,
    Written,
    add_layer,
    check_state,
    choose_model,
    describe_converted,
    describe_omitted_parts,
    describe_unused,
    is_stem,
    match_model,
    name_convolutions,
    name_model,
    split_block_name,
    write_new,
)
from lockstep.weights.formats.keras_variables import Layers, Variables
from lockstep.weights.formats.structure import BATCH_NORM
from lockstep.weights.opened_weights import Weights, list_arrays
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "Keras"

EPSILON = 1.001e-5
MEAN = (123.68, 116.779, 103.939)
STD = (1.0, 1.0, 1.0)
"""Preprocessing of keras.applications' ResNets, as RGB."""
_MODELS = {"resnet50-v1": "ResNet50", "resnet101-v1": "ResNet101", "resnet152-v1": "ResNet152"}
_HEAD = "predictions"

_KINDS = {"conv2d": "_conv", "batch_normalization": "_bn"}
"""Classes of layers in files that number them, and the ends of their names."""
_PREPROCESSING = ("Rescaling", "Normalization", "Resizing", "CenterCrop")


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file holds HDF5, or is a `.keras` archive."""
    return keras_variables.is_keras(head, path)


def find(path: Path) -> Path | None:
    """Return the path if it is a file whose name ends as Keras' do; None otherwise."""
    return path if path.suffix in (".h5", ".keras") and path.is_file() else None


def read(path: Path, *, momentum: bool = False, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a ResNet of `keras.applications`: weights or a whole model, also one with another
    classifier on top.

    No velocities are read, whatever `momentum` is. Raises `CheckpointError` if the file is damaged,
    incomplete or of another model, and `BackendError` if h5py is missing.
    """
    keras_variables.require_h5py()
    keras_process.check(path)
    with keras_variables.open_variables(path) as variables:
        if keras_branches.has_branches(variables):
            return _read_network(path, keras_branches.rename_variables(variables), is_old=True)
        return _read_network(path, _name_layers(variables), is_old=False)


def _read_network(path: Path, variables: Variables, *, is_old: bool) -> Weights:
    """Read a ResNet from variables with later names, also of a file with old ones."""
    matching, head = _match_model(path, variables)
    spec = replace(matching.spec, stride_in=_find_stride(path, variables.layers))
    epsilon = _find_epsilon(path, variables.layers, keras_branches.EPSILON if is_old else EPSILON)
    recipe = Recipe(
        model=name_model(spec),
        logits=matching.logits,
        precision="fp32",
        bn_epsilon=epsilon,
        mean=MEAN,
        std=STD,
    )
    values = {}
    sources = []
    for tensor in spec.list_tensors(matching.logits):
        name = matching.names[tensor.name]
        if name in variables.shapes:
            values[tensor.name] = _read_tensor(variables, name, tensor)
            sources.append((tensor.name, variables.place(name)))
    used = set(matching.names.values())
    for conv, scope in _name_scopes(spec).items():
        bias = f"{scope}_conv/bias"
        if bias in variables.shapes:
            used.add(bias)
            sources.append((f"{conv.bn_name}.running_mean", variables.place(bias)))
    remarks = [*_describe_file(variables, matching, head, recipe.model)]
    if is_old:
        remarks += _describe_old_names(variables.layers, epsilon)
    remarks += describe_unused(sorted(variables.shapes.keys() - used))
    stored = list_arrays(variables.describe_arrays(), sources)
    state = State(0, values, {})
    return Weights(recipe, state, (), path, "Keras", tuple(remarks), stored=stored)


def stored(path: Path) -> dict[str, np.ndarray]:
    """Return the variables of a file by layer and name, such as `conv1_conv/kernel`, in Keras'
    layouts, float32.

    Raises `CheckpointError` if the file is damaged, and `BackendError` if h5py is missing.
    """
    with keras_variables.open_variables(path) as variables:
        named = _name_layers(variables)
        return {name: named.read(name) for name in named.shapes}


def _name_layers(variables: Variables) -> Variables:
    """Return variables by the layers' names, also where a file only numbers its layers: in the
    order of creation."""
    convs = _sort_layers("conv2d", variables)
    if not convs or "conv1_conv/kernel" in variables.shapes:
        return variables
    created: list[str] = []
    for name in _MODELS:
        if not created and len(_name_scopes(MODELS[name])) == len(convs):
            created = _list_created_layers(MODELS[name])
    layers = dict.fromkeys(_sort_layers("dense", variables)[:1], _HEAD)
    for kind, end in _KINDS.items():
        names = [layer for layer in created if layer.endswith(end)]
        layers |= zip(_sort_layers(kind, variables), names, strict=False)
    renamed = {}
    for name in variables.shapes:
        layer, _, variable = name.rpartition("/")
        renamed[name] = f"{layers.get(layer, layer)}/{variable}"
    return variables.rename(renamed)


def _sort_layers(kind: str, variables: Variables) -> list[str]:
    """Return the layers of a class by their numbers: `conv2d`, `conv2d_1`, `conv2d_2`."""
    counts = {}
    for name in variables.shapes:
        layer = name.rpartition("/")[0]
        count = layer.removeprefix(kind).removeprefix("_") or "0"
        if layer.startswith(kind) and count.isdecimal():
            counts[layer] = int(count)
    return sorted(counts, key=lambda layer: counts[layer])


def _list_created_layers(spec: ModelSpec) -> list[str]:
    """Return the layers that have variables as Keras creates them: a block's shortcut before its
    last convolution."""
    scopes = _name_scopes(spec)
    layers = ["conv1_conv", "conv1_bn"]
    for block in spec.list_blocks():
        *first, last = (scopes[conv] for conv in block.convs)
        for scope in first:
            layers += [f"{scope}_conv", f"{scope}_bn"]
        ends = [last] if block.shortcut is None else [scopes[block.shortcut], last]
        for kind in ("_conv", "_bn"):
            layers += [f"{scope}{kind}" for scope in ends]
    return [*layers, _HEAD]


def _name_scopes(spec: ModelSpec) -> dict[Conv, str]:
    """Return what the names of the layers of every convolution and its batch norm begin with."""

    def name_block(block: Block) -> str:
        stage, number = split_block_name(block)
        return f"conv{stage + 1}_block{number + 1}"

    return name_convolutions(spec, "conv1", name_block, "_", "_0")


def _name_tensors(spec: ModelSpec, head: str = _HEAD) -> Names:
    """Return the variable of every canonical tensor, `<layer>/<variable>`, given the classifier's
    layer."""
    table = {"fc.weight": f"{head}/kernel", "fc.bias": f"{head}/bias"}
    for conv, scope in _name_scopes(spec).items():
        add_layer(table, conv, f"{scope}_conv/kernel", BATCH_NORM, f"{scope}_bn/")
    return table


def _match_model(path: Path, variables: Variables) -> tuple[Matching, str]:
    """Return the model that has exactly the kernels of a file, and the classifier's layer, "" if it
    has none."""
    shapes = dict(variables.shapes)
    inputs = MODELS["resnet50-v1"].features
    head = _find_head(shapes, inputs)
    if not head:
        shapes |= {f"{_HEAD}/kernel": (inputs, 1), f"{_HEAD}/bias": (1,)}

    used = {name: shape for name, shape in shapes.items() if not name.endswith("_conv/bias")}
    matchings = [
        match_model(
            (name, MODELS[name]), _name_tensors(MODELS[name], head or _HEAD), used, _list_shapes
        )
        for name in _MODELS
    ]
    return choose_model(matchings, path, "Keras", variables.shapes), head


def _find_head(shapes: Mapping[str, Shape], inputs: int) -> str:
    """Return the layer of the classifier: `predictions`, or else the only dense layer; "" if there
    is none."""
    if f"{_HEAD}/kernel" in shapes:
        return _HEAD
    heads = []
    for name, shape in shapes.items():
        layer, _, variable = name.rpartition("/")
        if variable == "kernel" and len(shape) == 2:
            heads.append(layer)
    if len(heads) == 1 and shapes[f"{heads[0]}/kernel"][0] == inputs:
        return heads[0]
    return ""


def _list_shapes(tensor: Tensor) -> tuple[Shape, ...]:
    if tensor.role == "conv_weight":
        outputs, inputs, height, width = tensor.shape
        return ((height, width, inputs, outputs),)
    return (tensor.shape[::-1],)


def _read_tensor(variables: Variables, name: str, tensor: Tensor) -> np.ndarray:
    """Return a tensor as a new canonical float32 array."""
    values = variables.read(name)
    if tensor.role == "conv_weight":
        values = values.transpose(3, 2, 0, 1)
        return np.array(values[:, ::-1] if is_stem(tensor) else values, order="C")
    if tensor.role == "bn_mean":
        bias = f"{name.removesuffix('_bn/moving_mean')}_conv/bias"
        if bias in variables.shapes:
            return _subtract_bias(variables, name, values, bias)
    return np.ascontiguousarray(values.T)


def _subtract_bias(variables: Variables, name: str, mean: np.ndarray, bias: str) -> np.ndarray:
    shape = variables.shapes[bias]
    if shape != mean.shape:
        raise CheckpointError(
            f"{variables.path}: {bias} is {list(shape)}, but {name} is {list(mean.shape)};"
            " expected the same shape"
        )
    return (mean.astype(np.float64) - variables.read(bias)).astype(np.float32)


def _find_epsilon(path: Path, layers: Layers, default: float) -> float:
    """Return batch norm's epsilon; the default if no layers are described. Raises `CheckpointError`
    if there are several."""
    epsilons = set()
    for layer in layers.values():
        if layer.get("class_name") == "BatchNormalization":
            epsilons.add(layer.get("epsilon"))
    epsilons = epsilons or {default}
    epsilon = min(epsilons, key=str)
    if len(epsilons) > 1 or not isinstance(epsilon, float) or epsilon <= 0:
        raise CheckpointError(
            f"{path}: its batch norms have the epsilons {sorted(map(str, epsilons))}; expected one"
            " for all"
        )
    return epsilon


def _find_stride(path: Path, layers: Layers) -> Any:
    """Return which convolution of a block has the stride: the first 1x1, unless the file describes
    other layers."""
    strides = [_read_stride(layers.get(f"conv3_block1_{i}_conv", {})) for i in (1, 2)]
    if strides == [1, 2]:
        return "3x3"
    if layers.get("conv3_block1_1_conv") and strides != [2, 1]:
        raise CheckpointError(
            f"{path}: the first block of its stage 3 has the strides {strides}; expected [2, 1] or"
            " [1, 2]"
        )
    return "1x1"


def _read_stride(layer: Mapping[str, Any]) -> Any:
    strides = layer.get("strides", layer.get("subsample"))  # Keras 1's name
    if isinstance(strides, list) and len(strides) == 2 and strides[0] == strides[1]:
        return strides[0]
    return strides


def _describe_file(
    variables: Variables, matching: Matching, head: str, model: str | ModelSpec
) -> Iterator[str]:
    yield (
        "assumes images as keras.applications.resnet.preprocess_input gives them (BGR minus"
        " 103.939, 116.779, 123.68); the stem's input channels were turned to RGB, and the recipe's"
        " mean and std are set for that"
    )
    if any(name.endswith("_conv/bias") for name in variables.shapes):
        yield (
            "biases of convolutions were subtracted from the running means, which computes the same"
        )
    if model not in _MODELS:
        yield "the file describes blocks with their stride in the 3x3, unlike keras.applications"
    if not head:
        yield "it has no classifier"
    elif head != _HEAD:
        yield f"the classifier is the layer {head}"
    names = [name for name in matching.names.values() if name in variables.shapes]
    yield from describe_converted(list(filter(variables.is_converted, names)))
    layers = variables.layers.items()
    skipped = [name for name, layer in layers if layer.get("class_name") in _PREPROCESSING]
    if skipped:
        yield (
            f"the model has layers for preprocessing, which were not read: {', '.join(skipped[:5])}"
        )
    if variables.has_optimizer:
        yield "the optimizer's variables were not read"


def _describe_old_names(layers: Layers, epsilon: float) -> Iterator[str]:
    yield (
        f"its names are those of Keras until 2018, so its batch norms add {epsilon:g} to the"
        " variance, and its kernels are taken for those of TensorFlow's backend"
    )
    if "pool1_pad" not in layers:
        yield (
            "versions of Keras without a layer pool1_pad pad otherwise before the first pooling, so"
            " their logits differ a little; weights fit both"
        )


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
    spec = recipe.spec
    names = _name_tensors(spec)
    values = {
        names[tensor.name]: _convert_tensor(state.tensors, tensor, recipe)
        for tensor in check_state(spec, recipe.logits, state)
    }
    for scope in _name_scopes(spec).values():
        outputs = values[f"{scope}_conv/kernel"].shape[-1]
        values[f"{scope}_conv/bias"] = np.zeros(outputs, np.float32)
    layers = _group_by_layer(values, spec)
    store = keras_variables.store_named
    if target.name.endswith(".weights.h5"):
        store = keras_variables.store_numbered
    write_new(target, {target: lambda path: store(h5py, path, layers)}, into=into)
    biases = (
        "a bias of zeros was added to every convolution, since Keras' layers have one; it changes"
        " no result"
    )
    return Written((target,), (target,), tuple(_describe_differences(recipe, state)), (biases,))


def _group_by_layer(
    values: Mapping[str, np.ndarray], spec: ModelSpec
) -> dict[str, dict[str, np.ndarray]]:
    """Return variables by layer and name. Layers are in the order in which Keras creates and lists
    them."""
    layers: dict[str, dict[str, np.ndarray]] = {layer: {} for layer in _list_created_layers(spec)}
    for variable in ("kernel", "bias", *BATCH_NORM.values()):
        for layer, variables in layers.items():
            if f"{layer}/{variable}" in values:
                variables[variable] = values[f"{layer}/{variable}"]
    return layers


def _convert_tensor(
    values_by_name: Mapping[str, np.ndarray], tensor: Tensor, recipe: Recipe
) -> np.ndarray:
    """Return a tensor in Keras' layout, for images and an epsilon as Keras has them."""
    values = values_by_name[tensor.name]
    if is_stem(tensor):
        values = (values / np.array(recipe.std).reshape(1, 3, 1, 1)).astype(np.float32)[:, ::-1]
    if tensor.role == "bn_scale" and recipe.bn_epsilon != EPSILON:
        norm = tensor.name.removesuffix(".weight")
        variance = values_by_name[f"{norm}.running_var"].astype(np.float64)
        factors = np.sqrt((variance + EPSILON) / (variance + recipe.bn_epsilon))
        values = (values * factors).astype(np.float32)
    return values.transpose(2, 3, 1, 0) if tensor.role == "conv_weight" else values.T


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
            f"scales of batch norm were changed for Keras' epsilon {EPSILON}, so that results are"
            " equal"
        )
    yield from describe_omitted_parts(state)
