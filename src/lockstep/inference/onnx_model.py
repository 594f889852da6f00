"""Export to ONNX: preprocessing, model and softmax as one graph. No training framework is needed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.models.architectures import Block, Conv, blocks, model_spec, stem
from lockstep.models.architectures import tensors as tensors_of
from lockstep.models.quantisation import weight_scales
from lockstep.models.state import check_fit
from lockstep.recipes import Recipe
from lockstep.system.errors import BackendError, CheckpointError
from lockstep.weights.formats import onnx_metadata

if TYPE_CHECKING:
    import onnx

OPSET, IR = 17, 8
"""The graph's operator set and its file format version. ONNX Runtime 1.12 and later read them."""


def export(
    recipe: Recipe,
    tensors: dict[str, np.ndarray],
    classes: tuple[str, ...],
    folder: Path,
    scales: Mapping[str, float] | None = None,
) -> None:
    """Write `model.onnx` with the weights inside.

    The model takes `images`, uint8 RGB [N, H, W, 3], and returns `classes`, int64 [N], and `probabilities`, float32
    [N, logits]. The class names are in its metadata, as a JSON list, and in `classes.txt`, one per line. The metadata also
    has the preprocessing of an evaluation (`lockstep.weights.formats.onnx_metadata`).

    With `scales` of the inputs of all layers (`lockstep.models.quantisation`), input and weights of every convolution and of
    the classifier pass through QuantizeLinear and DequantizeLinear. Weights have a scale for each output channel.

    Raises `CheckpointError` if the recipe's precision is not fp32 or the tensors do not fit, `BackendError` if the package
    onnx is missing.
    """
    if recipe.precision != "fp32":
        raise CheckpointError(
            f"an ONNX model is in fp32, not in {recipe.precision}; leave out precision: the program that runs the model can "
            "choose its own"
        )
    check_fit({each.name: each.shape for each in tensors_of(model_spec(recipe.model), recipe.logits)}, tensors, "weights")
    onnx = _onnx()
    model = _Graph(onnx, recipe, tensors, scales or {}).model(classes)
    onnx.checker.check_model(model)
    folder.mkdir()
    onnx.save(model, str(folder / "model.onnx"))
    if classes:
        (folder / "classes.txt").write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")


def logits_model(recipe: Recipe, tensors: Mapping[str, np.ndarray], scales: Mapping[str, float] | None = None) -> bytes:
    """Return a model from `images`, uint8 RGB [N, S, S, 3], to `logits`, float32 [N, logits]; S is the `eval_crop`.

    It is the model of `export` without softmax and metadata. In fp16, convolutions, batch norms and the classifier compute
    in float16, unless they are quantised; other precisions are for the program that runs the model to choose. Raises
    `CheckpointError` if the tensors do not fit, `BackendError` if the package onnx is missing.
    """
    check_fit({each.name: each.shape for each in tensors_of(model_spec(recipe.model), recipe.logits)}, tensors, "weights")
    graph = _Graph(_onnx(), recipe, tensors, scales or {}, in_half=recipe.precision == "fp16" and not scales)
    found: bytes = graph.logits_model().SerializeToString()
    return found


def _onnx() -> Any:
    try:
        import onnx
    except ImportError:
        raise BackendError("exporting to ONNX needs the package onnx: pip install onnx==1.23.2") from None
    return onnx


class _Graph:
    """Nodes in the order of computation. Values are named after the canonical tensors and convolutions they come from."""

    def __init__(
        self,
        onnx: Any,
        recipe: Recipe,
        tensors: Mapping[str, np.ndarray],
        scales: Mapping[str, float],
        *,
        in_half: bool = False,
    ) -> None:
        self._onnx, self._recipe, self._spec, self._scales = onnx, recipe, model_spec(recipe.model), scales
        self._in_half = in_half
        self._nodes: list[onnx.NodeProto] = []
        self._values = {
            "mean": np.array(recipe.mean, np.float32),
            "std": np.array(recipe.std, np.float32),
        } | {name: np.ascontiguousarray(value, np.float16 if in_half else np.float32) for name, value in tensors.items()}

    def logits_model(self) -> "onnx.ModelProto":
        """Return the model whose only output is `logits`, for images of the evaluation's size."""
        floats, side = self._onnx.TensorProto.FLOAT, self._recipe.eval_crop
        x = self._normalised("images")
        if self._in_half:
            x = self._add("Cast", [x], "NCHW in half", to=self._onnx.TensorProto.FLOAT16)
            self._add("Cast", [self._logits(x, "logits in half")], "logits", to=floats)
        else:
            self._logits(x)
        described = self._onnx.helper.make_tensor_value_info
        return self._made(["N", side, side, 3], [described("logits", floats, ["N", self._recipe.logits])])

    def model(self, classes: tuple[str, ...]) -> "onnx.ModelProto":
        """Return the model."""
        helper, kinds = self._onnx.helper, self._onnx.TensorProto
        logits = self._logits(self._normalised("images"))
        self._add("Softmax", [logits], "probabilities", axis=1)
        self._add("ArgMax", [logits], "classes", axis=1, keepdims=0)
        model = self._made(
            ["N", "H", "W", 3],
            [
                helper.make_tensor_value_info("classes", kinds.INT64, ["N"]),
                helper.make_tensor_value_info("probabilities", kinds.FLOAT, ["N", self._recipe.logits]),
            ],
        )
        helper.set_model_props(
            model,
            {
                "classes": json.dumps(list(classes), allow_nan=False),
                onnx_metadata.KEY: onnx_metadata.preprocessing_of(self._recipe),
            },
        )
        return model

    def _made(self, images: list[int | str], outputs: list[Any]) -> "onnx.ModelProto":
        """Return a model of the nodes, with an input of this shape and these outputs."""
        helper = self._onnx.helper
        graph = helper.make_graph(
            self._nodes,
            self._recipe.model if isinstance(self._recipe.model, str) else "model",
            [helper.make_tensor_value_info("images", self._onnx.TensorProto.UINT8, images)],
            outputs,
            [self._onnx.numpy_helper.from_array(value, name) for name, value in self._values.items()],
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR, producer_name="lockstep"
        )

    def _add(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(self._onnx.helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def _normalised(self, images: str) -> str:
        x = self._add("Cast", [images], "float images", to=self._onnx.TensorProto.FLOAT)
        x = self._add("Div", [self._add("Sub", [x, "mean"], "centred"), "std"], "normalised")
        return self._add("Transpose", [x], "NCHW", perm=[0, 3, 1, 2])

    def _logits(self, x: str, output: str = "logits") -> str:
        x = self._convolution(x, stem(self._spec), relu=True)
        x = self._add("MaxPool", [x], "pooled", kernel_shape=[3, 3], strides=[2, 2], **self._padding(3, 2))
        for block in blocks(self._spec):
            x = self._block(x, block)
        x = self._add("Flatten", [self._add("GlobalAveragePool", [x], "average")], "features")
        return self._add("Gemm", [*self._factors(x, "fc"), "fc.bias"], output, transB=1)

    def _block(self, x: str, block: Block) -> str:
        shortcut = x if block.shortcut is None else self._convolution(x, block.shortcut, relu=False)
        for conv in block.convs[:-1]:
            x = self._convolution(x, conv, relu=True)
        x = self._convolution(x, block.convs[-1], relu=False)
        return self._add("Relu", [self._add("Add", [x, shortcut], f"{block.name}.sum")], block.name)

    def _convolution(self, x: str, conv: Conv, *, relu: bool) -> str:
        x = self._add(
            "Conv",
            self._factors(x, conv.name),
            conv.name,
            kernel_shape=[conv.kernel, conv.kernel],
            strides=[conv.stride, conv.stride],
            group=conv.groups,
            **self._padding(conv.kernel, conv.stride),
        )
        of_batch_norm = [f"{conv.bn_name}.{suffix}" for suffix in ("weight", "bias", "running_mean", "running_var")]
        x = self._add("BatchNormalization", [x, *of_batch_norm], conv.bn_name, epsilon=self._recipe.bn_epsilon)
        return self._add("Relu", [x], f"{conv.bn_name}.relu") if relu else x

    def _factors(self, x: str, layer: str) -> list[str]:
        """Return the input and the weight of a layer, quantised and dequantised if there are scales."""
        weight = f"{layer}.weight"
        if not self._scales:
            return [x, weight]
        of_input, of_weight = np.array(self._scales[layer], np.float32), weight_scales(self._values[weight])
        return [self._rounded(x, f"{layer}.input", of_input), self._rounded(weight, weight, of_weight, axis=0)]

    def _rounded(self, x: str, name: str, scale: np.ndarray, **axis: int) -> str:
        """Return x rounded to int8 multiples of a scale, float32 [] or [channels]. The zero point is 0: int8."""
        self._values |= {f"{name}.scale": scale, f"{name}.zero": np.zeros(scale.shape, np.int8)}
        steps = [f"{name}.scale", f"{name}.zero"]
        integers = self._add("QuantizeLinear", [x, *steps], f"{name}.int8", **axis)
        return self._add("DequantizeLinear", [integers, *steps], f"{name}.rounded", **axis)

    def _padding(self, kernel: int, stride: int) -> dict[str, Any]:
        """Return a window's attributes for the recipe's padding; at stride 1 both kinds of padding are the same."""
        if self._recipe.padding == "symmetric" or stride == 1:
            return {"pads": [kernel // 2] * 4}
        return {"auto_pad": "SAME_UPPER"}
