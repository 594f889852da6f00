"""Checkpoints of NVIDIA's MXNet models and other MXNet ResNets: conversion from and to canonical
names and layouts, which docs/reference/checkpoints.md lists.

"NVIDIA's code" is the symbol code of 2019. Its epochs count from 1; those of NVIDIA's later code,
in Gluon, count from 0. In fp16 with DALI the stem has a fourth input channel. DALI fills it with
zeros, so that its weights have no effect. NVIDIA's code stores no velocities. Lockstep stores them
in a separate file, in canonical form and under the names of their parameters.

Checkpoints of other programs are read by their graph (`mxnet_symbol`), or by the names of Gluon's
layers (`mxnet_graph`).

Sources: NVIDIA DeepLearningExamples, MxNet/Classification/RN50v1.5, resnet.py and fit.py at commit
0663b67, models.py and fit.py at 810bcf37; MXNet's python/mxnet/model.py, gluon/block.py,
gluon/model_zoo/vision/resnet.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_mxnet_90ep
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.files import replacing
from lockstep.system.regular_files import TEXT
from lockstep.weights.formats import common, mxnet_params, naming_target
from lockstep.weights.formats.account import (
    Part,
    account_for_constants,
    refuse_leftover,
    split_ignored,
)
from lockstep.weights.formats.lfs_pointers import read_whole
from lockstep.weights.formats.mxnet_graph import (
    are_gluons,
    assume_graph,
    build_symbol,
    name_tensors,
    write_original,
)
from lockstep.weights.formats.mxnet_symbol import Symbol, translate
from lockstep.weights.formats.network_walk import follow
from lockstep.weights.formats.resnet_graph import Network
from lockstep.weights.formats.table import OIHW, Table, fetch, name_arrays
from lockstep.weights.opened_weights import Weights, describe_arrays, list_arrays
from lockstep.weights.original import Original
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "MXNet"

_PARAMETERS = ".params"
_MOMENTUM = ".momentum.params"
_SYMBOL = "-symbol.json"
_OF_EPOCH = re.compile(r"(.+)([-_])([0-9]{4,9})\.params")
"""The second group is "_" in the names that NVIDIA's later code writes."""
_MODELS = ("resnet50", "resnet101", "resnet152")
"""NVIDIA's models that exist here too. Its models with basic blocks differ: they have a
projection in stage 1."""
_LOGITS = 1000


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file begins as MXNet's files of arrays do."""
    return head.startswith(mxnet_params.BEGIN)


def find(path: Path) -> Path | None:
    """Return the `.params` file that a path names; None if there is none.

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
    writers = {file.stem[len(prefix)]: file.name for prefix, _, file in sorted(epochs)}
    if len(writers) > 1:
        raise CheckpointError(
            f"{path} has epochs of two programs, such as {' and '.join(writers.values())}; name a"
            " file"
        )
    return max(epochs, key=lambda epoch: epoch[1], default=(None, 0, None))[2]


def _list_epochs(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield the prefix, number of epochs done and path of every `.params` file of an epoch in a
    folder."""
    for file in filter(Path.is_file, folder.glob(f"*{_PARAMETERS}")):
        if match := _OF_EPOCH.fullmatch(file.name):
            yield match[1], _count_epochs(file) or 0, file


def _count_epochs(file: Path) -> int | None:
    """Return the number of epochs that a file's name says are done; None if it names no epoch.

    >>> _count_epochs(Path("model-0090.params")), _count_epochs(Path("model_0089.params"))
    (90, 90)
    """
    match = _OF_EPOCH.fullmatch(file.name)
    return match and int(match[3]) + (match[2] == "_")


def read(path: Path, *, momentum: bool = True, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a ResNet by its graph or, without a graph, by the names of its layers.

    `path` is a `.params` file; its graph is expected in the same folder. The recipe is the
    published one, or the default for Gluon's names, with what the graph says. Raises
    `CheckpointError` for a damaged, incomplete or unknown file, and for one with a part that is not
    accounted for.
    """
    stored = mxnet_params.load(path)
    arrays = _strip_kinds(path, stored)
    full_names = dict(zip(arrays, stored, strict=True))
    shapes, ignored = split_ignored({name: v.shape for name, v in arrays.items()}, choice)
    arrays = {name: arrays[name] for name in shapes}
    graph = path.with_name(re.sub(r"-[0-9]{4,9}$", "", path.stem) + _SYMBOL)
    is_gluons = are_gluons(arrays)
    recipe = Recipe() if is_gluons else resnet50_mxnet_90ep()
    remarks = []
    if graph.is_file():
        text = read_whole(graph, TEXT)
    else:
        text, assumption = assume_graph(path, recipe, arrays, choice)
        remarks.append(f"there is no {graph.name}: it is assumed that {assumption}")
    symbol, network = _follow_graph(path, graph, text, arrays)
    sources = list(network.list_sources(symbol.graph))
    channels = 3 * arrays[dict(sources)["conv1.weight"]].size // network.units[0].weight.size
    if channels != 3:
        remarks.append(common.FOURTH_CHANNEL)
    remarks += [*common.describe_converted(common.find_converted(arrays, arrays)), *network.remarks]
    write = partial(write_original, symbol, network.head.output, arrays, channels)
    weights = Weights(
        recipe=_change_recipe(recipe, network),
        state=State(0, network.build_tensors(), {}),
        classes=(),
        source=path,
        origin="Gluon" if is_gluons else "NVIDIA MXNet",
        remarks=(*remarks, *network.describe_units()),
        epochs=_count_epochs(path),
        stated=network.stated,
        assumed_as=_choose_assumption(network, sources),
        original=Original(NAME, write, network.takes, symbol.channels_last, network.head.kind),
        parts=(*ignored, *network.parts, *_account_for_rest(symbol, arrays, sources)),
        stored=list_arrays(
            describe_arrays(stored), ((tensor, full_names[name]) for tensor, name in sources)
        ),
        others=tuple(filter(Path.is_file, [graph])),
    )
    return _add_velocities(weights) if momentum else weights


def _account_for_rest(
    symbol: Symbol, names: Iterable[str], sources: Sequence[tuple[str, str]]
) -> Iterator[Part]:
    """Yield the account of the variables that no tensor is made of."""
    labels = symbol.graph.name_users()
    users = {place: labels[name] for name, place in symbol.graph.places.items()}
    return account_for_constants(names, {name for _, name in sources}, users)


def _add_velocities(weights: Weights) -> Weights:
    """Return weights with the velocities that Lockstep wrote next to them, in canonical form."""
    path = weights.source
    side = path.with_name(path.name.removesuffix(_PARAMETERS) + _MOMENTUM)
    others = list(filter(Path.exists, [side]))
    kept = {name: v for file in others for name, v in mxnet_params.load(file).items()}
    names = name_tensors(weights.recipe.spec)
    slots = {t: names[t.name] for t in weights.recipe.list_tensors() if t.is_trained}
    slots, about = common.choose_velocities(slots, kept, side.name, momentum=True)
    return replace(
        weights,
        state=State(0, weights.tensors, fetch(Table.of(side, kept), OIHW, slots)),
        remarks=(_describe_step(path), *weights.remarks, *about),
        others=(*weights.others, *others),
    )


def _strip_kinds(path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays by the names of variables, without `arg:` and `aux:`."""
    bare = {re.sub("^(arg|aux):", "", name): value for name, value in arrays.items()}
    if len(bare) < len(arrays):
        raise CheckpointError(
            f"{path} has {len(arrays)} arrays for {len(bare)} variables: some are arg: and aux:"
        )
    return bare


def _follow_graph(
    path: Path, graph: Path, text: bytes, arrays: Mapping[str, np.ndarray]
) -> tuple[Symbol, Network]:
    """Return a graph with these variables, and the network in it."""
    try:
        symbol = translate(graph, text, arrays)
        network = follow(symbol.graph)
        network.build_recipe()
    except (ValueError, LookupError, TypeError, RecursionError, RecipeError) as error:
        raise CheckpointError(f"{path} is not a ResNet that can be read: {error}") from None
    unknown = sorted(arrays.keys() - symbol.variables)
    if unknown:
        raise refuse_leftover(path, f"the network of {graph.name}", unknown)
    return symbol, network


def _change_recipe(recipe: Recipe, network: Network) -> Recipe:
    """Return a recipe with what a graph says."""
    fields = ["model", "logits", "padding", "bn_epsilon", "precision"]
    if network.takes != "normalised":
        fields += ["mean", "std"]
    changes = network.build_recipe()
    return recipe.replace(**{name: getattr(changes, name) for name in fields})


def _choose_assumption(network: Network, sources: Sequence[tuple[str, str]]) -> str:
    """Return the row of preprocessing that is assumed with a remark; "" if names are NVIDIA's or
    Gluon's."""
    if network.takes == "bgr":
        return "keras"
    names = [name for _, name in sources]
    is_known = set(sources) >= {*name_tensors(network.spec).items()} or are_gluons(names)
    return "" if is_known else "nvidia-mxnet"


def _describe_step(path: Path) -> str:
    match = _OF_EPOCH.fullmatch(path.name)
    if match is None:
        return "no step is stored"
    first = int(match[2] == "-")
    return f"no step is stored; its name says epoch {int(match[3])}, counted from {first}"


def write(target: Path, recipe: Recipe, state: State, into: Path | None = None) -> common.Written:
    """Write a state with NVIDIA's names, and the graph; return the files and remarks on them.

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
    files: common.Writers = {}
    if not has_graph:
        files[graph] = lambda path: path.write_bytes(build_symbol(recipe))
    momentum = _name_file(prefix, epoch, _MOMENTUM)
    if velocities:
        files[momentum] = partial(mxnet_params.dump, arrays=velocities)
    files[file] = partial(mxnet_params.dump, arrays=weights)
    common.write_new(prefix, files, momentum, into=into)
    if has_graph and into is not None:
        common.redirect_file(graph, into).write_bytes(build_symbol(recipe))
    remarks = [f"{graph} existed already with the same contents"] if has_graph else []
    remarks += _describe_differences(recipe, state)
    arrays = (file, momentum) if velocities else (file,)
    return common.Written(tuple(files), arrays, tuple(remarks))


def write_epoch(prefix: Path, epoch: int, recipe: Recipe, state: State) -> Path:
    """Write weights as NVIDIA's code does after an epoch, and velocities; return the weights' file.
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
        with naming_target(path), replacing(path) as new:
            mxnet_params.dump(new, arrays)
    return file


def check_prefix(prefix: Path, recipe: Recipe) -> None:
    """Write the graph, or check the existing one, before a run that will write weights next to it.

    Raises `CheckpointError` if there is a different graph, or if the folder cannot be written to.
    """
    graph = _name_graph(prefix)
    with naming_target(graph):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        if not _has_graph(prefix, recipe):
            with replacing(graph) as new:
                new.write_bytes(build_symbol(recipe))


def _split_target(target: Path) -> tuple[Path, int]:
    """Return the prefix and epoch of the files to write."""
    match = _OF_EPOCH.fullmatch(target.name)
    if match and match[2] == "-":
        return target.with_name(match[1]), int(match[3])
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
    """Return whether the recipe's graph exists. Raises `CheckpointError` for a different one."""
    graph = _name_graph(prefix)
    if not graph.exists() or read_whole(graph, TEXT) == build_symbol(recipe):
        return graph.exists()
    raise CheckpointError(
        f"{graph} already exists with a different graph; name a new prefix, or remove it"
    )


def _name_arrays(
    recipe: Recipe, state: State
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the state's weights and velocities by NVIDIA's names. Raises `CheckpointError`
    if the state is of another model than the recipe's."""
    weights, velocities = name_arrays(OIHW, name_tensors(recipe.spec), recipe, state)
    kinds = {name: ("arg", "aux")["_moving_" in name] for name in weights}
    return {f"{kinds[name]}:{name}": value for name, value in weights.items()}, velocities


def _describe_differences(recipe: Recipe, state: State) -> Iterator[str]:
    if recipe.model not in _MODELS:
        yield (
            f"NVIDIA's code has only {', '.join(_MODELS)} of these models, not this one; its graph"
            f" is in *{_SYMBOL}"
        )
    # How much SAME pads depends on the size of the images, which a graph does not fix.
    for remark in common.describe_other_padding(recipe):
        yield f"the graph pads symmetrically; {remark}"
    if recipe.logits != _LOGITS:
        yield (
            f"NVIDIA's graph has {_LOGITS} outputs; these weights have {recipe.logits}:"
            " --num-classes"
        )
    if state.momentum:
        yield (
            f"MXNet does not read the velocities in *{_MOMENTUM}: NVIDIA's code resumes with"
            " velocities of 0"
        )
    if state.step:
        yield (
            f"step {state.step} cannot be stored; the epoch in the name or --load-epoch sets where"
            " to resume"
        )
    if state.scaler:
        yield "the state of dynamic loss scaling cannot be stored and was left out"
