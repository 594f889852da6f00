"""Export to ONNX: preprocessing, model and softmax as one graph, without a training framework."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.models.architectures import Block, Conv, Squeeze
from lockstep.models.quantisation import LARGEST, LOWEST, weight_scales
from lockstep.models.state import check_fit
from lockstep.recipes import Recipe
from lockstep.system.errors import BackendError, CheckpointError
from lockstep.system.strict_json import to_json
from lockstep.weights.formats import onnx_metadata

if TYPE_CHECKING:
    import onnx

_LARGE_BYTES = 1024
"""Arrays from this size on may be apart from a model."""
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var")
OPSET = 17
IR = 8
"""The graph's operator set and its file format version. ONNX Runtime 1.12 and later read them."""


@dataclass(frozen=True)
class Form:
    """What an ONNX model takes and returns, and how it is written."""

    batch: int | None = None
    """The number of images of every batch; None: any."""
    bare: bool = False
    """Whether the model takes `input`, normalised float32 [N, 3, S, S], and returns `logits`,
    float32 [N, logits]."""
    folded: bool = False
    """Whether batch norms are folded into convolutions. They always are in fp16, and never with
    scales: ONNX Runtime rounds the biases of folded ones to int32, which changes what training
    fitted."""


def build_model(
    recipe: Recipe,
    tensors: Mapping[str, np.ndarray],
    classes: tuple[str, ...],
    scales: Mapping[str, float] | None = None,
    form: Form | None = None,
) -> "onnx.ModelProto":
    """Return a model with the weights inside.

    The model takes `images`, squares after resize and crop: uint8 RGB [N, S, S, 3], where S is the
    recipe's `eval_crop` (`lockstep.weights.formats.onnx_photos` makes it take photos). It returns
    `classes`, int64 [N], and `probabilities`, float32 [N, logits]. The class names are in its
    metadata, as a JSON list. The metadata also has the preprocessing of an evaluation
    (`lockstep.weights.formats.onnx_metadata`).

    In fp16, weights are float16, and everything between the normalised images and the logits is
    computed in it.

    With `scales` of the inputs of all layers (`lockstep.models.quantisation`), the input of every
    convolution and of the classifier passes through QuantizeLinear and DequantizeLinear. Weights
    are int8 and pass through DequantizeLinear, with a scale for each output channel. Batch norms
    are not folded.

    Raises `CheckpointError` if the recipe's precision is neither fp32 nor fp16 or the tensors do
    not fit, `BackendError` if the package onnx is missing.
    """
    if recipe.precision not in ("fp32", "fp16") or (scales and recipe.precision != "fp32"):
        raise CheckpointError(
            f"an ONNX model is in fp32, fp16 or int8, not in {recipe.precision}; leave out"
            " precision: the program that runs the model can choose its own"
        )
    form = form or Form()
    model = _start_graph(recipe, tensors, scales, folded=form.folded).model(classes, form)
    _import_onnx().checker.check_model(model)
    return model


def logits_model(
    recipe: Recipe,
    tensors: Mapping[str, np.ndarray],
    scales: Mapping[str, float] | None = None,
    *,
    folded: bool = False,
) -> bytes:
    """Return a model from `images`, uint8 RGB [N, S, S, 3], to `logits`, float32 [N, logits]; S is
    the `eval_crop`.

    It is the model of `export` without softmax and metadata. `folded` is that of `Form`. In fp16,
    convolutions, batch norms and the classifier compute in float16, unless they are quantised;
    other precisions are for the program that runs the model to choose. Raises `CheckpointError` if
    the tensors do not fit, `BackendError` if the package onnx is missing.
    """
    graph = _start_graph(recipe, tensors, scales, folded=folded)
    data: bytes = graph.logits_model().SerializeToString()
    return data


def logits_model_apart(
    recipe: Recipe,
    tensors: Mapping[str, np.ndarray],
    scales: Mapping[str, float] | None = None,
    *,
    as_inputs: bool,
) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return the model of `logits_model` without its weights, and these by name, so that nobody
    copies or parses them.

    In the model they are inputs after `images`, with `as_inputs`; otherwise initializers whose data
    are elsewhere. The program that runs the model must put them there. Small arrays are in the
    model.
    """
    graph = _start_graph(recipe, tensors, scales)
    return graph.logits_model_apart(as_inputs=as_inputs)


def accept_squares(model: Any, recipe: Recipe) -> None:
    """Make a model of squares, or a bare one, take any number of `images`, uint8 [N, S, S, 3]."""
    _Graph(_import_onnx(), recipe, {}, {}).accept_squares(model.graph)


def place_elsewhere(model: Any, names: Collection[str]) -> None:
    """Say in a model that the data of these initializers are elsewhere."""
    for tensor in model.graph.initializer:
        if tensor.name in names:
            tensor.CopyFrom(_describe_elsewhere(tensor.name, tensor.data_type, tensor.dims))


def _describe_elsewhere(name: str, kind: int, shape: Sequence[int]) -> Any:
    """Return an initializer whose data are not in the model."""
    onnx = _import_onnx()
    place = onnx.StringStringEntryProto(key="location", value="memory")
    location = onnx.TensorProto.EXTERNAL
    return onnx.TensorProto(
        name=name, data_type=kind, dims=shape, data_location=location, external_data=[place]
    )


def _start_graph(
    recipe: Recipe,
    tensors: Mapping[str, np.ndarray],
    scales: Mapping[str, float] | None,
    *,
    folded: bool = False,
) -> "_Graph":
    """Return a graph without nodes. Raises `CheckpointError` if tensors are not those of the
    recipe's model."""
    expected = recipe.list_tensors()
    check_fit({tensor.name: tensor.shape for tensor in expected}, tensors, "weights")
    in_half = recipe.precision == "fp16" and not scales
    onnx = _import_onnx()
    return _Graph(onnx, recipe, tensors, scales or {}, in_half=in_half, folded=folded)


def _import_onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise BackendError(
            "exporting to ONNX needs the package onnx: pip install onnx==1.23.2"
        ) from None
    return onnx


class _Graph:
    """Nodes in the order of computation. Values are named after the canonical tensors and
    convolutions they come from."""

    def __init__(
        self,
        onnx: Any,
        recipe: Recipe,
        tensors: Mapping[str, np.ndarray],
        scales: Mapping[str, float],
        *,
        in_half: bool = False,
        folded: bool = False,
    ) -> None:
        self._onnx = onnx
        self._recipe = recipe
        self._spec = recipe.spec
        self._scales = scales
        self._in_half = in_half
        self._folded = folded or in_half
        self._nodes: list[onnx.NodeProto] = []
        values = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
        if self._folded:
            self._fold(values)
        for layer in scales:
            self._quantise(values, f"{layer}.weight")
        if in_half:
            values = {name: value.astype(np.float16) for name, value in values.items()}
        self._values = values

    def _fold(self, values: dict[str, np.ndarray]) -> None:
        """Fold batch norms into the kernels and new biases."""
        for conv in self._spec.list_convolutions():
            scale, shift, mean, variance = (
                values.pop(f"{conv.bn_name}.{suffix}").astype(np.float64) for suffix in _BATCH_NORM
            )
            factor = scale / np.sqrt(variance + self._recipe.bn_epsilon)
            kernel = f"{conv.name}.weight"
            values[kernel] = (values[kernel] * factor[:, None, None, None]).astype(np.float32)
            values[f"{conv.name}.bias"] = (shift - mean * factor).astype(np.float32)

    def _quantise(self, values: dict[str, np.ndarray], name: str) -> None:
        """Replace weights by integers, and add the scale of every output channel."""
        weight = values[name]
        scale = weight_scales(weight)
        per_channel = scale.reshape(-1, *(1,) * (weight.ndim - 1))
        # The scale of a channel with NaN or infinity is that too.
        with np.errstate(invalid="ignore"):
            integers = np.clip(np.rint(weight / per_channel), LOWEST, LARGEST)
            values[name] = integers.astype(np.int8)
        values[f"{name}.scale"] = scale
        values[f"{name}.zero"] = np.zeros(scale.shape, np.int8)

    def logits_model(self) -> "onnx.ModelProto":
        """Return the model whose only output is `logits`, for images of the evaluation's size."""
        self._add_model(self._normalise("images"))
        side = self._recipe.eval_crop
        return self._finish(
            self._describe_images("N", side, side), [self._describe_logits("logits", "N")]
        )

    def logits_model_apart(self, *, as_inputs: bool) -> tuple[bytes, dict[str, np.ndarray]]:
        """Return the same model without large arrays, and these: as inputs, or as initializers with
        data elsewhere."""
        onnx = self._onnx
        values = self._values
        apart = {name: value for name, value in values.items() if value.nbytes >= _LARGE_BYTES}
        self._values = {name: value for name, value in values.items() if name not in apart}
        model = self.logits_model()
        graph = model.graph
        for name, value in apart.items():
            kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            if as_inputs:
                graph.input.append(onnx.helper.make_tensor_value_info(name, kind, value.shape))
            else:
                graph.initializer.append(_describe_elsewhere(name, kind, value.shape))
        data: bytes = model.SerializeToString()
        return data, apart

    def accept_squares(self, graph: Any) -> None:
        """Change a graph as the function of this name does."""
        if graph.input[0].name == "input":
            self._normalise("images")
            self._nodes[-1].output[0] = "input"
            self._nodes.extend(graph.node)
            del graph.node[:]
            graph.node.extend(self._nodes)
            graph.initializer.extend(self._list_constants())
        side = self._recipe.eval_crop
        graph.input[0].CopyFrom(self._describe_images("N", side, side))

    def model(self, classes: tuple[str, ...], form: Form) -> "onnx.ModelProto":
        """Return the model."""
        helper = self._onnx.helper
        kinds = self._onnx.TensorProto
        count = form.batch or "N"
        side = self._recipe.eval_crop
        if form.bare:
            self._add_model("input")
            images = helper.make_tensor_value_info("input", kinds.FLOAT, [count, 3, side, side])
            outputs = [self._describe_logits("logits", count)]
        else:
            logits = self._add_model(self._normalise("images"))
            self._add("Softmax", [logits], "probabilities", axis=1)
            self._add("ArgMax", [logits], "classes", axis=1, keepdims=0)
            images = self._describe_images(count, side, side)
            outputs = [
                helper.make_tensor_value_info("classes", kinds.INT64, [count]),
                self._describe_logits("probabilities", count),
            ]
        model = self._finish(images, outputs)
        helper.set_model_props(
            model,
            {
                "classes": json.dumps(list(classes), allow_nan=False),
                onnx_metadata.KEY: to_json(self._recipe.preprocessing()),
            },
        )
        return model

    def _describe_images(self, count: int | str, height: int | str, width: int | str) -> Any:
        kind = self._onnx.TensorProto.UINT8
        return self._onnx.helper.make_tensor_value_info("images", kind, [count, height, width, 3])

    def _describe_logits(self, name: str, count: int | str) -> Any:
        kind = self._onnx.TensorProto.FLOAT
        return self._onnx.helper.make_tensor_value_info(name, kind, [count, self._recipe.logits])

    def _add_model(self, x: str) -> str:
        """Return the logits, float32, of normalised images, float32."""
        if not self._in_half:
            return self._add_layers(x)
        kinds = self._onnx.TensorProto
        x = self._add("Cast", [x], "NCHW in half", to=kinds.FLOAT16)
        x = self._add_layers(x, "logits in half")
        return self._add("Cast", [x], "logits", to=kinds.FLOAT)

    def _finish(self, images: Any, outputs: list[Any]) -> "onnx.ModelProto":
        """Return a model of the nodes, with this input and these outputs."""
        helper = self._onnx.helper
        model = self._recipe.model if isinstance(self._recipe.model, str) else "model"
        constants = self._list_constants()
        graph = helper.make_graph(self._nodes, model, [images], outputs, constants)
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR,
            producer_name="lockstep",
        )

    def _list_constants(self) -> list["onnx.TensorProto"]:
        to_tensor = self._onnx.numpy_helper.from_array
        return [to_tensor(value, name) for name, value in self._values.items()]

    def _add(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(
            self._onnx.helper.make_node(operator, inputs, [output], output, **attributes)
        )
        return output

    def _add_window(
        self, operator: str, inputs: list[str], output: str, side: int, stride: int, **others: Any
    ) -> str:
        """Add an operator with a square window."""
        window = {"kernel_shape": [side, side], "strides": [stride, stride]}
        return self._add(operator, inputs, output, **window, **others)

    def _normalise(self, images: str) -> str:
        self._values["mean"] = np.array(self._recipe.mean, np.float32)
        self._values["std"] = np.array(self._recipe.std, np.float32)
        x = self._add("Cast", [images], "float images", to=self._onnx.TensorProto.FLOAT)
        x = self._add("Div", [self._add("Sub", [x, "mean"], "centred"), "std"], "normalised")
        return self._add("Transpose", [x], "NCHW", perm=[0, 3, 1, 2])

    def _add_layers(self, x: str, output: str = "logits") -> str:
        for conv in self._spec.list_stem():
            x = self._add_convolution(x, conv, relu=True)
        stride = 1 if self._spec.pool_blurs else 2
        padding = self._describe_padding(3, stride)
        x = self._add_window("MaxPool", [x], "pooled", 3, stride, **padding)
        if self._spec.pool_blurs:
            x = self._add_blur(x, self._spec.stem_width, 2, "pooled.blur")
        for block in self._spec.list_blocks():
            x = self._add_block(x, block)
        x = self._add("Flatten", [self._add("GlobalAveragePool", [x], "average")], "features")
        return self._add("Gemm", [*self._add_factors(x, "fc"), "fc.bias"], output, transB=1)

    def _add_block(self, x: str, block: Block) -> str:
        shortcut = (
            x if block.shortcut is None else self._add_convolution(x, block.shortcut, relu=False)
        )
        for conv in block.convs[:-1]:
            x = self._add_convolution(x, conv, relu=True)
            if conv.blurs_after:
                x = self._add_blur(x, conv.outputs, 2, f"{conv.bn_name}.blur")
        x = self._add_convolution(x, block.convs[-1], relu=False)
        if block.squeeze is not None:
            x = self._add_squeeze(x, block.squeeze)
        return self._add("Relu", [self._add("Add", [x, shortcut], f"{block.name}.sum")], block.name)

    def _add_squeeze(self, x: str, squeeze: Squeeze) -> str:
        """Return x with every channel times its factor."""
        y = self._add("GlobalAveragePool", [x], f"{squeeze.first}.average")
        for layer, function in ((squeeze.first, "Relu"), (squeeze.second, "Sigmoid")):
            inputs = [y, f"{layer}.weight", f"{layer}.bias"]
            y = self._add("Conv", inputs, layer, kernel_shape=[1, 1])
            y = self._add(function, [y], f"{layer}.{function.lower()}")
        return self._add("Mul", [x, y], f"{squeeze.second}.product")

    def _add_blur(self, x: str, channels: int, stride: int, output: str) -> str:
        """Return x blurred: with stride 2 padded with mirrored pixels, with stride 1 with zeros."""
        kernel = f"blur.{channels}"
        line = np.array([0.25, 0.5, 0.25])
        values = np.tile(line[:, None] * line, (channels, 1, 1, 1))
        self._values[kernel] = values.astype(np.float16 if self._in_half else np.float32)
        pads = [1, 1, 1, 1]
        if stride == 2:
            self._values["blur.pads"] = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
            x = self._add("Pad", [x, "blur.pads"], f"{output}.padded", mode="reflect")
            pads = [0, 0, 0, 0]
        return self._add_window("Conv", [x, kernel], output, 3, stride, pads=pads, group=channels)

    def _prepare(self, x: str, conv: Conv) -> str:
        """Return the input of a convolution."""
        if conv.before == "blur":
            return self._add_blur(x, conv.inputs, 1, f"{conv.name}.blur")
        if conv.before == "average":
            edges = {"ceil_mode": 1, "count_include_pad": 0}
            return self._add_window("AveragePool", [x], f"{conv.name}.average", 2, 2, **edges)
        return x

    def _add_convolution(self, x: str, conv: Conv, *, relu: bool) -> str:
        inputs = self._add_factors(self._prepare(x, conv), conv.name)
        if self._folded:
            inputs.append(f"{conv.name}.bias")
        window = (conv.kernel, conv.stride)
        padding = self._describe_padding(*window)
        x = self._add_window("Conv", inputs, conv.name, *window, group=conv.groups, **padding)
        if not self._folded:
            name = conv.bn_name
            inputs = [x, *(f"{name}.{suffix}" for suffix in _BATCH_NORM)]
            x = self._add("BatchNormalization", inputs, name, epsilon=self._recipe.bn_epsilon)
        return self._add("Relu", [x], f"{conv.bn_name}.relu") if relu else x

    def _add_factors(self, x: str, layer: str) -> list[str]:
        """Return the input and the weight of a layer, the input rounded to int8 if there are
        scales."""
        weight = f"{layer}.weight"
        if not self._scales:
            return [x, weight]
        scale = f"{layer}.input.scale"
        zero = "zero"
        self._values[scale] = np.array(self._scales[layer], np.float32)
        self._values[zero] = np.zeros((), np.int8)
        integers = self._add("QuantizeLinear", [x, scale, zero], f"{layer}.input.int8")
        x = self._add("DequantizeLinear", [integers, scale, zero], f"{layer}.input.rounded")
        inputs = [weight, f"{weight}.scale", f"{weight}.zero"]
        return [x, self._add("DequantizeLinear", inputs, f"{weight}.rounded", axis=0)]

    def _describe_padding(self, kernel: int, stride: int) -> dict[str, Any]:
        """Return a window's attributes for the recipe's padding; at stride 1 both kinds of padding
        are the same."""
        if stride == 1 or self._recipe.choose_padding(kernel) == "symmetric":
            return {"pads": [kernel // 2] * 4}
        return {"auto_pad": "SAME_UPPER"}
