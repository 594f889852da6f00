"""Weights of a ResNet in a frozen graph or a SavedModel of TensorFlow. `network` finds them by
following its nodes.

Graphs whose constants have the names of NVIDIA's code are NVIDIA's (`nvidia_tensorflow`), and their
preprocessing is that of its recipe. Exports of Lockstep say theirs, and the names of the classes:

| export | preprocessing | classes |
|---|---|---|
| frozen graph | a constant `lockstep_preprocessing` | a constant `lockstep_classes`, a JSON list |
| SavedModel | `assets.extra/lockstep_preprocessing.json` | `assets.extra/classes.txt` |
"""

from collections.abc import Iterator
from pathlib import Path

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import is_list_of, is_text, parsed
from lockstep.weights.formats import network, nvidia_tensorflow, onnx_metadata, tensorflow_graph
from lockstep.weights.formats.network import Network
from lockstep.weights.formats.tensor_bundle import DTYPE_NAMES
from lockstep.weights.formats.tensorflow_graph import FLOATS, FlatGraph
from lockstep.weights.formats.tensorflow_nodes import Nodes
from lockstep.weights.opened_weights import Stored, Weights, list_arrays

NAME = "TensorFlow's graphs"

SAVED_MODEL = "saved_model.pb"
FROZEN_GRAPH = "frozen_graph.pb"
PREPROCESSING = onnx_metadata.KEY
CLASSES = "lockstep_classes"
"""Constants of a frozen graph that Lockstep wrote."""
EXTRA = "assets.extra"
"""The folder of a SavedModel for files that TensorFlow does not read."""
_MOST_TEXT = 2**24
_NVIDIAS = (
    "the graph does not normalise its images, so the mean and std of NVIDIA's recipe are used"
)
_ASSUMED = (
    "the graph does not normalise its images, so the usual mean and std of ImageNet are assumed"
)


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file holds a frozen graph, or the graph of a SavedModel."""
    return tensorflow_graph.is_graph(path) or tensorflow_graph.is_saved_model(path)


def find(path: Path) -> Path | None:
    """Return the `.pb` file with the graph that a path names; None if it names none.

    A path is this file, the folder of a SavedModel, or a folder that `lockstep export --to
    frozen-graph` wrote.
    """
    if path.is_dir():
        files = [path / name for name in (SAVED_MODEL, FROZEN_GRAPH) if (path / name).is_file()]
        return files[0] if files else None
    return path if path.suffix == ".pb" and path.is_file() else None


def read(path: Path, *, momentum: bool = False) -> Weights:
    """Read a ResNet or ResNeXt. A graph has no velocities, whatever `momentum` is.

    Raises `CheckpointError` if the file is damaged or computes something else.
    """
    graph = tensorflow_graph.opened(path)
    try:
        about, classes, files = _noted(graph)
        nodes = Nodes(graph, from_anywhere=about is not None)
        resnet = network.follow(nodes)
        made = list(resnet.made(nodes))
        is_nvidias = _is_nvidias(resnet, dict(made))
        recipe = resnet.recipe()
        recipe = _of_nvidia(recipe, resnet) if is_nvidias else recipe
        halves = nodes.halves()
    except (ValueError, LookupError, TypeError, RecursionError, RecipeError) as error:
        raise CheckpointError(f"{path} is not a ResNet that can be read: {error}") from None
    recipe, has_preprocessing, remarks = _prepared(recipe, resnet, about, is_nvidias=is_nvidias)
    remarks = (*resnet.remarks, *remarks, *resnet.about_units())
    if halves:
        remarks = (
            *remarks,
            (
                f"{len(halves)} constants, such as {halves[0]}, are not float32 and were converted"
                " to it"
            ),
        )
    return Weights(
        recipe,
        State(0, resnet.tensors(), {}),
        classes if len(classes) <= recipe.logits else (),
        path,
        "NVIDIA TensorFlow" if is_nvidias else "TensorFlow",
        remarks,
        is_folded=resnet.folded > 0,
        has_preprocessing=has_preprocessing,
        stored=_listed(graph, made),
        others=(*_of_bundle(graph), *files),
    )


def _is_nvidias(resnet: Network, places: dict[str, str]) -> bool:
    """Return whether the weights have the names of NVIDIA's code below one scope."""
    if resnet.spec.block != "bottleneck" or resnet.spec.stride_in != "3x3":
        return False
    names = nvidia_tensorflow.name_tensors(resnet.spec)
    scope = places.get("fc.weight", "").removesuffix(names["fc.weight"])
    return all(places.get(tensor) == scope + name for tensor, name in names.items())


def _of_nvidia(recipe: Recipe, resnet: Network) -> Recipe:
    """Return NVIDIA's recipe with what the graph says."""
    published = nvidia_tensorflow.choose_recipe(resnet.spec, recipe.logits)
    published = published.replace(padding=recipe.padding, bn_epsilon=recipe.bn_epsilon)
    return published.replace(mean=recipe.mean, std=recipe.std) if resnet.normalises else published


def _prepared(
    recipe: Recipe, resnet: Network, about: str | None, *, is_nvidias: bool
) -> tuple[Recipe, bool, tuple[str, ...]]:
    """Return the recipe with the preprocessing that Lockstep wrote, whether nothing is to be
    assumed, and remarks."""
    assumed = () if resnet.normalises else (_NVIDIAS if is_nvidias else _ASSUMED,)
    if about is None:
        return recipe, is_nvidias, assumed
    try:
        return (
            onnx_metadata.with_preprocessing(recipe, about, normalises=resnet.normalises),
            True,
            (),
        )
    except ValueError as error:
        return recipe, is_nvidias, (*assumed, f"its {PREPROCESSING} was left out: {error}")


def _noted(graph: FlatGraph) -> tuple[str | None, tuple[str, ...], tuple[Path, ...]]:
    """Return what an export of Lockstep says of its preprocessing, its classes, and the files next
    to the graph."""
    folder = graph.path.parent / EXTRA
    if graph.outputs:
        files = [folder / f"{PREPROCESSING}.json", folder / "classes.txt"]
        about, names = (_text_of(file) for file in files)
        classes = tuple((names or "").splitlines())
        return about, classes, tuple(file for file in files if file.is_file())
    texts = {node.name: node for node in graph.nodes if node.name in (PREPROCESSING, CLASSES)}
    about = tensorflow_graph.text(texts[PREPROCESSING]) if PREPROCESSING in texts else None
    listed_classes = parsed(tensorflow_graph.text(texts[CLASSES])) if CLASSES in texts else []
    return about, tuple(listed_classes) if is_list_of(is_text)(listed_classes) else (), ()


def _text_of(file: Path) -> str | None:
    """Return the text of a small file; None if there is none."""
    if not file.is_file() or file.stat().st_size > _MOST_TEXT:
        return None
    return read_regular(file, TEXT).decode("utf-8", errors="replace")


def _of_bundle(graph: FlatGraph) -> tuple[Path, ...]:
    """Return the files that hold the variables of a SavedModel."""
    folder = graph.path.parent / "variables"
    return (
        ()
        if graph.bundle is None
        else tuple(sorted(file for file in folder.glob("variables.*") if file.is_file()))
    )


def _listed(graph: FlatGraph, made: list[tuple[str, str]]) -> tuple[Stored, ...]:
    """Return the arrays of floats that a file stores, and integers that weights are made of."""
    return list_arrays(_arrays(graph), made)


def _arrays(graph: FlatGraph) -> Iterator[tuple[str, str, tuple[int, ...]]]:
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
