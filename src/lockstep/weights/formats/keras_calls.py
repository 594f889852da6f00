"""The calls of the layers of a Keras model, as its file describes them: `Calls`.

    {"class_name": "Functional", "config": {"layers": [...], "input_layers": ..., ...}}
    {"class_name": "Sequential", "config": {"layers": [...]}}

A layer has a class, a configuration, and calls with values: its `inbound_nodes`, of which Keras 2
and 3 have two forms. A layer that is a model is replaced by its layers. What `keras.ops` or
TensorFlow's functions compute is a layer, too.

Sources: keras/src/models/functional.py, saving/serialization_lib.py and saving/saving_lib.py (how
arrays are numbered) of Keras 3.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.weights.formats.keras_variables import VARS

Config = Mapping[str, Any]
Arrays = Mapping[str, str]
"""Paths of arrays in a file, by what is left of each path in a model or a layer."""
MODELS = ("functional", "sequential", "model")
_MOST_CALLS = 5_000
"""ResNet-152 has 500 layers."""
_PACKAGES = ("keras", "tf_keras", "tensorflow")
_FUNCTIONS = ("TFOpLambda", "SlicingOpLambda")
_SETTINGS = ("training", "name", "dtype", "axis", "data_format")
"""Arguments of calls that are not values."""
WITH_ARRAYS = ("Conv2D", "Dense", "BatchNormalization")


class Value(str):
    """A value of the graph among the arguments of a layer."""


@dataclass(frozen=True)
class Call:
    """A call of a layer."""

    kind: str
    """Its class in small letters; `function add` for a function of TensorFlow, and "" for a class
    of another package."""
    label: str
    """Its class in messages."""
    name: str
    scope: str
    """The models around it, `base/`."""
    output: str
    """The value that it computes."""
    arguments: Sequence[Any]
    config: Config
    """Its configuration, and the settings of the call."""
    arrays: Arrays

    @property
    def inputs(self) -> list[str]:
        """The values that it is called with."""
        return _list_values(self.arguments)


class Calls:
    """All calls of a model. What is not Keras' raises `ValueError`, `LookupError`, `TypeError`,
    `AttributeError` or `RecursionError`."""

    def __init__(self, model: Config, arrays: Arrays, value: str) -> None:
        self.calls: list[Call] = []
        """Connections of models are calls of Identity."""
        self.image_shape: list[Any] = []
        """Batch, height, width and channels, as far as the file says them."""
        self.takes_bytes = False
        self.rounds = False
        """Whether a layer computes in 16 bits."""
        kind, label = find_kind(model)
        if kind not in MODELS:
            raise ValueError(
                f"it is a {label}, whose code is not in the file; expected a Functional or"
                " Sequential model; save its weights alone, as .weights.h5"
            )
        self.inputs = [value]
        if kind != "sequential":
            self.inputs *= len(_list_links(model["config"]["input_layers"]))
        self.outputs = self._add_model(model, "", arrays, self.inputs)

    def _add_model(
        self, model: Config, scope: str, arrays: Arrays, values: Sequence[str]
    ) -> list[str]:
        """Add the calls of a model's layers, given its inputs, and return its outputs."""
        config = model["config"]
        layers = config if isinstance(config, list) else config["layers"]
        places = _locate_arrays(arrays, layers, is_inner=bool(scope))
        chain = list(values) if find_kind(model)[0] == "sequential" else []
        for layer in layers:
            kind = find_kind(layer)[0]
            if kind == "inputlayer" or not self.image_shape:
                self._read_input(layer["config"])
            if kind == "inputlayer":
                continue
            name = _find_name(layer)
            own = places.get(name, {})
            nodes = [{"args": [Value(chain[0])], "kwargs": {}}] if chain else layer["inbound_nodes"]
            for number, node in enumerate(nodes):
                output = _name_value(scope, name, number)
                self._add_layer(layer, scope, output, _read_call(node, scope), own)
                chain = chain and [output]
        if chain:
            return chain
        for link, outer in zip(_list_links(config["input_layers"]), values, strict=True):
            self._connect(outer, _name_value(scope, *link))
        return [_name_value(scope, *link) for link in _list_links(config["output_layers"])]

    def _read_input(self, config: Any) -> None:
        """Note shape and type of the images."""
        if isinstance(config, Mapping):
            shape = config.get("batch_shape") or config.get("batch_input_shape")
            self.image_shape = self.image_shape or list(shape or ())
            self.takes_bytes = self.takes_bytes or "int" in str(config.get("dtype"))

    def _add_layer(
        self, layer: Config, scope: str, output: str, call: tuple[list[Any], Config], arrays: Arrays
    ) -> None:
        """Add the call of a layer, or those of the layers of a model."""
        arguments, settings = call
        kind, label = find_kind(layer)
        if kind in MODELS and not settings.get("training"):
            results = self._add_model(layer, f"{output}/", arrays, _list_values(arguments))
            for number, value in enumerate(results):
                # Keras counts the calls of models from 0 or from 1.
                self._connect(value, _name_value("", output, 0, number))
                self._connect(value, _name_value("", output, 1, number))
            return
        config: dict[str, Any] = {}
        if isinstance(layer["config"], Mapping):
            config |= layer["config"]
        name = _find_name(layer)
        config |= settings
        self._append(Call(kind, label, name, scope, output, arguments, config, arrays))

    def _connect(self, value: str, output: str) -> None:
        self._append(Call("identity", "Identity", "", "", output, [Value(value)], {}, {}))

    def _append(self, call: Call) -> None:
        self.calls.append(call)
        self.rounds = self.rounds or "float16" in str(call.config.get("dtype"))
        if len(self.calls) > _MOST_CALLS:
            raise ValueError(f"it has more than {_MOST_CALLS} layers")


def find_class(item: Any) -> Any:
    """Return the class of an object of a description; None for plain values."""
    return item.get("class_name") if isinstance(item, Mapping) else None


def find_kind(layer: Config) -> tuple[str, str]:
    """Return `Call.kind` and `Call.label` of a layer. Only newer files name its package."""
    label = str(layer["class_name"])
    if str(layer.get("module", "keras")).split(".")[0] not in _PACKAGES:
        return "", label
    if label not in _FUNCTIONS:
        return label.lower(), label
    label = str(layer["config"]["function"])
    return f"function {label.rpartition('.')[2]}", label


def _find_name(layer: Config) -> str:
    return str(layer.get("name") or layer["config"]["name"])


def _name_value(scope: str, layer: str, call: int = 0, number: int = 0) -> str:
    """Return the name of a value that a call of a layer returns."""
    return f"{scope}{layer}{f':{call}' if call else ''}{f'#{number}' if number else ''}"


def _is_link(item: Any) -> bool:
    """Return whether an item is a layer's name, the number of a call, and that of a value."""
    return isinstance(item, list) and list(map(type, item)) == [str, int, int]


def _list_links(structure: Any) -> list[Any]:
    """Return the links in nested lists and dicts."""
    if _is_link(structure):
        return [structure]
    items = structure.values() if isinstance(structure, Mapping) else structure
    return [link for item in items for link in _list_links(item)]


def _list_values(items: Any) -> list[str]:
    """Return the values in nested lists."""
    if isinstance(items, Value):
        return [items]
    parts = items if isinstance(items, list) else []
    return [value for part in parts for value in _list_values(part)]


def _read_call(node: Any, scope: str) -> tuple[list[Any], Config]:
    """Return arguments and settings of a call, in the form of Keras 3 or 2."""

    def resolve(item: Any) -> Any:
        link = item
        if find_class(item) == "__keras_tensor__":
            link = item["config"]["keras_history"]
        if _is_link(link):
            return Value(_name_value(scope, *link))
        return [resolve(part) for part in item] if isinstance(item, list) else item

    if isinstance(node, Mapping):
        arguments, settings = resolve(node["args"]), node["kwargs"]
    else:
        links = node if isinstance(node[0], list) else [node]
        settings = links[0][3] if len(links[0]) > 3 else {}
        arguments = []
        for link in links:
            arguments.append(link[2] if link[0] == "_CONSTANT_VALUE" else resolve(link[:3]))
        arguments = arguments if len(links) == 1 else [arguments]
    for name, item in settings.items():
        if name not in _SETTINGS and item is not None:
            arguments.append(resolve(item))
    return arguments, {name: item for name, item in settings.items() if name in _SETTINGS}


def _locate_arrays(
    arrays: Arrays, layers: Sequence[Config], *, is_inner: bool
) -> dict[str, dict[str, str]]:
    """Return the arrays of each of a model's layers.

    Files that name layers have `<layer>/...`, and below it the layers of a model and of the models
    in it. Others number the layers of a class in their order: `layers/<class>_<count>/vars/...`.
    """
    groups: dict[str, dict[str, str]] = {}
    is_numbered = any(f"/{VARS}/" in rest for rest in arrays)
    for rest, path in arrays.items():
        *above, variable = rest.split("/")
        if is_numbered:
            above, variable = above[:2], "/".join([*above[2:], variable])
        elif not is_inner:
            above, variable = above[:1], "/".join([*above[1:], variable])
        groups.setdefault("".join(above[-1:]), {})[variable] = path
    if not is_numbered:
        if is_inner:
            inner = [layer for layer in layers if find_kind(layer)[0] in MODELS]
            groups |= {_find_name(layer): dict(arrays) for layer in inner}
        return groups
    queues: dict[str, list[tuple[int, str]]] = {}
    for group in groups:
        kind, count = re.fullmatch("(.*?)_?([0-9]*)", group).groups()  # type: ignore[union-attr]
        queues.setdefault(kind, []).append((int(count or 0), group))
    located = {}
    for layer in layers:
        kind = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", str(layer["class_name"])).lower()
        if queues.get(kind) and _has_arrays(layer):
            queues[kind].sort()
            located[_find_name(layer)] = groups[queues[kind].pop(0)[1]]
    return located


def _has_arrays(layer: Config) -> bool:
    """Return whether a layer has arrays in a file."""
    config = layer["config"]
    if find_kind(layer)[0] in MODELS:
        return any(map(_has_arrays, config if isinstance(config, list) else config["layers"]))
    if layer["class_name"] == "Normalization":
        return config.get("mean") is None
    return layer["class_name"] in WITH_ARRAYS
