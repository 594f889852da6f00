"""Weights of a ResNet in a frozen graph or a SavedModel of TensorFlow. `network_walk` finds
them by following its nodes.

Graphs whose constants have the names of NVIDIA's code are NVIDIA's (`nvidia_tensorflow`), and their
preprocessing is that of its recipe. Exports of Lockstep say theirs, and the names of the classes:

| export | preprocessing | classes |
|---|---|---|
| frozen graph | a constant `lockstep_preprocessing` | a constant `lockstep_classes`, a JSON list |
| SavedModel | `assets.extra/lockstep_preprocessing.json` | `assets.extra/classes.txt` |
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding.augment import prepare_square
from lockstep.data.decoding.orientation import UPRIGHT
from lockstep.data.textures import draw_texture
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.files import write_json
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import is_list_of, is_text, parsed
from lockstep.weights.formats import nvidia_tensorflow, onnx_metadata, tensorflow_graph
from lockstep.weights.formats.account import UNUSED, Part, account_for_constants
from lockstep.weights.formats.common import describe_converted
from lockstep.weights.formats.network_walk import follow
from lockstep.weights.formats.resnet_graph import Network
from lockstep.weights.formats.tensor_bundle import DTYPE_NAMES
from lockstep.weights.formats.tensorflow_graph import FLOATS, VARIABLES, FlatGraph, Node, message
from lockstep.weights.formats.tensorflow_nodes import Nodes
from lockstep.weights.opened_weights import Weights, list_arrays
from lockstep.weights.weights_choice import DEFAULT_CHOICE, WeightsChoice

NAME = "TensorFlow's graphs"

SAVED_MODEL = "saved_model.pb"
FROZEN_GRAPH = "frozen_graph.pb"
PREPROCESSING = onnx_metadata.KEY
CLASSES = "lockstep_classes"
"""Constants of a frozen graph that Lockstep wrote."""
EXTRA = "assets.extra"
"""The folder of a SavedModel for files that TensorFlow does not read."""
_MOST_TEXT = 2**24
_MOST_DIFFERENCE = 0.05
"""Pixels may differ by this much on average: by one level, and only few do."""
_NVIDIAS = (
    "the graph does not normalise its images, so the mean and std of NVIDIA's recipe are used"
)

_OPERATORS = {
    *("Add", "AddV2", "ArgMax", "AvgPool", "BiasAdd", "Cast", "ConcatV2", "Const", "Conv2D", "Div"),
    *("EnsureShape", "Exp", "ExpandDims", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
    *("GatherV2", "Identity", "Log", "LogSoftmax", "MatMul", "MaxPool", "Maximum", "Mean", "Mul"),
    *("Neg", "Pack", "Pad", "PadV2", "RealDiv", "Relu", "Reshape", "ReverseV2", "Rsqrt", "Shape"),
    *("Sigmoid", "Slice", "Softmax", "Split", "Sqrt", "Squeeze", "StopGradient", "StridedSlice"),
    *("Sub", "Transpose"),
}
"""The operators that are rebuilt: none of them reads a file or runs code."""
_FLOAT = 1
_UINT8 = 4
_MOST_BYTES = 2**31 - 2**20
"""What a message of Protocol Buffers may have."""


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file holds a frozen graph, or the graph of a SavedModel."""
    return tensorflow_graph.is_graph(path) or tensorflow_graph.is_saved_model(path)


def find(path: Path) -> Path | None:
    """Return the `.pb` file with the graph that a path names; None if there is none.

    A path is this file, the folder of a SavedModel, or a folder that `lockstep export --to
    frozen-graph` wrote.
    """
    if path.is_dir():
        files = [path / name for name in (SAVED_MODEL, FROZEN_GRAPH) if (path / name).is_file()]
        return files[0] if files else None
    return path if path.suffix == ".pb" and path.is_file() else None


def read(path: Path, *, momentum: bool = False, choice: WeightsChoice = DEFAULT_CHOICE) -> Weights:
    """Read a ResNet or ResNeXt. A graph has no velocities, whatever `momentum` is.

    Raises `CheckpointError` if the file is damaged or computes something else.
    """
    graph = tensorflow_graph.open_graph(path)
    try:
        text, classes, files = _read_notes(graph)
        nodes = Nodes(graph, from_anywhere=text is not None)
        resnet = follow(nodes.operators)
        sources = list(resnet.list_sources(nodes.operators))
        is_nvidias = _is_nvidias(resnet, set(sources))
        recipe = resnet.build_recipe()
        if is_nvidias:
            recipe = _choose_nvidia_recipe(recipe, resnet)
        if nodes.squares:
            own = onnx_metadata.apply_preprocessing(recipe, str(text), normalises=False)
            _check_resize(nodes, own)
    except (ValueError, LookupError, TypeError, RecursionError, RecipeError) as error:
        raise CheckpointError(f"{path} is not a ResNet that can be read: {error}") from None
    recipe, places, about = onnx_metadata.read_preprocessing(
        recipe, text, PREPROCESSING, normalises=resnet.normalises
    )
    if is_nvidias and not (places or resnet.normalises):
        about = (*about, _NVIDIAS)
    write = partial(_write_original, graph, nodes, resnet.head.output)
    remarks = [*resnet.remarks, *about, *resnet.describe_units(), *_name_signatures(graph)]
    return Weights(
        recipe,
        State(0, resnet.build_tensors(), {}),
        resnet.permute_classes(classes),
        path,
        "NVIDIA TensorFlow" if is_nvidias else "TensorFlow",
        (*remarks, *describe_converted(list(nodes.halves), "constants")),
        stated=frozenset(places) or resnet.stated,
        preprocessing_from=places,
        assumed_as="keras" if resnet.has_keras_names else "",
        original=resnet.describe_original("TensorFlow", write, rounds=nodes.rounds),
        parts=(*resnet.parts, *_account_for_rest(graph, nodes, {name for _, name in sources})),
        stored=list_arrays(_describe_arrays(graph), sources),
        others=(*_list_bundle(graph), *files),
    )


def _check_resize(nodes: Nodes, recipe: Recipe) -> None:
    """Raise `ValueError` unless the nodes before the network resize and crop a photo as evaluation
    does."""
    photo = draw_texture("stripes", 1)[:61, :47]
    square = np.empty((recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
    prepare_square(photo, UPRIGHT, recipe, square)
    last = nodes.squares[0]
    pixels = nodes.values.compute(last.inputs[0], nodes.images[0].output, photo[None])
    if pixels is None or pixels.shape != (1, *square.shape):
        pixels = np.full(1, np.inf)
    if np.abs(pixels - square.astype(np.float64)).mean() > _MOST_DIFFERENCE:
        raise ValueError(
            f"the nodes before {last.op} {last.name!r:.80} do not resize and crop images as its"
            f" {PREPROCESSING} says, so its results would differ; export it again"
        )


def _account_for_rest(graph: FlatGraph, nodes: Nodes, used: set[str]) -> Iterator[Part]:
    """Yield the account of nodes and constants that no tensor is made of."""
    for node in nodes.unused:
        if node.op != "Const":
            yield Part(f"{node.op} {node.name!r:.80}", "without effect", UNUSED)
    users = dict.fromkeys(map(str, nodes.values.read), "the nodes that compute with it")
    names = [name for name, _, _ in _describe_arrays(graph) if name in users or "//" not in name]
    yield from account_for_constants(names, used, users)


def _name_signatures(graph: FlatGraph) -> Iterator[str]:
    """Yield a remark on the signatures that are not read."""
    chosen, *others = graph.signatures or ("",)
    if others:
        yield f"reading the signature {chosen!r:.60}, not {', '.join(others)[:200]}"


def _is_nvidias(resnet: Network, sources: set[tuple[str, str]]) -> bool:
    """Return whether the weights have the names of NVIDIA's code below one scope."""
    if resnet.spec.block != "bottleneck" or resnet.spec.stride_in != "3x3":
        return False
    names = nvidia_tensorflow.name_tensors(resnet.spec)
    places = [name for tensor, name in sources if tensor == "fc.weight"]
    scopes = [name.removesuffix(names["fc.weight"]) for name in places]
    return any(sources >= {(key, scope + name) for key, name in names.items()} for scope in scopes)


def _choose_nvidia_recipe(recipe: Recipe, resnet: Network) -> Recipe:
    """Return NVIDIA's recipe with what the graph says."""
    published = nvidia_tensorflow.choose_recipe(resnet.spec, recipe.logits)
    fields = ("padding", "bn_epsilon", "eval_resize", "eval_crop")
    published = published.replace(**{name: getattr(recipe, name) for name in fields})
    return published.replace(mean=recipe.mean, std=recipe.std) if resnet.normalises else published


def _read_notes(graph: FlatGraph) -> tuple[str | None, tuple[str, ...], tuple[Path, ...]]:
    """Return the preprocessing and the classes that an export of Lockstep wrote, and the files next
    to the graph that have them."""
    if graph.signatures:
        folder = graph.path.parent / EXTRA
        files = [folder / f"{PREPROCESSING}.json", folder / "classes.txt"]
        text, names = map(_read_small_file, files)
        return text, tuple((names or "").splitlines()), tuple(filter(Path.is_file, files))
    nodes = {node.name: node for node in graph.nodes if node.name in (PREPROCESSING, CLASSES)}
    texts = {name: tensorflow_graph.decode_text(node) for name, node in nodes.items()}
    classes = parsed(texts.get(CLASSES, "[]"))
    return texts.get(PREPROCESSING), tuple(classes) if is_list_of(is_text)(classes) else (), ()


def _read_small_file(file: Path) -> str | None:
    """Return the text of a small file; None if there is none."""
    if not file.is_file() or file.stat().st_size > _MOST_TEXT:
        return None
    return read_regular(file, TEXT).decode("utf-8", errors="replace")


def _list_bundle(graph: FlatGraph) -> list[Path]:
    """Return the files that hold the variables of a SavedModel."""
    places = (graph.path.parent / "variables").glob("variables.*")
    return sorted(filter(Path.is_file, places)) if graph.bundle is not None else []


def _describe_arrays(graph: FlatGraph) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, type and shape of the arrays of floats that a file stores."""
    if graph.bundle is not None:
        for name, entry in graph.bundle.entries.items():
            if entry.dtype in FLOATS:
                yield name, entry.dtype_name, entry.shape
    for node in graph.nodes:
        if node.op == "Const" and graph.dtype(node) in FLOATS:
            try:
                shape = graph.shape(node)
            except ValueError:
                continue
            if shape:
                yield node.name, DTYPE_NAMES[graph.dtype(node)], shape


def _write_original(graph: FlatGraph, nodes: Nodes, output: str, folder: Path) -> None:
    """Write the nodes of a graph that an output is computed from, with their constants, as a
    frozen graph. Raises `ValueError` if a node is not rebuilt, or the graph is too large."""
    (start,) = nodes.operators.inputs
    name_maker = nodes.values.name_maker
    makers = {node.name: node for node in graph.nodes}
    first = name_maker(start)
    names = {first: "images"}
    waiting = [name_maker(output)]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names[name] = f"node{len(names)}"
            waiting += map(name_maker, makers[name].inputs)
    kind = _UINT8 if nodes.operators.takes_bytes else _FLOAT
    rebuilt = [_build_node("images", "Placeholder", [], {"dtype": message("Value")(type=kind)})]
    for name, new in names.items():
        if name != first:
            rebuilt.append(_rebuild(graph, makers[name], new, names))
    data = message("Graph")(node=rebuilt).SerializeToString()
    if len(data) > _MOST_BYTES:
        raise ValueError("it has more than 2 GiB")
    (folder / "graph.pb").write_bytes(data)
    place = _rename(graph.actual(output), names)
    write_json(folder / "graph.json", {"input": "images:0", "output": place})


def _rename(value: str, names: dict[str, str]) -> str:
    """Return a value's name in the rebuilt graph."""
    node, _, place = value.partition(":")
    if not place.isdecimal():
        raise ValueError(f"{value!r:.80} is not supported")
    return f"{names[node]}:{place}"


def _rebuild(graph: FlatGraph, node: Node, name: str, names: dict[str, str]) -> Any:
    """Return a node with another name. Variables become constants."""
    if node.op in VARIABLES:
        return _build_constant(name, graph.array(node).astype(np.float32))
    inputs = [_rename(graph.actual(value), names) for value in node.inputs]
    if node.op == "ReadVariableOp":
        return _build_node(name, "Identity", inputs, {"T": message("Value")(type=_FLOAT)})
    if node.op not in _OPERATORS:
        raise ValueError(f"{node.op} {node.name!r:.80} is not supported")
    # Private attributes name devices and other nodes.
    attributes = {key: value for key, value in node.attributes.items() if not key.startswith("_")}
    return _build_node(name, node.op, inputs, attributes)


def _build_node(name: str, kind: str, inputs: list[str], attributes: dict[str, Any]) -> Any:
    entries = [message("Attribute")(key=key, value=value) for key, value in attributes.items()]
    return message("Node")(name=name, op=kind, input=inputs, attr=entries)


def _build_constant(name: str, array: np.ndarray) -> Any:
    sizes = [message("Dim")(size=size) for size in array.shape]
    tensor = message("Tensor")(
        dtype=_FLOAT, tensor_shape=message("Shape")(dim=sizes), tensor_content=array.tobytes()
    )
    attributes = {"dtype": message("Value")(type=_FLOAT), "value": message("Value")(tensor=tensor)}
    return _build_node(name, "Const", [], attributes)
