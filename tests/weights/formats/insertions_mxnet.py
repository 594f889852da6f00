"""Operators to insert into a symbol of MXNet at the places of `tests.edges`.

MXNet's own Python imports this module, too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.edges import PLACES, Place, sample

Arrays = dict[str, np.ndarray]
Make = Callable[[Any, Any], Any]
"""Makes a symbol of `mxnet` and a symbol. Variables that it adds are filled by MXNet's rules, or
those of `list_constants`."""
PREFIX = "inserted_"
"""What the names of inserted nodes begin with."""
CHANNELS: dict[Place, int] = {
    "before the stem": 3,
    "between blocks": 64,
    "before the classifier": 256,
    "after it": 10,
}
"""The channels at each place of the small network of `peers/with_mxnet.py`."""
_UNARY = (
    *("relu", "sigmoid", "tanh", "softsign", "hard_sigmoid", "exp", "abs", "negative", "square"),
    *("sign", "floor", "round", "reciprocal", "identity", "BlockGrad", "Dropout"),
    *("softmax", "log_softmax", "L2Normalization", "make_loss", "zeros_like"),
)


def list_constants(place: Place, channels: int) -> Arrays:
    """Return the values of variables that an operator may use."""
    shape = (1, channels, 1, 1) if place in ("before the stem", "between blocks") else (1, channels)
    order = np.roll(np.arange(channels), 1)
    return {
        "c_line": np.linspace(0.5, 1.5, channels).reshape(shape),
        "c_shift": np.linspace(-3, 3, channels).reshape(shape),
        "c_flat": np.linspace(-3, 3, channels),
        "c_row": np.linspace(-3, 3, channels).reshape(1, 1, 1, -1),
        "c_order": order,
        "c_some": order[: max(channels // 2, 1)],
        "c_negative": order - channels,
    }


def _variable(mx: Any, name: str, place: Place, channels: int) -> Any:
    return mx.sym.Variable(name, shape=list_constants(place, channels)[name].shape)


def build(place: Place, channels: int) -> dict[str, Make]:
    """Return what can be inserted at a place, by name."""

    def constant(mx: Any, name: str) -> Any:
        return _variable(mx, name, place, channels)

    makers: dict[str, Make] = {
        kind: lambda mx, x, kind=kind: getattr(mx.sym, kind)(x) for kind in _UNARY
    }
    for kind in ("relu", "sigmoid", "tanh", "softrelu"):
        makers[f"Activation {kind}"] = lambda mx, x, kind=kind: mx.sym.Activation(x, act_type=kind)
    for kind in ("leaky", "elu", "selu", "gelu"):
        makers[f"LeakyReLU {kind}"] = lambda mx, x, kind=kind: mx.sym.LeakyReLU(x, act_type=kind)
    for kind, name in (
        ("add", "c_shift"),
        ("sub", "c_shift"),
        ("mul", "c_line"),
        ("div", "c_line"),
    ):
        makers |= {
            f"broadcast_{kind}": lambda mx, x, kind=kind, name=name: getattr(
                mx.sym, f"broadcast_{kind}"
            )(x, constant(mx, name)),
            f"broadcast_{kind}, constant first": lambda mx, x, kind=kind: getattr(
                mx.sym, f"broadcast_{kind}"
            )(constant(mx, "c_shift"), x),
        }
    makers |= {
        "x + number": lambda mx, x: x + 1.75,
        "x - number": lambda mx, x: x - 1.75,
        "number - x": lambda mx, x: 1.75 - x,
        "x * number": lambda mx, x: x * -1.75,
        "x / number": lambda mx, x: x / 1.75,
        "number / x": lambda mx, x: 1.75 / x,
        "x ** number": lambda mx, x: x**2,
        "x % number": lambda mx, x: x % 2,
        "x + x": lambda mx, x: x + x,
        "x * x": lambda mx, x: x * x,
        "x * sigmoid": lambda mx, x: x * mx.sym.sigmoid(x),
        "add_n": lambda mx, x: mx.sym.add_n(x, x, x),
        "broadcast_maximum": lambda mx, x: mx.sym.broadcast_maximum(x, constant(mx, "c_shift")),
        "clip": lambda mx, x: mx.sym.clip(x, -0.1, 0.1),
        "where": lambda mx, x: mx.sym.where(x > 0.25, x, x * 2),
        "Dropout always": lambda mx, x: mx.sym.Dropout(x, mode="always"),
        "Cast to halves": lambda mx, x: mx.sym.Cast(mx.sym.Cast(x, "float64"), "float32"),
        "Cast to integers": lambda mx, x: mx.sym.Cast(mx.sym.Cast(x, "int32"), "float32"),
        "amp_multicast": lambda mx, x: mx.sym.amp_multicast(x, x, num_outputs=2)[1],
        "BatchNorm": lambda mx, x: mx.sym.BatchNorm(x, fix_gamma=False),
        "BatchNorm of fixed scale": lambda mx, x: mx.sym.BatchNorm(x, eps=2e-5),
        "BatchNorm of the last axis": lambda mx, x: mx.sym.BatchNorm(x, axis=-1, fix_gamma=False),
        "LayerNorm": lambda mx, x: mx.sym.LayerNorm(x, axis=1),
        "take": lambda mx, x: mx.sym.take(x, constant(mx, "c_order"), axis=1),
        "take some": lambda mx, x: mx.sym.take(x, constant(mx, "c_some"), axis=1),
        "take of negative numbers": lambda mx, x: mx.sym.take(
            x, constant(mx, "c_negative"), axis=1, mode="wrap"
        ),
        "take of images": lambda mx, x: mx.sym.take(x, constant(mx, "c_order"), axis=0),
        "slice_axis": lambda mx, x: mx.sym.slice_axis(x, axis=1, begin=1, end=None),
        "slice_axis from the end": lambda mx, x: mx.sym.slice_axis(x, axis=-1, begin=-2, end=None),
        "slice": lambda mx, x: mx.sym.slice(x, begin=(None, 1), end=(None, None)),
        "reverse": lambda mx, x: mx.sym.reverse(x, axis=1),
        "reverse of images": lambda mx, x: mx.sym.reverse(x, axis=0),
        "concat": lambda mx, x: mx.sym.concat(x, x, dim=1),
        "split": lambda mx, x: mx.sym.split(x, num_outputs=channels, axis=1)[1],
        "softmax of images": lambda mx, x: mx.sym.softmax(x, axis=0),
        "softmax with a temperature": lambda mx, x: mx.sym.softmax(x, axis=1, temperature=2.5),
        "SoftmaxActivation": lambda mx, x: mx.sym.SoftmaxActivation(x),
        "LinearRegressionOutput": lambda mx, x: mx.sym.LinearRegressionOutput(x),
        "LogisticRegressionOutput": lambda mx, x: mx.sym.LogisticRegressionOutput(x),
        "a layer twice": lambda mx, x: mx.sym.negative(
            mx.sym.negative(x, name="same"), name="same"
        ),
    }
    if place in ("before the stem", "between blocks"):
        return makers | {
            "Convolution": lambda mx, x: mx.sym.Convolution(x, num_filter=channels, kernel=(1, 1)),
            "Convolution of channels": lambda mx, x: mx.sym.Convolution(
                x, num_filter=channels, num_group=channels, kernel=(3, 3), pad=(1, 1), no_bias=True
            ),
            "Deconvolution": lambda mx, x: mx.sym.Deconvolution(
                x, num_filter=channels, kernel=(1, 1)
            ),
            "Pooling avg": lambda mx, x: mx.sym.Pooling(
                x, kernel=(3, 3), pad=(1, 1), pool_type="avg"
            ),
            "Pooling max": lambda mx, x: mx.sym.Pooling(x, kernel=(3, 3), pad=(1, 1)),
            "UpSampling": lambda mx, x: mx.sym.UpSampling(x, scale=2, sample_type="nearest"),
            "Pad": lambda mx, x: mx.sym.Pad(x, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1)),
            "transpose": lambda mx, x: mx.sym.transpose(x, axes=(0, 1, 3, 2)),
            "transpose there and back": lambda mx, x: mx.sym.transpose(
                mx.sym.transpose(x, axes=(0, 2, 3, 1)) * 2, axes=(0, 3, 1, 2)
            ),
            "reverse of columns": lambda mx, x: mx.sym.reverse(x, axis=3),
            "broadcast_add of a column": lambda mx, x: mx.sym.broadcast_add(
                mx.sym.transpose(x, axes=(0, 2, 3, 1)),
                mx.sym.reshape(constant(mx, "c_flat"), shape=(1, 1, 1, channels)),
            ).transpose(axes=(0, 3, 1, 2)),
            "LRN": lambda mx, x: mx.sym.LRN(x, nsize=3),
            "InstanceNorm": lambda mx, x: mx.sym.InstanceNorm(x),
            "reshape": lambda mx, x: mx.sym.reshape(x, shape=(0, 0, 0, 0)),
        }
    return makers | {
        "FullyConnected": lambda mx, x: mx.sym.FullyConnected(x, num_hidden=channels),
        "FullyConnected without bias": lambda mx, x: mx.sym.FullyConnected(
            x, num_hidden=channels, no_bias=True
        ),
        "FullyConnected of the last axis": lambda mx, x: mx.sym.FullyConnected(
            x, num_hidden=channels, flatten=False
        ),
        "FullyConnected and relu": lambda mx, x: mx.sym.relu(
            mx.sym.FullyConnected(x, num_hidden=channels)
        ),
        "Convolution": lambda mx, x: mx.sym.Flatten(
            mx.sym.Convolution(
                mx.sym.reshape(x, shape=(0, -1, 1, 1)), num_filter=channels, kernel=(1, 1)
            )
        ),
        "broadcast_add of one axis": lambda mx, x: mx.sym.broadcast_add(
            x, mx.sym.reshape(constant(mx, "c_flat"), shape=(1, -1))
        ),
        "SoftmaxOutput": lambda mx, x: mx.sym.SoftmaxOutput(x),
        "reshape": lambda mx, x: mx.sym.reshape(x, shape=(-1, channels)),
        "reshape of images": lambda mx, x: mx.sym.reshape(x, shape=(-1, 2 * channels)),
        "expand_dims and squeeze": lambda mx, x: mx.sym.squeeze(
            mx.sym.expand_dims(x, axis=2), axis=2
        ),
        "transpose": lambda mx, x: mx.sym.transpose(x),
        "Flatten": lambda mx, x: mx.sym.Flatten(x),
        "argmax_channel": lambda mx, x: mx.sym.argmax_channel(x).reshape(shape=(-1, 1)),
        "topk": lambda mx, x: mx.sym.topk(x, k=2),
        "argmax": lambda mx, x: mx.sym.argmax(x, axis=1, keepdims=True),
        "softmax twice": lambda mx, x: mx.sym.softmax(mx.sym.softmax(x)),
        "softmax and take": lambda mx, x: mx.sym.take(
            mx.sym.softmax(x), constant(mx, "c_order"), axis=1
        ),
        "softmax and some": lambda mx, x: mx.sym.take(
            mx.sym.softmax(x), constant(mx, "c_some"), axis=1
        ),
        "softmax and log": lambda mx, x: mx.sym.log(mx.sym.softmax(x)),
        "log_softmax and exp": lambda mx, x: mx.sym.exp(mx.sym.log_softmax(x)),
        "one sigmoid": lambda mx, x: mx.sym.sigmoid(mx.sym.slice_axis(x, axis=1, begin=3, end=4)),
        "one sigmoid, reshaped": lambda mx, x: mx.sym.sigmoid(
            mx.sym.reshape(mx.sym.slice_axis(x, axis=1, begin=3, end=4), shape=(-1,))
        ),
        "one number": lambda mx, x: mx.sym.slice_axis(x, axis=1, begin=3, end=4),
        "two outputs": lambda mx, x: mx.sym.Group([x, mx.sym.softmax(x)]),
        "two results": lambda mx, x: mx.sym.Group([x, x * 2]),
    }


def turn_images(name: str, images: np.ndarray) -> np.ndarray:
    """Return images [N, 3, H, W] as a network with an insertion takes them."""
    return images.transpose(0, 2, 3, 1) if name.startswith("NHWC") else images


def list_insertions() -> Iterator[tuple[Place, str, Make]]:
    """Yield a place, the name of what is inserted there, and what makes it."""
    for place in PLACES:
        for name, make in build(place, CHANNELS[place]).items():
            if place == "after it" or not name.startswith("two "):
                yield place, name, make
    first = PLACES[0]
    yield first, "NHWC", lambda mx, x: mx.sym.transpose(x, axes=(0, 3, 1, 2))
    yield (
        first,
        "NHWC with a mean",
        lambda mx, x: mx.sym.transpose(
            mx.sym.broadcast_sub(x, _variable(mx, "c_row", first, 3)), axes=(0, 3, 1, 2)
        ),
    )


CASES = sample(list(list_insertions()), 17)
HEADS: dict[str, Callable[[Any], list[Any]]] = {
    "Dense": lambda nn: [nn.Dense(10)],
    "Dropout, Dense": lambda nn: [nn.Dropout(0.5), nn.Dense(10)],
    "BatchNorm, Dense": lambda nn: [nn.BatchNorm(), nn.Dense(10)],
    "Flatten, Dense": lambda nn: [nn.Flatten(), nn.Dense(10)],
    "Dense, BatchNorm": lambda nn: [nn.Dense(10), nn.BatchNorm(scale=False)],
    "Dense, Dense": lambda nn: [nn.Dense(256), nn.Dense(10)],
    "Dense with relu, Dense": lambda nn: [nn.Dense(256, activation="relu"), nn.Dense(10)],
    "Dense, tanh": lambda nn: [nn.Dense(10, activation="tanh")],
    "Dense, softmax": lambda nn: [nn.Dense(10), nn.HybridLambda("softmax")],
    "Dense, sigmoid": lambda nn: [nn.Dense(10, activation="sigmoid")],
    "Dense of one, sigmoid": lambda nn: [nn.Dense(1, activation="sigmoid")],
    "Dense of one": lambda nn: [nn.Dense(1)],
    "Conv2D": lambda nn: [nn.Conv2D(10, 1), nn.Flatten()],
}
"""Layers of Gluon after the pool."""
HEAD = "head_"
"""What the names of these layers have."""
