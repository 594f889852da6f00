"""Checkpoints of NVIDIA's MXNet models and other MXNet ResNets: conversion from and to canonical
names and layouts.

NVIDIA's code of 2019 is the original here. It saves `<prefix>-symbol.json`, the graph, and after
every epoch `<prefix>-<epoch>.params`. Epochs count from 1 and have four digits. NVIDIA's later
code, in Gluon, saves `<prefix>_<epoch>.params` without a graph, and its epochs count from 0: 90
epochs are done in `model-0090.params` and in `model_0089.params`. The names of variables are those
of the original's symbols. Stages and units count from 1. Names of statistics begin with `aux:`, all
others with `arg:`.

    conv0_weight, bn0_{gamma,beta,moving_mean,moving_var}              the stem
    stage<s>_unit<u>_conv<c>_weight, stage<s>_unit<u>_bn<c>_{...}      a block
    stage<s>_unit<u>_conv1sc_weight, stage<s>_unit<u>_sc_{...}         its shortcut
    fc1_weight [out, in], fc1_bias                                     the classifier

Kernels are OIHW, or OHWI if the model was trained in NHWC (fp16). In fp16 with DALI the stem has a
fourth input channel. DALI fills it with zeros, so that its weights have no effect. The original
stores no velocities. Lockstep stores them in a separate file, in canonical form and under the names
of their parameters. MXNet does not read this file.

Checkpoints of other programs are read if their layers are those of a supported model. A graph says
what is computed with each variable, and its convolutions are in the order of computation. Without a
graph, the order comes from the names of Gluon's layers. These are either numbered in the order of
creation (`resnetv10_stage1_conv0_weight`) or paths to the layers (`features.4.0.body.0.weight`).
Biases of convolutions are folded into the batch norms after them (`mxnet_layers`).

Sources: NVIDIA DeepLearningExamples, MxNet/Classification/RN50v1.5, resnet.py and fit.py at commit
0663b67, models.py and fit.py at 810bcf37; MXNet's python/mxnet/model.py, gluon/block.py,
gluon/model_zoo/vision/resnet.py.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.models.architectures import (
    ModelSpec,
    Tensor,
)
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnet50_mxnet_90ep
from lockstep.system.errors import CheckpointError
from lockstep.system.files import replacing
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.weights.formats import mxnet_params, mxnet_symbol
from lockstep.weights.formats.common import (
    FOURTH_CHANNEL,
    Writers,
    Written,
    check_floats,
    check_state,
    choose_velocities,
    describe_converted,
    describe_other_padding,
    find_converted,
    is_stem,
    redirect_file,
    write_new,
)
from lockstep.weights.formats.mxnet_graph import build_symbol
from lockstep.weights.formats.mxnet_layers import (
    are_gluons,
    describe_biases,
    map_biases,
    order_layers,
    read_layers,
    subtract_bias,
)
from lockstep.weights.formats.mxnet_matching import list_shapes, match_arrays, name_tensors
from lockstep.weights.formats.mxnet_symbol import Symbol
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "MXNet"

_PARAMETERS = ".params"
_MOMENTUM = ".momentum.params"
_SYMBOL = "-symbol.json"
_OF_EPOCH = re.compile(r"(.+)-([0-9]{4,9})\.params")
_OF_EPOCH_FROM_0 = re.compile(r"(.+)_([0-9]{4,9})\.params")
"""The names that NVIDIA's later code writes."""
_MODELS = ("resnet50", "resnet101", "resnet152")
"""The original's models that exist here too. Its models with basic blocks differ: they have a
projection in stage 1."""
_LOGITS = 1000


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file begins as MXNet's files of arrays do."""
    return head.startswith(mxnet_params.BEGIN)


def find(path: Path) -> Path | None:
    """Return the `.params` file that a path names; None if it names none.

    A path is such a file (or the file of its velocities), a prefix, or a folder with the files of
    one prefix. Of several epochs the last one is used. Raises `CheckpointError` if a folder has
    several prefixes, or epochs of both of NVIDIA's programs.
    """
    if path.is_dir():
        epochs = list(_list_epochs(path))
        prefixes = sorted({prefix for prefix, _, _ in epochs})
        if len(prefixes) > 1:
            raise CheckpointError(f"{path} has several prefixes: {', '.join(prefixes)}; name one")
    elif path.name.endswith(_PARAMETERS):
        file = path.with_name(
            path.name.removesuffix(_MOMENTUM).removesuffix(_PARAMETERS) + _PARAMETERS
        )
        return file if file.is_file() else None
    else:
        epochs = [epoch for epoch in _list_epochs(path.parent) if epoch[0] == path.name]
    writers = {_OF_EPOCH.fullmatch(file.name) is None: file.name for _, _, file in sorted(epochs)}
    if len(writers) > 1:
        raise CheckpointError(
            f"{path} has epochs of two programs, such as {' and '.join(writers.values())}; name a"
            " file"
        )
    return max(epochs, key=lambda epoch: epoch[1])[2] if epochs else None


def _list_epochs(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield the prefix, number of epochs done and path of every `.params` file of an epoch in a
    folder."""
    for file in folder.glob(f"*{_PARAMETERS}"):
        match = _OF_EPOCH.fullmatch(file.name) or _OF_EPOCH_FROM_0.fullmatch(file.name)
        if match and file.is_file():
            yield match[1], _count_epochs(file) or 0, file


def _count_epochs(file: Path) -> int | None:
    """Return the number of epochs that a file's name says are done; None if it names no epoch.

    >>> _count_epochs(Path("model-0090.params")), _count_epochs(Path("model_0089.params"))
    (90, 90)
    """
    if match := _OF_EPOCH.fullmatch(file.name):
        return int(match[2])
    if match := _OF_EPOCH_FROM_0.fullmatch(file.name):
        return int(match[2]) + 1
    return None


def read(path: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a ResNet that has a name here, by its graph or, without a graph, by the names of its
    layers.

    `path` is a `.params` file; its graph is expected in the same folder. The recipe is the
    published one, or the default for Gluon's names, with the graph's epsilon. Raises
    `CheckpointError` for a damaged, incomplete or unknown file.
    """
    stored = mxnet_params.load(path)
    arrays = _strip_kinds(path, stored)
    graph = _find_graph(path)
    symbol = mxnet_symbol.load(graph) if graph is not None and graph.is_file() else None
    layers = read_layers(symbol) if symbol else order_layers(arrays)
    matching = match_arrays(path, arrays, symbol, layers)
    spec = matching.spec
    table = matching.map_tensors()
    layouts = _find_layouts(path, arrays, table, symbol)
    values = _convert_arrays(path, arrays, table, layouts)
    biases = map_biases(spec, matching.names, layers)
    for mean, bias in biases.items():
        values[mean] = subtract_bias(values[mean], arrays[bias], f"{path}: {bias}")
    remarks = [*_describe_file(path, arrays, table, layouts, symbol, spec)]
    remarks += describe_biases(biases.values())
    others = []
    if symbol and graph:
        others.append(graph)
    velocities: dict[str, np.ndarray] = {}
    if momentum:
        file = path.with_name(path.name.removesuffix(_PARAMETERS) + _MOMENTUM)
        kept = _strip_kinds(file, mxnet_params.load(file)) if file.exists() else {}
        slots = {tensor: name for tensor, name in table.items() if tensor.is_trained}
        slots, about = choose_velocities(slots, kept, file.name, momentum=momentum)
        velocities = _convert_arrays(file, kept, slots, layouts)
        remarks = [_describe_step(path), *remarks, *about]
        if kept:
            others.append(file)
    origin = "NVIDIA MXNet"
    recipe = resnet50_mxnet_90ep()
    if are_gluons(matching.names.values()):
        origin = "Gluon"
        recipe = Recipe()
    if symbol:
        recipe = recipe.replace(bn_epsilon=min(symbol.epsilons))
    recipe = recipe.replace(model=matching.model, logits=matching.logits, precision="fp32")
    full_names = dict(zip(arrays, stored, strict=True))
    used = [*zip(values, table.values(), strict=True), *biases.items()]
    sources = [(tensor, full_names[name]) for tensor, name in used]
    return Weights(
        recipe,
        State(0, values, velocities),
        (),
        path,
        origin,
        tuple(remarks),
        _count_epochs(path),
        stored=list_arrays(describe_arrays(stored), sources),
        others=tuple(others),
    )


def _strip_kinds(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays by the names of variables, without `arg:` and `aux:`."""
    bare = {re.sub("^(arg|aux):", "", name): value for name, value in arrays.items()}
    if len(bare) < len(arrays):
        raise CheckpointError(
            f"{path} has {len(arrays)} arrays for {len(bare)} variables: some are both arg: and"
            " aux:"
        )
    return bare


def _find_graph(path: Path) -> Path | None:
    if match := _OF_EPOCH.fullmatch(path.name):
        return path.with_name(match[1] + _SYMBOL)
    return None


def _find_layouts(
    path: Path, arrays: Mapping[str, np.ndarray], table: Mapping[Tensor, str], symbol: Symbol | None
) -> dict[str, str]:
    """Return the layout of every convolution by its kernel's name, from the graph or, without a
    graph, from the shape."""
    if symbol is not None:
        return symbol.layouts
    layouts = {}
    for tensor, name in table.items():
        if tensor.role != "conv_weight":
            continue
        shape = arrays[name].shape
        fits = [layout for layout in ("NCHW", "NHWC") if shape in list_shapes(tensor, layout)]
        # If at most one of the last three axes is longer than 1, both layouts are the same bytes.
        if len(fits) > 1 and sorted(shape[1:])[1] > 1:
            graph = _find_graph(path)
            remedy = "name it <prefix>-<epoch>.params, its graph next to it"
            if graph:
                remedy = f"put {graph.name} next to it"
            raise CheckpointError(
                f"{path}: {name} is {list(shape)}, which may be OIHW or OHWI; {remedy}"
            )
        layouts[name] = fits[0]
    return layouts


def _convert_arrays(
    file: Path,
    arrays: Mapping[str, np.ndarray],
    table: Mapping[Tensor, str],
    layouts: Mapping[str, str],
) -> dict[str, np.ndarray]:
    """Return variables, or the velocities of variables, as new canonical float32 arrays."""
    converted = {}
    for tensor, name in table.items():
        layout = layouts.get(name)
        values = check_floats(f"{file}: {name}", arrays[name], list_shapes(tensor, layout))
        if layout == "NHWC":
            values = values.transpose(0, 3, 1, 2)
        if is_stem(tensor):
            values = values[:, : tensor.shape[1]]
        converted[tensor.name] = np.array(values, np.float32, order="C")
    return converted


def _describe_step(path: Path) -> str:
    epochs = _count_epochs(path)
    if epochs is None:
        return "no step is stored"
    first = int(_OF_EPOCH.fullmatch(path.name) is not None)
    return f"no step is stored; its name says epoch {epochs - 1 + first}, counted from {first}"


def _describe_file(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    table: Mapping[Tensor, str],
    layouts: Mapping[str, str],
    symbol: Symbol | None,
    spec: ModelSpec,
) -> Iterator[str]:
    epsilon = resnet50_mxnet_90ep().bn_epsilon
    if symbol is None:
        missing = "a file of this name has no graph"
        if graph := _find_graph(path):
            missing = f"there is no {graph.name}"
        stride = "first 1x1, as Gluon's with biases do" if spec.stride_in == "1x1" else "3x3"
        yield (
            f"{missing}: it is assumed that bottlenecks stride in their {stride}, and that batch"
            f" norms add {epsilon:g}"
        )
    elif symbol.epsilons != {epsilon}:
        yield f"its batch norms add {min(symbol.epsilons):g} to the variance"
    for tensor, name in table.items():
        if is_stem(tensor) and arrays[name].size != np.prod(tensor.shape):
            yield FOURTH_CHANNEL
    by_rows = [name for name, layout in layouts.items() if layout == "NHWC"]
    if by_rows:
        yield (
            f"{len(by_rows)} kernels, such as {by_rows[0]}, are OHWI, as for images in NHWC; they"
            " were converted to OIHW"
        )
    yield from describe_converted(find_converted(table.values(), arrays))


def write(target: Path, recipe: Recipe, state: State, into: Path | None = None) -> Written:
    """Write a state with the original's names, and the graph; return the files and remarks on them.

    `target` is `<prefix>-<epoch>.params`, or a prefix, whose epoch is 0. An existing graph with the
    same contents is kept, since epochs share it. Without momentum no `.momentum.params` is written.
    `into` is as in `write_new`; the folder gets the graph in any case, without which the weights
    cannot be read there. Raises `CheckpointError` if any other file exists already,
    `.momentum.params` included.
    """
    prefix, epoch = _split_target(target)
    weights, velocities = _name_arrays(recipe, state)
    file = _name_file(prefix, epoch, _PARAMETERS)
    graph = _name_graph(prefix)
    has_graph = _has_graph(prefix, recipe)
    files: Writers = {}
    if not has_graph:
        files[graph] = lambda path: path.write_bytes(build_symbol(recipe))
    momentum = _name_file(prefix, epoch, _MOMENTUM)
    if velocities:
        files[momentum] = partial(mxnet_params.dump, arrays=velocities)
    files[file] = partial(mxnet_params.dump, arrays=weights)
    write_new(prefix, files, momentum, into=into)
    if has_graph and into is not None:
        redirect_file(graph, into).write_bytes(build_symbol(recipe))
    remarks = [f"{graph} existed already with the same contents"] if has_graph else []
    remarks += _describe_differences(recipe, state)
    arrays = (file, momentum) if velocities else (file,)
    return Written(tuple(files), arrays, tuple(remarks))


def write_epoch(prefix: Path, epoch: int, recipe: Recipe, state: State) -> Path:
    """Write weights as the original does after an epoch, and velocities; return the weights' file.
    Epochs count from 1.

    The graph is written if there is none. Existing files of the epoch are replaced atomically,
    since a resumed run writes them again. Raises `CheckpointError` if the state or the existing
    graph is of another model than the recipe's.
    """
    weights, velocities = _name_arrays(recipe, state)
    check_prefix(prefix, recipe)
    file = _name_file(prefix, epoch, _PARAMETERS)
    # The weights are written last: if they exist, their velocities exist too.
    files = {_name_file(prefix, epoch, _MOMENTUM): velocities, file: weights}
    for path, arrays in files.items():
        with _explain_errors(path), replacing(path) as new:
            mxnet_params.dump(new, arrays)
    return file


def check_prefix(prefix: Path, recipe: Recipe) -> None:
    """Write the graph, or check the existing one, before a run that will write weights next to it.

    Raises `CheckpointError` if there is another graph, or if the folder cannot be written to.
    """
    graph = _name_graph(prefix)
    with _explain_errors(graph):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        if not _has_graph(prefix, recipe):
            with replacing(graph) as new:
                new.write_bytes(build_symbol(recipe))


@contextmanager
def _explain_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error}") from None


def _split_target(target: Path) -> tuple[Path, int]:
    """Return the prefix and epoch of the files to write."""
    if match := _OF_EPOCH.fullmatch(target.name):
        return target.with_name(match[1]), int(match[2])
    if target.suffix == _PARAMETERS or not target.name:
        raise CheckpointError(
            f"{target}: expected a prefix, or <prefix>-0090.params with an epoch in four digits"
        )
    return target, 0


def _name_file(prefix: Path, epoch: int, ending: str) -> Path:
    return prefix.with_name(f"{prefix.name}-{epoch:04d}{ending}")


def _name_graph(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + _SYMBOL)


def _has_graph(prefix: Path, recipe: Recipe) -> bool:
    """Return whether the recipe's graph exists. Raises `CheckpointError` if another one exists."""
    graph = _name_graph(prefix)
    try:
        if not graph.exists() or read_regular(graph, TEXT) == build_symbol(recipe):
            return graph.exists()
    except OSError as error:
        raise CheckpointError(f"{graph} cannot be read: {error.strerror}") from None
    raise CheckpointError(
        f"{graph} already exists with another graph; name a new prefix, or remove it"
    )


def _name_arrays(
    recipe: Recipe, state: State
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the state's weights and velocities by the original's names. Raises `CheckpointError`
    if the state is of another model than the recipe's."""
    spec = recipe.spec
    table = name_tensors(spec)
    weights = {}
    velocities = {}
    for tensor in check_state(spec, recipe.logits, state):
        name = table[tensor.name]
        kind = "arg" if tensor.is_trained else "aux"
        weights[f"{kind}:{name}"] = state.tensors[tensor.name]
        if tensor.name in state.momentum:
            velocities[name] = state.momentum[tensor.name]
    return weights, velocities


def _describe_differences(recipe: Recipe, state: State) -> Iterator[str]:
    if recipe.model not in _MODELS:
        yield (
            f"of the models here, the original's code has {', '.join(_MODELS)}; this is another,"
            " with its own graph"
        )
    # How much SAME pads depends on the size of the images, which a graph does not fix.
    for remark in describe_other_padding(recipe):
        yield f"the graph pads symmetrically; {remark}"
    if recipe.logits != _LOGITS:
        yield (
            f"the original's graph has {_LOGITS} outputs; these weights have {recipe.logits}:"
            " --num-classes"
        )
    if state.momentum:
        yield (
            f"MXNet does not read the velocities in *{_MOMENTUM}: the original resumes with"
            " velocities of 0"
        )
    if state.step:
        yield (
            f"step {state.step} cannot be stored; the epoch in the name or --load-epoch sets where"
            " to resume"
        )
    if state.scaler:
        yield "the state of dynamic loss scaling cannot be stored and was left out"
