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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.models.architectures import (
    MODELS,
    ModelSpec,
    Tensor,
    convolutions,
    model_spec,
    tensors,
)
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.published import resnet50_mxnet_90ep
from lockstep.system.errors import CheckpointError
from lockstep.system.files import replacing
from lockstep.weights.formats import dtype_name, mxnet_params, mxnet_symbol, numbers
from lockstep.weights.formats.common import (
    FOURTH_CHANNEL,
    Matching,
    Names,
    Shape,
    Writers,
    Written,
    check_state,
    choose_model,
    describe_missing_velocities,
    is_stem,
    match_model,
    order_shortcuts_first,
    redirect_file,
    write_new,
)
from lockstep.weights.formats.mxnet_graph import NORM, scopes, symbol_of
from lockstep.weights.formats.mxnet_layers import (
    Layers,
    about_biases,
    are_gluons,
    biases_by_mean,
    layers_by_names,
    layers_of,
    without_bias,
)
from lockstep.weights.formats.mxnet_symbol import Symbol
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays

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
        epochs = list(_epochs(path))
        prefixes = sorted({prefix for prefix, _, _ in epochs})
        if len(prefixes) > 1:
            raise CheckpointError(f"{path} has several prefixes: {', '.join(prefixes)}; name one")
    elif path.name.endswith(_PARAMETERS):
        file = path.with_name(
            path.name.removesuffix(_MOMENTUM).removesuffix(_PARAMETERS) + _PARAMETERS
        )
        return file if file.is_file() else None
    else:
        epochs = [found for found in _epochs(path.parent) if found[0] == path.name]
    writers = {_OF_EPOCH.fullmatch(file.name) is None: file.name for _, _, file in sorted(epochs)}
    if len(writers) > 1:
        raise CheckpointError(
            f"{path} has epochs of two programs, such as {' and '.join(writers.values())}; name a"
            " file"
        )
    return max(epochs, key=lambda found: found[1])[2] if epochs else None


def _epochs(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield the prefix, number of epochs done and path of every `.params` file of an epoch in a
    folder."""
    for file in folder.glob(f"*{_PARAMETERS}"):
        match = _OF_EPOCH.fullmatch(file.name) or _OF_EPOCH_FROM_0.fullmatch(file.name)
        if match and file.is_file():
            yield match[1], _epochs_done(file) or 0, file


def _epochs_done(file: Path) -> int | None:
    """Return the number of epochs that a file's name says are done; None if it names no epoch.

    >>> _epochs_done(Path("model-0090.params")), _epochs_done(Path("model_0089.params")), _epochs_done(Path("best.params"))
    (90, 90, None)
    """
    if match := _OF_EPOCH.fullmatch(file.name):
        return int(match[2])
    match = _OF_EPOCH_FROM_0.fullmatch(file.name)
    return int(match[2]) + 1 if match else None


def read(path: Path, *, momentum: bool = True) -> Weights:
    """Read a ResNet that has a name here, by its graph or, without a graph, by the names of its
    layers.

    `path` is a `.params` file; its graph is expected in the same folder. The recipe is the
    published one, or the default for Gluon's names, with the graph's epsilon. Raises
    `CheckpointError` for a damaged, incomplete or unknown file.
    """
    stored = mxnet_params.load(path)
    arrays = _bare(path, stored)
    graph = _graph_of(path)
    symbol = mxnet_symbol.load(graph) if graph is not None and graph.is_file() else None
    layers = layers_of(symbol) if symbol else layers_by_names(arrays)
    matching = _matching(path, arrays, symbol, layers)
    biases = biases_by_mean(MODELS[matching.model], matching.names, layers)
    table = {
        tensor: matching.names[tensor.name]
        for tensor in tensors(MODELS[matching.model], matching.logits)
    }
    layouts = _layouts(path, arrays, table, symbol)
    velocities_file = path.with_name(path.name.removesuffix(_PARAMETERS) + _MOMENTUM)
    velocities = (
        _bare(velocities_file, mxnet_params.load(velocities_file))
        if momentum and velocities_file.exists()
        else {}
    )
    slots = {tensor: name for tensor, name in table.items() if tensor.is_trained}
    missing = [name for name in slots.values() if name not in velocities]
    carried = slots if momentum and not missing else {}
    found, speeds = (
        {
            tensor.name: _canonical(file, values[name], name, tensor, layouts)
            for tensor, name in names.items()
        }
        for file, values, names in ((path, arrays, table), (velocities_file, velocities, carried))
    )
    found |= {
        mean: without_bias(found[mean], arrays[bias], f"{path}: {bias}")
        for mean, bias in biases.items()
    }
    remarks = (
        *([_about_step(path)] if momentum else []),
        *_remarks(path, arrays, table, layouts, symbol, MODELS[matching.model]),
        *about_biases(biases.values()),
        *(
            describe_missing_velocities(missing, len(slots), velocities_file.name)
            if momentum
            else ()
        ),
    )
    origin = "Gluon" if are_gluons(matching.names.values()) else "NVIDIA MXNet"
    recipe = Recipe() if origin == "Gluon" else resnet50_mxnet_90ep()
    epsilon = _epsilon(recipe, symbol)
    recipe = recipe.replace(
        model=matching.model, logits=matching.logits, precision="fp32", bn_epsilon=epsilon
    )
    full = dict(zip(arrays, stored, strict=True))
    used = [*((tensor.name, name) for tensor, name in table.items()), *biases.items()]
    held = list_arrays(describe_arrays(stored), ((tensor, full[name]) for tensor, name in used))
    others = (*([graph] if symbol and graph else []), *([velocities_file] if velocities else []))
    return Weights(
        recipe,
        State(0, found, speeds),
        (),
        path,
        origin,
        remarks,
        _epochs_done(path),
        stored=held,
        others=others,
    )


def _bare(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays by the names of variables, without `arg:` and `aux:`."""
    bare = {re.sub("^(arg|aux):", "", name): value for name, value in arrays.items()}
    if len(bare) < len(arrays):
        raise CheckpointError(
            f"{path} has {len(arrays)} arrays for {len(bare)} variables: some are both arg: and"
            " aux:"
        )
    return bare


def _graph_of(path: Path) -> Path | None:
    match = _OF_EPOCH.fullmatch(path.name)
    return path.with_name(match[1] + _SYMBOL) if match else None


def _matching(
    path: Path, arrays: Mapping[str, np.ndarray], symbol: Symbol | None, layers: Layers
) -> Matching:
    """Return the model that has exactly these tensors, apart from biases, and computes what the
    graph computes."""
    shapes = {
        name: value.shape for name, value in arrays.items() if name not in layers.biases.values()
    }
    said = {conv.weight: conv.layout for conv in symbol.convolutions} if symbol else {}

    def held(model: str, spec: ModelSpec, table: Names) -> Matching:
        def stored_shapes(tensor: Tensor) -> tuple[Shape, ...]:
            return _stored_shapes(tensor, said.get(table[tensor.name]))

        matching = match_model(model, table, shapes, stored_shapes, lambda name: True)
        unlike = _unlike_graph(spec, table, symbol) if symbol else _unlike_biases(spec, layers)
        missing = [f"{bias} is missing" for bias in layers.biases.values() if bias not in arrays]
        return replace(matching, problems=[*matching.problems, *missing, *unlike])

    matchings = (
        held(model, spec, table)
        for model, spec in MODELS.items()
        for table in _tables(spec, layers)
    )
    return choose_model(matchings, path, "MXNet", arrays)


def _unlike_biases(spec: ModelSpec, layers: Layers) -> Iterator[str]:
    """Yield a problem if a model strides otherwise than Gluon's networks whose convolutions have
    biases."""
    if layers.biases and spec.block == "bottleneck" and spec.stride_in != "1x1":
        yield (
            f"{len(layers.biases)} of its convolutions have biases, such as"
            f" {min(layers.biases.values())}, as in Gluon's resnet50_v1, which strides in its"
            " first 1x1"
        )


def names(spec: ModelSpec) -> Names:
    """Return the original's name, without `arg:` and `aux:`, of every canonical tensor."""
    table = {"fc.weight": "fc1_weight", "fc.bias": "fc1_bias"}
    for conv, (kernel, norm) in scopes(spec).items():
        table[f"{conv.name}.weight"] = f"{kernel}_weight"
        table |= {f"{conv.bn_name}.{suffix}": f"{norm}_{leaf}" for suffix, leaf in NORM.items()}
    return table


def _tables(spec: ModelSpec, layers: Layers) -> Iterator[Names]:
    """Yield the names that a model's tensors may have."""
    yield names(spec)
    # MXNet's own models add the block's convolutions to its shortcut, so that a graph computes the
    # shortcut first.
    for convs in (list(convolutions(spec)), order_shortcuts_first(spec)):
        table = dict(layers.head)
        for i, conv in enumerate(convs):
            norm = layers.norms[i] if i < len(layers.norms) else {}
            table[f"{conv.name}.weight"] = (
                layers.kernels[i] if i < len(layers.kernels) else f"the kernel of convolution {i}"
            )
            table |= {
                f"{conv.bn_name}.{leaf}": norm.get(leaf, f"the {leaf} of batch norm {i}")
                for leaf in NORM
            }
        yield table


def _unlike_graph(spec: ModelSpec, table: Names, symbol: Symbol) -> Iterator[str]:
    """Yield every difference between a graph and a model with these names."""
    yield from symbol.problems
    if len(symbol.epsilons) != 1 or not 0 < min(symbol.epsilons) < 1:
        yield (
            f"its graph's batch norms add {sorted(symbol.epsilons)} to the variance, expected one"
            " number below 1"
        )
    if symbol.heads != ((table["fc.weight"], table["fc.bias"]),):
        yield f"its graph has the fully connected layers {list(symbol.heads)}, expected one"
    graph = {conv.weight: conv for conv in symbol.convolutions}
    if len(graph) != len(symbol.convolutions):
        yield f"its graph has {len(symbol.convolutions)} convolutions of {len(graph)} kernels"
    for conv in convolutions(spec):
        name = table[f"{conv.name}.weight"]
        if name not in graph:
            yield f"its graph has no convolution with {name}"
            continue
        found = graph[name]
        expected = {
            "kernel": conv.kernel,
            "stride": conv.stride,
            "pad": conv.kernel // 2,
            "dilate": 1,
        }
        for what, size in expected.items():
            if getattr(found, what) != (size, size):
                yield (
                    f"in its graph, {name} has the {what} {getattr(found, what)}, expected"
                    f" {(size, size)}"
                )
        if found.groups != conv.groups:
            yield f"in its graph, {name} has {found.groups} groups, expected {conv.groups}"
        if found.norm != {suffix: table[f"{conv.bn_name}.{suffix}"] for suffix in NORM}:
            yield (
                f"in its graph, the batch norm after {name} has the variables"
                f" {sorted(found.norm.values())}"
            )


def _stored_shapes(tensor: Tensor, layout: str | None) -> tuple[Shape, ...]:
    """Return the shapes a tensor may have in a layout, or in any layout for None; the original's
    shape comes first."""
    if tensor.role != "conv_weight":
        return (tensor.shape,)
    outputs, inputs, height, width = tensor.shape
    sizes = [
        (outputs, inputs, height, width),
        *([(outputs, inputs + 1, height, width)] if is_stem(tensor) else []),
    ]
    layouts = ("NCHW", "NHWC") if layout is None else (layout,)
    return tuple(
        (o, h, w, i) if known == "NHWC" else (o, i, h, w)
        for known in layouts
        for o, i, h, w in sizes
    )


def _layouts(
    path: Path, arrays: Mapping[str, np.ndarray], table: Mapping[Tensor, str], symbol: Symbol | None
) -> dict[str, str]:
    """Return the layout of every convolution by its kernel's name, from the graph or, without a
    graph, from the shape."""
    if symbol is not None:
        return {conv.weight: conv.layout for conv in symbol.convolutions}
    layouts = {}
    for tensor, name in table.items():
        if tensor.role != "conv_weight":
            continue
        shape = arrays[name].shape
        fits = [layout for layout in ("NCHW", "NHWC") if shape in _stored_shapes(tensor, layout)]
        # If at most one of the last three axes is longer than 1, both layouts are the same bytes.
        if len(fits) > 1 and sorted(shape[1:])[1] > 1:
            graph = _graph_of(path)
            remedy = (
                f"put {graph.name} next to it"
                if graph
                else "name it <prefix>-<epoch>.params, its graph next to it"
            )
            raise CheckpointError(
                f"{path}: {name} is {list(shape)}, which may be OIHW or OHWI; {remedy}"
            )
        layouts[name] = fits[0]
    return layouts


def _canonical(
    file: Path, values: np.ndarray, name: str, tensor: Tensor, layouts: Mapping[str, str]
) -> np.ndarray:
    """Return a variable, or the velocity of one, as a new canonical float32 array."""
    layout = layouts.get(name)
    kind = dtype_name(values.dtype)
    values = numbers(values)
    if values.shape not in _stored_shapes(tensor, layout) or values.dtype.kind != "f":
        expected = list(_stored_shapes(tensor, layout)[0])
        raise CheckpointError(
            f"{file}: {name} is {kind} {list(values.shape)}, expected float32 {expected}"
        )
    if layout == "NHWC":
        values = values.transpose(0, 3, 1, 2)
    if is_stem(tensor):
        values = values[:, : tensor.shape[1]]
    return np.array(values, np.float32, order="C")


def _epsilon(recipe: Recipe, symbol: Symbol | None) -> float:
    """Return what batch norms add to the variance: the graph's value, or the recipe's if there is
    no graph."""
    return recipe.bn_epsilon if symbol is None else min(symbol.epsilons)


def _about_step(path: Path) -> str:
    epochs = _epochs_done(path)
    first = 0 if _OF_EPOCH.fullmatch(path.name) is None else 1
    said = (
        ""
        if epochs is None
        else f"; its name says epoch {epochs - 1 + first}, counted from {first}"
    )
    return f"no step is stored{said}"


def _remarks(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    table: Mapping[Tensor, str],
    layouts: Mapping[str, str],
    symbol: Symbol | None,
    spec: ModelSpec,
) -> Iterable[str]:
    graph = _graph_of(path)
    if symbol is None:
        missing = f"there is no {graph.name}" if graph else "a file of this name has no graph"
        epsilon = resnet50_mxnet_90ep().bn_epsilon
        stride = "first 1x1, as Gluon's with biases do" if spec.stride_in == "1x1" else "3x3"
        yield (
            f"{missing}: it is assumed that bottlenecks stride in their {stride}, and that batch"
            f" norms add {epsilon:g}"
        )
    elif symbol.epsilons != {resnet50_mxnet_90ep().bn_epsilon}:
        yield f"its batch norms add {min(symbol.epsilons):g} to the variance"
    if any(
        is_stem(tensor) and arrays[name].size != np.prod(tensor.shape)
        for tensor, name in table.items()
    ):
        yield FOURTH_CHANNEL
    by_rows = [name for name, layout in layouts.items() if layout == "NHWC"]
    if by_rows:
        yield (
            f"{len(by_rows)} kernels, such as {by_rows[0]}, are OHWI, as for images in NHWC; they"
            " were converted to OIHW"
        )
    odd = [name for name in table.values() if arrays[name].dtype != np.float32]
    if odd:
        yield f"{len(odd)} variables, such as {odd[0]}, are not float32 and were converted to it"


def write(target: Path, recipe: Recipe, state: State, into: Path | None = None) -> Written:
    """Write a state with the original's names, and the graph; return the files and remarks on them.

    `target` is `<prefix>-<epoch>.params`, or a prefix, whose epoch is 0. An existing graph with the
    same contents is kept, since epochs share it. Without momentum no `.momentum.params` is written.
    `into` is as in `write_new`; the folder gets the graph in any case, without which the weights
    cannot be read there. Raises `CheckpointError` if any other file exists already,
    `.momentum.params` included.
    """
    prefix, epoch = _target(target)
    spec = model_spec(recipe.model)
    expected = check_state(spec, recipe.logits, state)
    table = names(spec)
    velocities = _velocities(expected, table, state)
    file = _file(prefix, epoch, _PARAMETERS)
    has_graph = _has_graph(prefix, recipe)
    files: Writers = (
        {} if has_graph else {_graph(prefix): lambda path: path.write_bytes(symbol_of(recipe))}
    )
    momentum = _file(prefix, epoch, _MOMENTUM)
    if velocities:
        files[momentum] = partial(mxnet_params.dump, arrays=velocities)
    files[file] = partial(mxnet_params.dump, arrays=_stored(expected, table, state.tensors))
    write_new(prefix, files, momentum, into=into)
    if has_graph and into is not None:
        redirect_file(_graph(prefix), into).write_bytes(symbol_of(recipe))
    arrays = (file, momentum) if velocities else (file,)
    return Written(tuple(files), arrays, tuple(_unlike_original(prefix, recipe, state, files)))


def write_epoch(prefix: Path, epoch: int, recipe: Recipe, state: State) -> Path:
    """Write weights as the original does after an epoch, and velocities; return the weights' file.
    Epochs count from 1.

    The graph is written if there is none. Existing files of the epoch are replaced atomically,
    since a resumed run writes them again. Raises `CheckpointError` if the state or the existing
    graph is of another model than the recipe's.
    """
    spec = model_spec(recipe.model)
    expected = check_state(spec, recipe.logits, state)
    table = names(spec)
    file = _file(prefix, epoch, _PARAMETERS)
    check_prefix(prefix, recipe)
    # The weights are written last: if they exist, their velocities exist too.
    files = {
        _file(prefix, epoch, _MOMENTUM): _velocities(expected, table, state),
        file: _stored(expected, table, state.tensors),
    }
    for path, arrays in files.items():
        with _saying_what_cannot_be_written(path), replacing(path) as new:
            mxnet_params.dump(new, arrays)
    return file


def check_prefix(prefix: Path, recipe: Recipe) -> None:
    """Write the graph, or check the existing one, before a run that will write weights next to it.

    Raises `CheckpointError` if there is another graph, or if the folder cannot be written to.
    """
    graph = _graph(prefix)
    with _saying_what_cannot_be_written(graph):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        if not _has_graph(prefix, recipe):
            with replacing(graph) as new:
                new.write_bytes(symbol_of(recipe))


@contextmanager
def _saying_what_cannot_be_written(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error}") from None


def _target(target: Path) -> tuple[Path, int]:
    """Return the prefix and epoch of the files to write."""
    if match := _OF_EPOCH.fullmatch(target.name):
        return target.with_name(match[1]), int(match[2])
    if target.suffix == _PARAMETERS or not target.name:
        raise CheckpointError(
            f"{target}: expected a prefix, or <prefix>-0090.params with an epoch in four digits"
        )
    return target, 0


def _file(prefix: Path, epoch: int, ending: str) -> Path:
    return prefix.with_name(f"{prefix.name}-{epoch:04d}{ending}")


def _graph(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + _SYMBOL)


def _has_graph(prefix: Path, recipe: Recipe) -> bool:
    """Return whether the recipe's graph exists. Raises `CheckpointError` if there is another graph."""
    graph = _graph(prefix)
    try:
        if not graph.exists() or mxnet_symbol.read_graph(graph) == symbol_of(recipe):
            return graph.exists()
    except OSError as error:
        raise CheckpointError(f"{graph} cannot be read: {error.strerror}") from None
    raise CheckpointError(
        f"{graph} already exists with another graph; name a new prefix, or remove it"
    )


def _velocities(expected: list[Tensor], table: Names, state: State) -> dict[str, np.ndarray]:
    """Return the state's velocities by the original's names."""
    return {
        table[tensor.name]: state.momentum[tensor.name]
        for tensor in expected
        if tensor.name in state.momentum
    }


def _stored(
    expected: list[Tensor], table: Names, values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    kinds = {tensor: "arg" if tensor.is_trained else "aux" for tensor in expected}
    return {f"{kind}:{table[tensor.name]}": values[tensor.name] for tensor, kind in kinds.items()}


def _unlike_original(
    prefix: Path, recipe: Recipe, state: State, files: Iterable[Path]
) -> Iterable[str]:
    if _graph(prefix) not in files:
        yield f"{_graph(prefix)} existed already with the same contents"
    if recipe.model not in _MODELS:
        yield (
            f"of the models here, the original's code has {', '.join(_MODELS)}; this is another,"
            " with its own graph"
        )
    if recipe.padding == "same":
        # How much SAME pads depends on the size of the images, which a graph does not fix.
        yield (
            "the graph pads symmetrically; these weights were trained with TensorFlow's SAME"
            " padding"
        )
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
