"""What the layers of a Keras model compute, in ONNX's terms: `Translation`.

Nothing of a file is run. A layer that is not one of `_TRANSLATIONS`, or has settings that a ResNet
does not have, keeps its class as its operator, `layer Resizing`, which `network_walk` refuses by
name.

Source: keras/src/layers and keras/src/ops of Keras 3.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.files import write_json
from lockstep.weights.formats.account import Part
from lockstep.weights.formats.keras_calls import MODELS, Call, Calls, Value, find_class
from lockstep.weights.formats.keras_variables import VARS, Variables, rename_layer, rename_variable
from lockstep.weights.formats.resnet_graph import Graph, Operator
from lockstep.weights.weights_choice import WeightsChoice

Steps = list[tuple[str, list[str], dict[str, Any]]]
"""Operators one after the other: types, inputs and attributes. The input "" is the value before."""
IN_TRAINING = re.compile(
    "(alpha|gaussian|spatial)?dropout([123]d)?|gaussiannoise|activityregularization"
    "|random(brightness|color(degeneration|jitter)|contrast|elastictransform|erasing|flip"
    "|gaussianblur|grayscale|height|hue|invert|perspective|rotation|saturation|sharpness|shear"
    "|translation|width|zoom)|augmix|cutmix|mixup|randaugment"
)
"""Classes of layers that return their input in inference."""
_ACTIVATIONS = {"relu": "Relu", "softmax": "Softmax", "sigmoid": "Sigmoid"}
_ACTIVATIONS |= {"logsoftmax": "LogSoftmax"}
_ARITHMETIC = {"add": "Add", "subtract": "Sub", "multiply": "Mul", "divide": "Div"}
_ARITHMETIC |= {"truedivide": "Div"}
_FUNCTIONS = {name: name for name in (*_ARITHMETIC, *_ACTIVATIONS, "getitem", "cast")}
_FUNCTIONS |= {"bias_add": "add", "truediv": "divide"}
"""Functions of TensorFlow, and the operations of Keras that they are."""
_OF_MANY = (*_ARITHMETIC, "getitem", "stack")
"""Layers that have other arguments than one value."""
_LARGE = 2**31 - 1

_SETTINGS = {
    *("activation", "axis", "center", "dilation_rate", "epsilon", "filters", "groups", "invert"),
    *("keepdims", "kernel_size", "mean", "offset", "padding", "pool_size", "scale", "strides"),
    *("target_shape", "units", "use_bias", "variance"),
}
_IDENTITIES = ("identity", "cast")
"""Plain settings, which a rebuilt layer keeps, and what returns its input."""


class Translation:
    """A model in ONNX's terms. What is not Keras' raises `ValueError`, `LookupError`, `TypeError`,
    `AttributeError` or `RecursionError`."""

    def __init__(
        self,
        description: Any,
        places: Mapping[str, str],
        variables: Variables,
        choice: WeightsChoice,
    ) -> None:
        self.parts: list[Part] = []
        self.unknown: list[str] = []
        """Names of layers that are refused."""
        self.places: dict[str, str] = {}
        """Paths of arrays by the names of constants."""
        self.variables_of: dict[str, list[str]] = {}
        """Paths of arrays in the order of a layer's variables, by the value that it computes."""
        self.arrays: dict[str, np.ndarray] = {}
        """The arrays of all layers by their paths, as the file has them."""
        self._variables = variables
        self._choice = choice
        self._constants: dict[str, np.ndarray] = {}
        self._operators: dict[str, Operator] = {}
        """By the values that they compute."""
        self._ranks: dict[str, int] = {}
        """Numbers of axes of values; 4 for others."""
        self._is_turned = False
        model = Calls(description, places, "images")
        self.calls = model.calls
        self.rounds = model.rounds
        self._image = model.image_shape[1:3]
        for call in self.calls:
            self._ranks[call.output] = self._find_rank(call)
            self._add(call.inputs[0], self._translate(call), call.output)
        self._check_connections(model.inputs)
        outputs = list(model.outputs)
        self.has_classifier = not self._add_zeros(outputs)
        self.graph = Graph(
            list(self._operators.values()),
            model.inputs,
            outputs,
            self._constants,
            {name: variables.place(path) for name, path in self.places.items()},
            channels_last=True,
            takes_bytes=model.takes_bytes,
            sizes=self._image,
        )

    def _check_connections(self, inputs: list[str]) -> None:
        """Raise `ValueError` if a layer does not depend on images."""
        users: dict[str, list[str]] = {}
        for output, operator in self._operators.items():
            for value in operator.input:
                users.setdefault(value, []).append(output)
        queue = list(inputs)
        for value in queue:
            queue += users.pop(value, [])
        if rest := self._operators.keys() - set(queue):
            raise ValueError(f"its layer {min(rest)!r:.80} does not depend on images")

    def _find_rank(self, call: Call) -> int:
        """Return the number of axes of a call's first input."""
        return self._ranks.get(call.inputs[0], 4)

    def _translate(self, call: Call) -> Steps:
        """Return what a layer computes."""
        label = call.label
        kind = call.kind
        if kind.startswith("function "):
            kind = _FUNCTIONS.get(kind.removeprefix("function "), "")
        is_plain = len(call.inputs) == len(call.arguments) == 1
        if is_plain and call.name and self._choice.is_ignored(call.name):
            self.parts.append(Part(call.name, "ignored"))
            return []
        is_in_training = IN_TRAINING.fullmatch(kind) is not None
        if call.config.get("training") and (is_in_training or kind in (*_TRANSLATIONS, *MODELS)):
            label += " as in training"
        elif is_plain and is_in_training:
            name = f"{label} {call.name!r}"
            self.parts.append(Part(name, "without effect", "only in training"))
            return []
        elif (is_plain or kind in _OF_MANY) and kind in _TRANSLATIONS and _has_usual_layout(call):
            steps = _TRANSLATIONS[kind](self, call, kind)
            if steps is not None:
                return steps
        self.unknown.append(call.name)
        return [(f"layer {label}", call.inputs, {})]

    def _add(self, value: str, steps: Steps, output: str) -> None:
        """Add operators one after the other, or one that changes nothing."""
        steps = steps or [("Identity", [""], {})]
        for i, (kind, names, attributes) in enumerate(steps, start=1):
            result = output if i == len(steps) else f"{output}/{kind}"
            if result in self._operators:
                raise ValueError(f"it has two layers {result!r:.80}")
            operands = [name or value for name in names]
            self._operators[result] = Operator(kind, operands, [result], attributes)
            value = result

    def _add_zeros(self, outputs: list[str]) -> bool:
        """Add a classifier of zeros to a model that ends before its own, and return whether it
        does."""
        last = self._operators.get(outputs[0])
        while last is not None and last.op_type in ("Identity", "Flatten", "Reshape"):
            last = self._operators.get(last.input[0])
        operators = self._operators.values()
        pools = [node for node in operators if node.op_type in ("ReduceMean", "AveragePool")]
        kernels = [node.input[1] for node in operators if node.op_type == "Conv"]
        is_end = last is not None and (last in pools or (not pools and last.op_type == "Relu"))
        if not is_end or not kernels or len(outputs) > 1:
            return False
        features = len(self._constants[kernels[-1]])
        self._constants["shape"] = np.array([-1, features])
        self._constants["zeros"] = np.zeros((features, 2), np.float32)
        pool: Steps = [] if pools else [("ReduceMean", [""], {"axes": [2, 3]})]
        steps: Steps = [*pool, ("Reshape", ["", "shape"], {}), ("Gemm", ["", "zeros"], {})]
        self._add(outputs[0], steps, "classifier")
        outputs[0] = "classifier"
        return True

    # What layers compute; None: something else than a ResNet

    def _add_numbers(self, call: Call, name: str, numbers: Any, dtype: Any = np.float32) -> str:
        """Add numbers of a layer, and return the name of the constant."""
        constant = f"{call.output}/{name}"
        self._constants[constant] = np.array(numbers, dtype)
        return constant

    def _add_variables(self, call: Call, *names: str) -> list[str]:
        """Add a layer's variables with these names, in this order, and return the names of the
        constants."""
        paths = {}
        for rest, path in call.arrays.items():
            group, _, variable = rest.rpartition("/")
            if group == VARS and variable in map(str, range(len(names))):
                paths[names[int(variable)]] = path
            elif group != VARS:
                paths[rename_variable(call.name, variable.removesuffix(":0"))] = path
        constants = []
        for name in names:
            if name not in paths:
                raise ValueError(f"its layer {call.name!r} has no variable {name}")
            values = self._variables.read(paths[name])
            self.arrays[paths[name]] = values
            if name == "kernel" and values.ndim == 4:
                values = values.transpose(3, 2, 0, 1)
            constant = f"{call.scope}{rename_layer(call.name)}/{name}"
            self._constants[constant] = values
            self.places[constant] = paths[name]
            constants.append(constant)
        self.variables_of[call.output] = [paths[name] for name in names]
        return constants

    def _add_weights(self, call: Call) -> list[str]:
        """Add a kernel, and a bias if there is one."""
        names = ["kernel", "bias"] if call.config.get("use_bias", True) else ["kernel"]
        return self._add_variables(call, *names)

    def _turn_images(self) -> Steps:
        """Return the change of layout before the first window; nothing before others."""
        steps: Steps = [] if self._is_turned else [("Transpose", [""], {"perm": [0, 3, 1, 2]})]
        self._is_turned = True
        return steps

    def _slide(self, call: Call, kind: str) -> Steps | None:
        """Return a convolution or a pool over windows."""
        config = call.config
        settings: dict[str, Any] = {"group": config.get("groups", 1)}
        settings["strides"] = _read_pair(config["strides"] or config["pool_size"])
        settings["dilations"] = _read_pair(config.get("dilation_rate", 1))
        settings["auto_pad"] = b"SAME_UPPER" if config["padding"] == "same" else b"VALID"
        if config["padding"] not in ("valid", "same"):
            return None
        if kind == "conv2d":
            steps: Steps = [("Conv", ["", *self._add_weights(call)], settings)]
            return [*self._turn_images(), *steps, *_activate(config.get("activation"))]
        settings["kernel_shape"] = _read_pair(config["pool_size"])
        if kind == "maxpooling2d":
            return [("MaxPool", [""], settings)]
        whole = [-(-(size or 0) // 32) for size in self._image]
        is_whole = settings["kernel_shape"] == whole and config["padding"] == "valid"
        return [("AveragePool", [""], settings)] if is_whole else None

    def _pad(self, call: Call, kind: str) -> Steps | None:
        (top, bottom), (left, right) = map(_read_pair, _read_pair(call.config["padding"]))
        pads = [0, 0, top, left, 0, 0, bottom, right]
        return [*self._turn_images(), ("Pad", [""], {"pads": pads})]

    def _multiply(self, call: Call, kind: str) -> Steps | None:
        """Return what Dense computes."""
        kernel, *biases = self._add_weights(call)
        steps: Steps = [("Gemm", ["", kernel, *biases], {})]
        if self._find_rank(call) != 2:
            steps = [("MatMul", ["", kernel], {}), *(("Add", ["", bias], {}) for bias in biases)]
        return [*steps, *_activate(call.config.get("activation"))]

    def _activate(self, call: Call, kind: str) -> Steps | None:
        """Return what a layer for an activation computes."""
        limits = ("max_value", "negative_slope", "threshold")
        is_limited = any(call.config.get(name) not in (None, 0) for name in limits)
        if is_limited or not self._is_over_channels(call):
            return None
        return _activate(call.config["activation"] if kind == "activation" else kind)

    def _is_over_channels(self, call: Call) -> bool:
        axes = np.ravel(call.config.get("axis", -1)).tolist()
        return axes in ([-1], [self._find_rank(call) - 1])

    def _normalise_batch(self, call: Call, kind: str) -> Steps | None:
        config = call.config
        if not self._is_over_channels(call) or config.get("renorm"):
            return None
        fields = {"gamma": config.get("scale", True), "beta": config.get("center", True)}
        names = [*filter(fields.get, fields), "moving_mean", "moving_variance"]
        constants = dict(zip(names, self._add_variables(call, *names), strict=True))
        shape = self._constants[constants["moving_mean"]].shape
        for number, name in enumerate(("beta", "gamma")):
            if name not in constants:
                constants[name] = self._add_numbers(call, name, np.full(shape, number))
        inputs = [constants[name] for name in ("gamma", "beta", "moving_mean", "moving_variance")]
        return [("BatchNormalization", ["", *inputs], {"epsilon": config["epsilon"]})]

    def _normalise(self, call: Call, kind: str) -> Steps | None:
        """Return what Normalization computes: (x - mean) / max(sqrt(variance), 1e-7)."""
        config = call.config
        if config.get("axis", -1) not in (None, []) and not self._is_over_channels(call):
            return None
        numbers = [config.get("mean"), config.get("variance")]
        if numbers[0] is None:
            names = self._add_variables(call, "mean", "variance")
            numbers = [self._constants[name] for name in names]
            counters = set(call.arrays.values()) - set(self.places.values())
            self.parts += [Part(path, "without effect", "a counter") for path in counters]
        mean, variance = (np.ravel(_read_numbers(values)) for values in numbers)
        deviation = np.maximum(np.sqrt(variance.astype(np.float32)), np.float32(1e-7))
        factors = self._add_numbers(call, "deviation", deviation)
        terms = self._add_numbers(call, "mean", mean)
        if config.get("invert"):
            return [("Mul", ["", factors], {}), ("Add", ["", terms], {})]
        return [("Sub", ["", terms], {}), ("Div", ["", factors], {})]

    def _rescale(self, call: Call, kind: str) -> Steps | None:
        """Return what Rescaling computes. Its scale is mostly the reciprocal of a rounder
        number."""
        scale = _read_numbers(call.config["scale"])
        if not scale.all():
            return None
        factors = self._add_numbers(call, "scale", 1 / scale)
        terms = self._add_numbers(call, "offset", _read_numbers(call.config["offset"]))
        return [("Div", ["", factors], {}), ("Add", ["", terms], {})]

    def _compute(self, call: Call, kind: str) -> Steps | None:
        """Return arithmetic of two values, or of a value and numbers."""
        items = call.arguments
        if len(items) == 1 and isinstance(items[0], list):
            items = items[0]
        if len(items) != 2 or call.config.get("mode", "sum") != "sum":
            return None
        names: list[str] = []
        for number, item in enumerate(items):
            if not isinstance(item, Value):
                item = self._add_numbers(call, f"number {number}", _read_numbers(item))
            names.append(item)
        return [(_ARITHMETIC[kind], names, {})]

    def _pool(self, call: Call, kind: str) -> Steps | None:
        """Return what GlobalAveragePooling2D computes."""
        keeps = bool(call.config.get("keepdims"))
        self._ranks[call.output] = 4 if keeps else 2
        return [("ReduceMean", [""], {"axes": [2, 3], "keepdims": int(keeps)})]

    def _reshape(self, call: Call, kind: str) -> Steps | None:
        """Return what Flatten and Reshape compute."""
        shape = [-1, *call.config.get("target_shape", [-1])]
        self._ranks[call.output] = len(shape)
        return [("Reshape", ["", self._add_numbers(call, "shape", shape, np.int64)], {})]

    def _keep(self, call: Call, kind: str) -> Steps | None:
        """Return nothing for Identity, and for a cast to floats."""
        return [] if "float" in str(call.config.get("dtype", "float32")) else None

    def _take(self, call: Call, kind: str) -> Steps | None:
        """Return a slice, such as `x[..., ::-1]`."""
        key = call.arguments[1]
        items = list(key) if isinstance(key, list) else [key]
        dots = [i for i, item in enumerate(items) if find_class(item) == "__ellipsis__"]
        begin = dots[0] if dots else len(items)
        settings: dict[str, list[Any]] = {"starts": [], "ends": [], "steps": []}
        settings["axes"] = [*range(begin), *range(begin + 1 - len(items), 0)]
        for item in items[:begin] + items[begin + 1 :]:
            if isinstance(item, int) and len(items) == 2 and begin == 0:
                return [(f"layer {call.label}", [""], {"channel": item})]
            if not isinstance(item, Mapping):
                return None
            limits = item.get("config", item)
            step = limits["step"] or 1
            ends = (0, _LARGE) if step > 0 else (_LARGE, -_LARGE)
            settings["starts"].append(ends[0] if limits["start"] is None else limits["start"])
            settings["ends"].append(ends[1] if limits["stop"] is None else limits["stop"])
            settings["steps"].append(step)
        return [("Slice", [""], settings)]

    def _stack(self, call: Call, kind: str) -> Steps | None:
        """Return the channels `x[..., 2]`, `x[..., 1]` and `x[..., 0]` in one array, as functions
        for preprocessing take them."""
        takes = [self._operators[value] for value in call.inputs]
        channels = [node.attributes.get("channel") for node in takes]
        sources = {node.input[0] for node in takes}
        if call.config.get("axis") != -1 or None in channels or len(sources) != 1:
            return None
        for value in call.inputs:
            self._operators.pop(value, None)
        places = self._add_numbers(call, "channels", channels, np.int64)
        return [("Gather", [sources.pop(), places], {"axis": -1})]


def _has_usual_layout(call: Call) -> bool:
    """Return whether channels come last."""
    return call.config.get("data_format") in (None, "channels_last", "NHWC")


def _activate(value: Any) -> Steps:
    """Return what an activation computes. Anything but a known name is code."""
    if value in (None, "linear"):
        return []
    kind = _ACTIVATIONS.get(value.replace("_", "")) if isinstance(value, str) else None
    return [(kind or f"activation {value!s:.60}", [""], {"axis": -1})]


def _read_numbers(value: Any) -> np.ndarray:
    """Return numbers of a configuration as float64."""
    return np.array(value["config"]["value"] if isinstance(value, Mapping) else value, np.float64)


def _read_pair(value: Any) -> list[Any]:
    """Return two items, for height and width."""
    pair = list(value) if isinstance(value, list) else [value, value]
    if len(pair) != 2:
        raise ValueError(f"a layer has {value!s:.60} where two numbers are expected")
    return pair


_TRANSLATIONS: dict[str, Callable[[Translation, Call, str], Steps | None]] = {
    **dict.fromkeys(_ARITHMETIC, Translation._compute),
    **dict.fromkeys((*_ACTIVATIONS, "activation"), Translation._activate),
    **dict.fromkeys(("conv2d", "maxpooling2d", "averagepooling2d"), Translation._slide),
    **dict.fromkeys(
        ("batchnormalization", "batchnormalizationv1", "batchnormalizationv2"),
        Translation._normalise_batch,
    ),
    **dict.fromkeys(("flatten", "reshape"), Translation._reshape),
    **dict.fromkeys(("identity", "cast"), Translation._keep),
    "dense": Translation._multiply,
    "getitem": Translation._take,
    "globalaveragepooling2d": Translation._pool,
    "normalization": Translation._normalise,
    "rescaling": Translation._rescale,
    "stack": Translation._stack,
    "zeropadding2d": Translation._pad,
}


# The model as Keras computes it, for `lockstep.backends.tensorflow.certificate`: only plain
# settings are kept, since Keras imports the modules that others name


def write_original(model: Translation, output: str, folder: Path) -> None:
    """Write the layers of a model, and their variables by path. Raises `ValueError` if a layer has
    a setting that is not plain."""
    arrays = model.arrays
    rows: list[dict[str, Any]] = [{"class_name": "InputLayer", "name": model.graph.inputs[0]}]
    sources = {call.output: call.inputs[0] for call in model.calls if _is_same(call)}
    for call in model.calls:
        if call.output in sources:
            continue
        paths = model.variables_of.get(call.output, [])
        config = _keep_settings(call)
        if call.kind == "normalization" and paths:
            config |= {"mean": arrays[paths[0]].tolist(), "variance": arrays[paths[1]].tolist()}
            paths = []
        rows.append(
            {
                "class_name": call.label,
                "name": call.output,
                "config": config,
                "inputs": [_find_source(sources, name) for name in call.inputs],
                "variables": paths,
            }
        )
    rows.append({"class_name": "Output", "name": _find_source(sources, output)})
    write_json(folder / "layers.json", rows)
    np.savez(folder / "layers.npz", **arrays)  # type: ignore[arg-type]


def _is_same(call: Call) -> bool:
    """Return whether a layer returns its input in inference."""
    return call.kind in _IDENTITIES or IN_TRAINING.fullmatch(call.kind) is not None


def _find_source(sources: Mapping[str, str], value: str) -> str:
    """Return the value that a value is."""
    while value in sources:
        value = sources[value]
    return value


def write_application(about: dict[str, Any], arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Write the arrays of a model of `keras.applications` by layer and variable; `about` has its
    "model" and its number of "classes"."""
    write_json(folder / "application.json", about)
    np.savez(folder / "layers.npz", **arrays)  # type: ignore[arg-type]


def _keep_settings(call: Call) -> dict[str, Any]:
    """Return the settings of a layer that say what it computes."""
    settings = {name: call.config[name] for name in _SETTINGS & call.config.keys()}
    for name, value in settings.items():
        if not isinstance(value, bool | int | float | str | list | None):
            raise ValueError(f"{name} of {call.label} {call.name!r} is not supported")
    return settings
