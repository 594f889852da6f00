"""A small ResNet of Keras, and layers to insert into it at the places of `tests.edges`."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from lockstep import backends
from lockstep.models.architectures import ModelSpec
from lockstep.weights import Weights
from tests.edges import PLACES, Place

SIZE = 64
CLASSES = 5
WIDTHS = (4, 4, 6, 8)
CHANNELS: dict[Place, int] = {
    "before the stem": 3,
    "between blocks": 4 * WIDTHS[1],
    "before the classifier": 4 * WIDTHS[-1],
    "after it": CLASSES,
}
SPEC = ModelSpec(
    block="bottleneck", layers=(1, 1, 1, 1), stem_width=8, widths=WIDTHS, stride_in="1x1"
)
_OWN = re.compile(r"conv\d_|pool1_|avg_pool|predictions|input")
_CORNERS = np.random.default_rng(1).integers(0, 256, (4, 8, 8, 3))
IMAGES = np.kron(_CORNERS, np.ones((1, SIZE // 8, SIZE // 8, 1))).astype(np.float32)
"""RGB from 0 to 255, [N, H, W, 3]."""
Layers = Callable[[Any], Any]


def resnet(
    insertions: dict[Place, Layers] | None = None,
    *,
    image: Any = None,
    names: str = "",
    epsilon: float = 1.001e-5,
    has_top: bool = True,
) -> Any:
    """Return a ResNet as `keras.applications` makes it, but narrow and shallow, with layers
    inserted at places. The names of its own layers begin with `names`."""
    inserted = dict.fromkeys(PLACES, lambda x: x) | (insertions or {})

    def unit(x: Any, name: str, outputs: int, size: int = 1, stride: int = 1) -> Any:
        padding = "same" if size == 3 else "valid"
        x = layers.Conv2D(outputs, size, stride, padding, name=f"{names}{name}_conv")(x)
        return layers.BatchNormalization(epsilon=epsilon, name=f"{names}{name}_bn")(x)

    def rectify(x: Any, name: str) -> Any:
        return layers.Activation("relu", name=f"{names}{name}")(x)

    image = keras.Input((SIZE, SIZE, 3)) if image is None else image
    x = inserted["before the stem"](image)
    x = layers.ZeroPadding2D(3, name=f"{names}conv1_pad")(x)
    x = rectify(unit(x, "conv1", 8, 7, 2), "conv1_relu")
    x = layers.ZeroPadding2D(1, name=f"{names}pool1_pad")(x)
    x = layers.MaxPooling2D(3, 2, name=f"{names}pool1_pool")(x)
    for stage, width in enumerate(WIDTHS, start=2):
        name, stride = f"conv{stage}_block1", 1 if stage == 2 else 2
        shortcut = unit(x, f"{name}_0", 4 * width, 1, stride)
        x = rectify(unit(x, f"{name}_1", width, 1, stride), f"{name}_1_relu")
        x = rectify(unit(x, f"{name}_2", width, 3), f"{name}_2_relu")
        x = layers.Add(name=f"{names}{name}_add")([shortcut, unit(x, f"{name}_3", 4 * width)])
        x = rectify(x, f"{name}_out")
        if stage == 3:
            x = inserted["between blocks"](x)
    if has_top:
        x = layers.GlobalAveragePooling2D(name=f"{names}avg_pool")(x)
        x = inserted["before the classifier"](x)
        x = layers.Dense(CLASSES, name=f"{names}predictions")(x)
        x = inserted["after it"](x)
    return draw_weights(keras.Model(image, x))


def draw_weights(model: Any) -> Any:
    """Return a model with random weights, of which every one matters: batch norms have the
    statistics of `IMAGES`."""
    random = np.random.default_rng(5)
    for weight in model.weights:
        kind = weight.path.rpartition("/")[2]
        if kind in ("kernel", "bias", "beta", "mean"):
            ends = np.prod(weight.shape[:-1]) if kind == "kernel" else 1
            weight.assign(random.uniform(-1, 1, weight.shape) * 2 * ends**-0.5)
        elif kind in ("gamma", "variance"):
            weight.assign(random.uniform(0.5, 1.5, weight.shape))
    for layer in model._flatten_layers():
        if isinstance(layer, layers.Normalization) and layer.input_mean is None:
            layer.finalize_state()
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = 0.0
    model(keras.applications.resnet.preprocess_input(IMAGES.copy()), training=True)
    return model


def list_inserted(model: Any) -> set[str]:
    """Return the names of a model's layers that `resnet` does not have by itself, also of those in
    models in it."""
    names = set()
    for layer in getattr(model, "operations", model.layers):
        inner = list_inserted(layer) if isinstance(layer, keras.Model) else set()
        names |= inner if _OWN.match(layer.name) else {layer.name, *inner}
    return names


def compute(model: Any, images: np.ndarray) -> np.ndarray:
    """Return what Keras computes in inference, in one row an image."""
    outputs = model(images, training=False)
    return np.asarray(outputs).reshape(len(images), -1)


def prepare(weights: Weights) -> np.ndarray:
    """Return images as the reader says that the file takes them."""
    if any("images from 0 to 1" in remark for remark in weights.remarks):
        return IMAGES / np.float32(255)
    if "mean" in weights.stated:
        return IMAGES
    if not weights.assumed_as:
        return np.asarray(keras.applications.resnet.preprocess_input(IMAGES.copy()))
    return np.asarray((IMAGES - weights.recipe.mean) / weights.recipe.std, np.float32)


def compute_as_read(weights: Weights) -> np.ndarray:
    """Return the logits of what was read."""
    module = backends.load("reference").load_module(weights.recipe, weights.state.tensors)
    images = (IMAGES - weights.recipe.mean) / weights.recipe.std
    return np.asarray(module(images.transpose(0, 3, 1, 2).astype(np.float64)))


def _line(channels: int, low: float = 0.5, high: float = 1.5) -> list[float]:
    return np.linspace(low, high, channels).tolist()


def _list_layers(place: Place) -> dict[str, Layers]:
    """Return layers for a place by name."""
    channels = CHANNELS[place]
    line, shift = _line(channels), _line(channels, -3, 3)
    simple = (
        *(layers.ReLU, layers.LeakyReLU, layers.ELU, layers.PReLU, layers.Identity),
        *(layers.BatchNormalization, layers.LayerNormalization, layers.UnitNormalization),
        *(layers.Softmax, layers.ActivityRegularization, layers.Normalization),
    )
    named: dict[str, Layers] = {kind.__name__: (lambda x, kind=kind: kind()(x)) for kind in simple}
    for name in ("relu", "relu6", "linear", "sigmoid", "tanh", "gelu", "softmax", "log_softmax"):
        named[f"Activation {name}"] = lambda x, name=name: layers.Activation(name)(x)
    for kind in (layers.Dropout, layers.AlphaDropout, layers.GaussianDropout, layers.GaussianNoise):
        named[kind.__name__] = lambda x, kind=kind: kind(0.5)(x)
    named |= {
        "Dropout as in training": lambda x: layers.Dropout(0.5)(x, training=True),
        "Dropout with a seed": lambda x: layers.Dropout(0.5, seed=3)(x),
        "ReLU of at most 6": lambda x: layers.ReLU(max_value=6.0)(x),
        "ReLU with a threshold": lambda x: layers.ReLU(threshold=0.5)(x),
        "BatchNormalization of its own epsilon": lambda x: layers.BatchNormalization(epsilon=0.1)(
            x
        ),
        "BatchNormalization without scale": lambda x: layers.BatchNormalization(scale=False)(x),
        "BatchNormalization without center": lambda x: layers.BatchNormalization(center=False)(x),
        "BatchNormalization of the first axis": lambda x: layers.BatchNormalization(axis=1)(x),
        "Rescaling": lambda x: layers.Rescaling(1 / 127.5, offset=-1)(x),
        "Rescaling to 1": lambda x: layers.Rescaling(1 / 255)(x),
        "Rescaling of channels": lambda x: layers.Rescaling(line, offset=shift)(x),
        "Rescaling by 0": lambda x: layers.Rescaling(0.0)(x),
        "Normalization of numbers": lambda x: layers.Normalization(mean=shift, variance=line)(x),
        "Normalization of one number": lambda x: layers.Normalization(
            axis=None, mean=117.0, variance=3000.0
        )(x),
        "Normalization inverted": lambda x: layers.Normalization(
            mean=shift, variance=line, invert=True
        )(x),
        "Lambda": lambda x: layers.Lambda(keras.activations.tanh)(x),
        "sum with itself": lambda x: layers.Add()([x, x]),
        "product with itself": lambda x: layers.Multiply()([x, x]),
        "Concatenate": lambda x: layers.Concatenate()([x, x]),
        "operator +": lambda x: x + np.array(shift, np.float32),
        "operator + of a number": lambda x: x + 1.5,
        "operator -": lambda x: x - 1.5,
        "operator -, number first": lambda x: 1.5 - x,
        "operator *": lambda x: x * np.array(line, np.float32),
        "operator /": lambda x: x / 1.5,
        "operator /, number first": lambda x: 1.5 / x,
        "operator **": lambda x: x**2,
        "operator abs": abs,
        "operator -x": lambda x: -x,
        "several operators": lambda x: ops.multiply(ops.add(x, 1.0), 0.5) - 0.25,
        "ops.relu": ops.relu,
        "ops.sigmoid": ops.sigmoid,
        "ops.softmax": lambda x: ops.softmax(x, axis=-1),
        "ops.softmax of the first axis": lambda x: ops.softmax(x, axis=1),
        "ops.clip": lambda x: ops.clip(x, 0.0, 1.0),
        "ops.maximum": lambda x: ops.maximum(x, 0.25),
        "ops.cast": lambda x: ops.cast(x, "float32"),
        "ops.cast to integers": lambda x: ops.cast(ops.cast(x, "int32"), "float32"),
        "ops.flip": lambda x: ops.flip(x, axis=-1),
        "ops.flip of images": lambda x: ops.flip(x, axis=0),
        "ops.take": lambda x: ops.take(x, list(range(channels - 1, -1, -1)), axis=-1),
        "channels backwards": lambda x: x[..., ::-1],
        "the second axis backwards": lambda x: x[:, ::-1],
        "two models": lambda x: keras.Sequential(
            [layers.Dropout(0.3), layers.Rescaling(1.5, offset=0.5)]
        )(x),
        "a model in a model": lambda x: keras.Sequential(
            [layers.Dropout(0.3), keras.Sequential([layers.BatchNormalization()])]
        )(x),
    }
    return named | (_list_for_images(place) if place in PLACES[:2] else _list_for_columns(place))


def _list_for_images(place: Place) -> dict[str, Layers]:
    channels = CHANNELS[place]
    return {
        "SpatialDropout2D": lambda x: layers.SpatialDropout2D(0.5)(x),
        "RandomFlip": lambda x: layers.RandomFlip()(x),
        "RandomRotation": lambda x: layers.RandomRotation(0.2)(x),
        "RandomZoom": lambda x: layers.RandomZoom(0.2)(x),
        "RandomContrast": lambda x: layers.RandomContrast(0.2, value_range=(0, 255))(x),
        "Resizing": lambda x: layers.Resizing(96, 96)(x),
        "CenterCrop": lambda x: layers.CenterCrop(48, 48)(x),
        "Cropping2D": lambda x: layers.Cropping2D(4)(x),
        "ZeroPadding2D": lambda x: layers.ZeroPadding2D(2)(x),
        "AveragePooling2D": lambda x: layers.AveragePooling2D(2)(x),
        "MaxPooling2D": lambda x: layers.MaxPooling2D(2)(x),
        "UpSampling2D": lambda x: layers.UpSampling2D(2)(x),
        "Conv2D": lambda x: layers.Conv2D(channels, 1)(x),
        "Conv2D of 3": lambda x: layers.Conv2D(channels, 3, padding="same", activation="relu")(x),
        "DepthwiseConv2D": lambda x: layers.DepthwiseConv2D(3, padding="same")(x),
        "SeparableConv2D": lambda x: layers.SeparableConv2D(channels, 3, padding="same")(x),
        "Permute": lambda x: layers.Permute((2, 1, 3))(x),
        "GroupNormalization": lambda x: layers.GroupNormalization(1)(x),
        "Dense": lambda x: layers.Dense(channels)(x),
        "Reshape": lambda x: layers.Reshape(x.shape[1:])(x),
        "squeeze and excitation": lambda x: layers.Multiply()(
            [x, layers.GlobalAveragePooling2D(keepdims=True)(x)]
        ),
        "preprocess_input": keras.applications.resnet.preprocess_input,
        "preprocess_input of others": keras.applications.resnet_v2.preprocess_input,
    }


def _list_for_columns(place: Place) -> dict[str, Layers]:
    channels = CHANNELS[place]
    return {
        "Dense": lambda x: layers.Dense(channels)(x),
        "Dense without a bias": lambda x: layers.Dense(channels, use_bias=False)(x),
        "Dense and ReLU": lambda x: layers.Dense(channels, activation="relu")(x),
        "Dense of 1": lambda x: layers.Dense(1)(x),
        "Dense of 1 and sigmoid": lambda x: layers.Dense(1, activation="sigmoid")(x),
        "Dense and sigmoid": lambda x: layers.Dense(channels, activation="sigmoid")(x),
        "Dense and softmax": lambda x: layers.Dense(channels, activation="softmax")(x),
        "Dense and its own function": lambda x: layers.Dense(channels, activation=ops.square)(x),
        "Flatten": lambda x: layers.Flatten()(x),
        "Reshape": lambda x: layers.Reshape((channels,))(x),
        "Reshape to images and back": lambda x: layers.Flatten()(
            layers.Conv2D(channels, 1)(layers.Reshape((1, 1, channels))(x))
        ),
        "Reshape to images of another shape": lambda x: layers.Flatten()(
            layers.Conv2D(channels, 1)(layers.Reshape((channels, 1, 1))(x))
        ),
        "without the first": lambda x: x[:, 1:],
        "every second": lambda x: x[:, ::2],
        "the first": lambda x: x[:, 0],
        "ops.argmax": lambda x: ops.argmax(x, axis=-1),
        "Softmax twice": lambda x: layers.Softmax()(layers.Softmax()(x)),
        "Softmax and channels backwards": lambda x: layers.Softmax()(x)[..., ::-1],
        "Softmax and Rescaling": lambda x: layers.Rescaling(2.0)(layers.Softmax()(x)),
        "temperature and Softmax": lambda x: layers.Softmax()(x / 1.7),
        "adjustment and Softmax": lambda x: layers.Softmax()(
            x - np.linspace(-1, 1, channels, dtype=np.float32)
        ),
        "UnitNormalization": lambda x: layers.UnitNormalization()(x),
        "skip of features": lambda x: layers.Add()([x, layers.Dense(channels)(x)]),
    }


def list_insertions() -> Iterator[tuple[Place, str, Layers]]:
    """Yield a place, the name of what is inserted there, and the function that inserts it."""
    for place in PLACES:
        for name, insert in _list_layers(place).items():
            yield place, name, insert
