"""Files of Keras' ResNet50, ResNet101 and ResNet152: conversion from and to canonical names and
layouts.

`keras.applications` has v1 of these models: the first 1x1 of a block has the stride. Names of
layers are:

    conv1_conv, conv1_bn                          the stem
    conv<stage>_block<i>_<j>_{conv,bn}            j is 1 to 3, and 0 for the shortcut; stages count from 2, blocks from 1
    predictions                                   the classifier; missing with include_top=False

Files of 2015 to 2018 have other names and another epsilon: `keras_branches`.

Kernels are HWIO, the classifier is [in, out], and batch norm's epsilon is 1.001e-5. Convolutions
have a bias. In front of a batch norm it is the same as a smaller running mean, so reading subtracts
it and writing stores zeros.

`keras.applications.resnet.preprocess_input` gives images as BGR minus (103.939, 116.779, 123.68),
without a standard deviation. No weights file says what its images were. These functions assume that
preprocessing, and turn the stem's input channels from BGR to RGB and back.

Source: keras/src/applications/resnet.py and imagenet_utils.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import (
    MODELS,
    Conv,
    ModelSpec,
    Tensor,
    blocks,
    features,
    model_spec,
    stem,
    tensors,
)
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import keras_branches, keras_process, keras_variables
from lockstep.weights.formats.common import (
    Matching,
    Names,
    Shape,
    Written,
    check_state,
    choose_model,
    describe_omitted_parts,
    describe_unused,
    is_stem,
    match_model,
    write_new,
)
from lockstep.weights.formats.keras_variables import Layers, Variables
from lockstep.weights.opened_weights import Weights, list_arrays

NAME = "Keras"

EPSILON = 1.001e-5
MEAN = (123.68, 116.779, 103.939)
STD = (1.0, 1.0, 1.0)
"""Preprocessing of keras.applications' ResNets, as RGB."""
_MODELS = {"resnet50-v1": "ResNet50", "resnet101-v1": "ResNet101", "resnet152-v1": "ResNet152"}
_HEAD = "predictions"
_BATCH_NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
_KINDS = {"conv2d": "_conv", "batch_normalization": "_bn"}
"""Classes of layers in files that number them, and the ends of their names."""
_PREPROCESSING = ("Rescaling", "Normalization", "Resizing", "CenterCrop")


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file holds HDF5, or is a `.keras` archive."""
    return keras_variables.is_keras(head, path)


def find(path: Path) -> Path | None:
    """Return the path if it is a file whose name ends as Keras' do; None otherwise."""
    return path if path.suffix in (".h5", ".keras") and path.is_file() else None


def read(path: Path, *, momentum: bool = False) -> Weights:
    """Read a ResNet of `keras.applications`: weights or a whole model, also one with another
    classifier on top.

    No velocities are read, whatever `momentum` is. Raises `CheckpointError` if the file is damaged,
    incomplete or of another model, and `BackendError` if h5py is missing.
    """
    keras_variables.require_h5py()
    keras_process.check(path)
    with keras_variables.opened(path) as variables:
        is_old = keras_branches.has_branches(variables)
        variables = keras_branches.renamed(variables) if is_old else _with_layer_names(variables)
        matching, head = _matched(path, variables)
        spec = MODELS[matching.model]
        logits = matching.logits
        spec = replace(spec, stride_in=_stride_in(path, variables.layers))
        model = next((name for name, known in MODELS.items() if known == spec), spec)
        epsilon = _epsilon(path, variables.layers, keras_branches.EPSILON if is_old else EPSILON)
        recipe = Recipe(
            model=model, logits=logits, precision="fp32", bn_epsilon=epsilon, mean=MEAN, std=STD
        )
        stored = [
            tensor
            for tensor in tensors(spec, logits)
            if matching.names[tensor.name] in variables.shapes
        ]
        state = State(
            0, {tensor.name: _canonical(variables, matching, tensor) for tensor in stored}, {}
        )
        biases = {
            f"{conv}/bias": f"{conv.removesuffix('_conv')}_bn/moving_mean"
            for conv in _scopes(spec).values()
        }
        used = {*matching.names.values(), *biases}
        remarks = (
            *_remarks(variables, matching, head, model),
            *(_about_branches(variables.layers, epsilon) if is_old else ()),
            *describe_unused(sorted(name for name in variables.shapes if name not in used)),
        )
        made = {matching.names[tensor.name]: tensor.name for tensor in stored}
        made |= {bias: made[mean] for bias, mean in biases.items() if bias in variables.shapes}
        held = list_arrays(
            variables.stored(), ((tensor, variables.place(name)) for name, tensor in made.items())
        )
    return Weights(recipe, state, (), path, "Keras", remarks, stored=held)


def stored(path: Path) -> dict[str, np.ndarray]:
    """Return the variables of a file by layer and name, such as `conv1_conv/kernel`, in Keras'
    layouts, float32.

    Raises `CheckpointError` if the file is damaged, and `BackendError` if h5py is missing.
    """
    keras_variables.require_h5py()
    with keras_variables.opened(path) as variables:
        named = _with_layer_names(variables)
        return {name: named.read(name) for name in named.shapes}


def _with_layer_names(variables: Variables) -> Variables:
    """Return variables by the layers' names, also where a file only numbers its layers: in the
    order of creation."""
    kinds = {kind: _counted(kind, variables.shapes) for kind in (*_KINDS, "dense")}
    if not kinds["conv2d"] or "conv1_conv/kernel" in variables.shapes:
        return variables
    names: dict[str, str] = {}
    fitting_specs = [
        MODELS[name] for name in _MODELS if len(_scopes(MODELS[name])) == len(kinds["conv2d"])
    ]
    created = _in_order_of_creation(fitting_specs[0]) if fitting_specs else []
    for kind, end in _KINDS.items():
        names |= dict(
            zip(kinds[kind], (layer for layer in created if layer.endswith(end)), strict=False)
        )
    names |= dict.fromkeys(kinds["dense"][:1], _HEAD)
    renamed = {}
    for name in variables.shapes:
        layer, _, variable = name.rpartition("/")
        renamed[name] = f"{names.get(layer, layer)}/{variable}"
    return replace(
        variables,
        shapes={renamed[name]: shape for name, shape in variables.shapes.items()},
        datasets={renamed[name]: dataset for name, dataset in variables.datasets.items()},
    )


def _counted(kind: str, names: Iterable[str]) -> list[str]:
    """Return the layers of a class in the order of their numbers: `conv2d`, `conv2d_1`, `conv2d_2`."""
    layers = {name.rpartition("/")[0] for name in names}
    counts = {
        layer: layer.removeprefix(kind).removeprefix("_") or "0"
        for layer in layers
        if layer.startswith(kind)
    }
    return sorted(
        (layer for layer, count in counts.items() if count.isdecimal()),
        key=lambda layer: int(counts[layer]),
    )


def _in_order_of_creation(spec: ModelSpec) -> list[str]:
    """Return the layers that have variables. A block's shortcut comes before its last convolution."""
    scopes = _scopes(spec)
    layers = ["conv1_conv", "conv1_bn"]
    for block in blocks(spec):
        *first, last = [scopes[conv.name].removesuffix("_conv") for conv in block.convs]
        shortcut = (
            [] if block.shortcut is None else [scopes[block.shortcut.name].removesuffix("_conv")]
        )
        layers += [f"{scope}{end}" for scope in first for end in ("_conv", "_bn")]
        layers += [f"{scope}{end}" for end in ("_conv", "_bn") for scope in (*shortcut, last)]
    return [*layers, _HEAD]


def _scopes(spec: ModelSpec) -> Names:
    """Return the layer of every convolution."""
    scopes = {stem(spec).name: "conv1_conv"}
    for block in blocks(spec):
        stage, number = block.name.removeprefix("layer").split(".")
        scope = f"conv{int(stage) + 1}_block{int(number) + 1}"
        scopes |= {conv.name: f"{scope}_{i}_conv" for i, conv in enumerate(block.convs, start=1)}
        if block.shortcut is not None:
            scopes[block.shortcut.name] = f"{scope}_0_conv"
    return scopes


def _names(spec: ModelSpec, head: str = _HEAD) -> Names:
    """Return the variable of every canonical tensor, `<layer>/<variable>`, given the classifier's
    layer."""
    table = {"fc.weight": f"{head}/kernel", "fc.bias": f"{head}/bias"}
    convs: Iterator[Conv] = (
        conv
        for block in blocks(spec)
        for conv in (*block.convs, block.shortcut)
        if conv is not None
    )
    scopes = _scopes(spec)
    for conv in (stem(spec), *convs):
        layer = scopes[conv.name]
        norm = f"{layer.removesuffix('_conv')}_bn"
        table[f"{conv.name}.weight"] = f"{layer}/kernel"
        table |= {
            f"{conv.bn_name}.{suffix}": f"{norm}/{leaf}" for suffix, leaf in _BATCH_NORM.items()
        }
    return table


def _matched(path: Path, variables: Variables) -> tuple[Matching, str]:
    """Return the model that has exactly the kernels of a file, and the classifier's layer, "" if it
    has none."""
    shapes = dict(variables.shapes)
    head = _head(shapes, features(MODELS["resnet50-v1"]))
    if not head:
        shapes |= {f"{_HEAD}/kernel": (features(MODELS["resnet50-v1"]), 1), f"{_HEAD}/bias": (1,)}
    matchings = (
        match_model(
            name,
            _names(MODELS[name], head or _HEAD),
            shapes,
            _stored_shapes,
            lambda other: len(shapes[other]) >= 2,
        )
        for name in _MODELS
    )
    return choose_model(matchings, path, "Keras", variables.shapes), head


def _head(shapes: Mapping[str, Shape], inputs: int) -> str:
    """Return the layer of the classifier: `predictions`, or else the only dense layer; "" if there
    is none."""
    if f"{_HEAD}/kernel" in shapes:
        return _HEAD
    dense = [
        name.rpartition("/")[0]
        for name, shape in shapes.items()
        if name.endswith("/kernel") and len(shape) == 2
    ]
    return dense[0] if len(dense) == 1 and shapes[f"{dense[0]}/kernel"][0] == inputs else ""


def _stored_shapes(tensor: Tensor) -> tuple[Shape, ...]:
    if tensor.role == "conv_weight":
        outputs, inputs, height, width = tensor.shape
        return ((height, width, inputs, outputs),)
    return (tensor.shape[::-1],)


def _canonical(variables: Variables, matching: Matching, tensor: Tensor) -> np.ndarray:
    """Return a tensor as a new canonical float32 array."""
    name = matching.names[tensor.name]
    values = variables.read(name)
    if tensor.role == "conv_weight":
        values = values.transpose(3, 2, 0, 1)
        return np.array(values[:, ::-1] if is_stem(tensor) else values, order="C")
    if tensor.role == "bn_mean":
        bias = f"{name.removesuffix('_bn/moving_mean')}_conv/bias"
        if bias in variables.shapes:
            return _minus_bias(variables, name, values, bias)
    return np.ascontiguousarray(values.T)


def _minus_bias(variables: Variables, name: str, mean: np.ndarray, bias: str) -> np.ndarray:
    if variables.shapes[bias] != mean.shape:
        found = list(variables.shapes[bias])
        expected = list(mean.shape)
        raise CheckpointError(
            f"{variables.path}: {bias} is {found}, but {name} is {expected}; expected the same"
            " shape"
        )
    return (mean.astype(np.float64) - variables.read(bias)).astype(np.float32)


def _epsilon(path: Path, layers: Layers, default: float) -> float:
    """Return batch norm's epsilon; the default if no layers are described. Raises `CheckpointError`
    if there are several."""
    norms = [layer for layer in layers.values() if layer.get("class_name") == "BatchNormalization"]
    found = {layer.get("epsilon") for layer in norms} or {default}
    epsilon = min(found, key=str)
    if len(found) > 1 or not isinstance(epsilon, float) or epsilon <= 0:
        raise CheckpointError(
            f"{path}: its batch norms have the epsilons {sorted(map(str, found))}; expected one"
            " for all"
        )
    return epsilon


def _stride_in(path: Path, layers: Layers) -> Any:
    """Return which convolution of a block has the stride: the first 1x1, unless the file describes
    other layers."""
    strides = [_stride(layers.get(f"conv3_block1_{i}_conv", {})) for i in (1, 2)]
    if strides == [1, 2]:
        return "3x3"
    if layers.get("conv3_block1_1_conv") and strides != [2, 1]:
        raise CheckpointError(
            f"{path}: the first block of its stage 3 has the strides {strides}; expected [2, 1] or"
            " [1, 2]"
        )
    return "1x1"


def _stride(layer: Mapping[str, Any]) -> Any:
    strides = layer.get("strides", layer.get("subsample"))  # Keras 1's name
    return (
        strides[0]
        if isinstance(strides, list) and len(strides) == 2 and strides[0] == strides[1]
        else strides
    )


def _remarks(
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
    odd = [
        name
        for name in matching.names.values()
        if name in variables.shapes and variables.is_converted(name)
    ]
    if odd:
        yield f"{len(odd)} variables, such as {odd[0]}, are not float32 and were converted to it"
    before = [
        name
        for name, layer in variables.layers.items()
        if layer.get("class_name") in _PREPROCESSING
    ]
    if before:
        yield (
            f"the model has layers for preprocessing, which were not read: {', '.join(before[:5])}"
        )
    if variables.has_optimizer:
        yield "the optimizer's variables were not read"


def _about_branches(layers: Layers, epsilon: float) -> Iterator[str]:
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
    spec = model_spec(recipe.model)
    names = _names(spec)
    stored = {
        names[tensor.name]: _stored(state.tensors, tensor, recipe)
        for tensor in check_state(spec, recipe.logits, state)
    }
    for layer in _scopes(spec).values():
        stored[f"{layer}/bias"] = np.zeros(stored[f"{layer}/kernel"].shape[-1], np.float32)
    layers = _ordered(stored, recipe)
    store = (
        keras_variables.store_numbered
        if target.name.endswith(".weights.h5")
        else keras_variables.store_named
    )
    write_new(target, {target: lambda path: store(h5py, path, layers)}, into=into)
    biases = (
        "a bias of zeros was added to every convolution, since Keras' layers have one; it changes"
        " no result"
    )
    return Written((target,), (target,), tuple(_unlike_original(recipe, state)), (biases,))


def _ordered(stored: Mapping[str, np.ndarray], recipe: Recipe) -> dict[str, dict[str, np.ndarray]]:
    """Return variables by layer and name. Layers are in the order in which Keras creates and lists
    them."""
    order = _in_order_of_creation(model_spec(recipe.model))
    by_layer: dict[str, dict[str, np.ndarray]] = {layer: {} for layer in order}
    for variable in ("kernel", "bias", *_BATCH_NORM.values()):
        for layer in order:
            if f"{layer}/{variable}" in stored:
                by_layer[layer][variable] = stored[f"{layer}/{variable}"]
    return by_layer


def _stored(found: Mapping[str, np.ndarray], tensor: Tensor, recipe: Recipe) -> np.ndarray:
    """Return a tensor in Keras' layout, for images and an epsilon as Keras has them."""
    values = found[tensor.name]
    if is_stem(tensor):
        values = (values / np.array(recipe.std).reshape(1, 3, 1, 1)).astype(np.float32)[:, ::-1]
    if tensor.role == "bn_scale" and recipe.bn_epsilon != EPSILON:
        variance = found[f"{tensor.name.removesuffix('.weight')}.running_var"].astype(np.float64)
        values = (values * np.sqrt((variance + EPSILON) / (variance + recipe.bn_epsilon))).astype(
            np.float32
        )
    return values.transpose(2, 3, 1, 0) if tensor.role == "conv_weight" else values.T


def _unlike_original(recipe: Recipe, state: State) -> Iterator[str]:
    yield "the stem takes BGR, as keras.applications.resnet.preprocess_input gives it" + (
        "" if recipe.std == STD else "; the recipe's std is in its kernel"
    )
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
