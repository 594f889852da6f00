"""A frozen graph of TensorFlow, and nodes to insert into it at the places of `tests.edges`."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep import backends
from lockstep.weights import Weights
from tests.edges import PLACES, Place

SIZE = 64
MEAN = (120.0, 115.0, 105.0)
STD = (60.0, 55.0, 58.0)
_CORNERS = np.random.default_rng(3).integers(0, 256, (4, 8, 8, 3))
IMAGES = np.kron(_CORNERS, np.ones((1, SIZE // 8, SIZE // 8, 1))).astype(np.float32)
"""RGB from 0 to 255, [N, H, W, 3]."""
SCOPE = "inserted"
"""The names of inserted nodes begin with it."""
_VALUES: dict[Place, tuple[str, int]] = {
    "before the stem": ("images", 3),
    "between blocks": ("block1", 16),
    "before the classifier": ("features", 64),
    "after it": ("logits", 10),
}
"""The node behind which nodes are inserted, and the number of its channels."""

Insertion = tuple[Place, str]
Nodes = Callable[[Any], Any]


def freeze(function: Nodes, kind: Any = tf.float32) -> Any:
    """Return the GraphDef of a function of `images`, whose nodes are the outputs."""
    with tf.Graph().as_default() as graph:
        function(tf.compat.v1.placeholder(kind, [None, SIZE, SIZE, 3], "images"))
    return graph.as_graph_def()


def run(graph: Any, output: str, images: np.ndarray = IMAGES) -> np.ndarray:
    """Return what TensorFlow computes."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph, name="")
        return np.asarray(session.run(f"{output}:0", {"images:0": images}))


def compute_as_read(weights: Weights) -> np.ndarray:
    """Return the reference's logits of what was read."""
    recipe = weights.recipe
    images = (IMAGES - np.array(recipe.mean)) / np.array(recipe.std)
    module = backends.load("reference").load_module(recipe, weights.tensors)
    return module(images.transpose(0, 3, 1, 2))


class Basic:
    """A small ResNet of basic blocks, whose logits are of the size 1."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(7)

    def _draw(self, *shape: int, low: float = -1, scale: float = 2) -> Any:
        values = self._random.uniform(low, 1, shape) * np.prod(shape[:-1]) ** -0.5
        return tf.constant(values * scale, tf.float32)

    def _unit(self, x: Any, outputs: int, size: int, stride: int) -> Any:
        kernel = self._draw(size, size, x.shape[-1], outputs)
        edge = [[0, 0], [size // 2] * 2, [size // 2] * 2, [0, 0]]
        y = tf.nn.conv2d(x, kernel, stride, edge)
        scale, variance = (self._draw(outputs, low=0.5) for _ in range(2))
        shift, mean = (self._draw(outputs, scale=0.2) for _ in range(2))
        norm = tf.compat.v1.nn.fused_batch_norm
        return norm(y, scale, shift, mean, variance, epsilon=2e-5, is_training=False)[0]

    def __call__(self, x: Any) -> Any:
        x = tf.nn.relu(self._unit(x, 8, 7, 2))
        x = tf.nn.max_pool2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2, "VALID")
        for stage, width in enumerate((8, 16, 32, 64)):
            stride = 2 if stage else 1
            shortcut = self._unit(x, width, 1, stride) if stage else x
            y = self._unit(tf.nn.relu(self._unit(x, width, 3, stride)), width, 3, 1)
            x = tf.nn.relu(y + shortcut, name=f"block{stage}")
        x = tf.reduce_mean(x, [1, 2], name="features")
        return tf.add(tf.matmul(x, self._draw(64, 10)), self._draw(10), name="logits")


def normalise(x: Any) -> Any:
    return (x - tf.constant(MEAN)) / tf.constant(STD)


@cache
def whole_graph() -> Any:
    """Return the graph without more nodes."""
    return freeze(lambda x: Basic()(normalise(x)))


def _list_simple() -> dict[str, Nodes]:
    """Return nodes for values of any shape, by name. The last axis has the channels."""
    unary = (
        *(tf.nn.relu, tf.sigmoid, tf.tanh, tf.negative, tf.abs, tf.exp, tf.math.log, tf.sqrt),
        *(tf.nn.softplus, tf.identity, tf.stop_gradient, tf.nn.relu6, tf.nn.leaky_relu, tf.nn.elu),
        *(tf.nn.selu, tf.nn.gelu, tf.nn.silu, tf.nn.softmax, tf.nn.log_softmax, tf.floor),
        *(tf.round, tf.math.erf, tf.nn.softsign, tf.sign, tf.square, tf.math.reciprocal),
        *(tf.math.log_sigmoid, tf.math.rsqrt, tf.zeros_like),
    )
    nodes: dict[str, Nodes] = {f.__name__: f for f in unary}

    def line(x: Any, low: float = 0.5, high: float = 1.5) -> Any:
        return tf.constant(np.linspace(low, high, x.shape[-1]), tf.float32)

    def order(x: Any) -> Any:
        return tf.constant(np.roll(np.arange(x.shape[-1]), 1), tf.int32)

    binary = {
        "add": lambda x, c: x + c,
        "subtract": lambda x, c: x - c,
        "multiply": lambda x, c: x * c,
        "divide": lambda x, c: x / c,
        "maximum": tf.maximum,
        "minimum": tf.minimum,
        "power": tf.pow,
        "floor_divide": lambda x, c: x // c,
        "remainder": lambda x, c: x % c,
        "squared_difference": tf.math.squared_difference,
    }
    for name, f in binary.items():
        nodes[f"{name} of channels"] = lambda x, f=f: f(x, line(x))
        nodes[f"{name} of a number"] = lambda x, f=f: f(x, tf.constant(1.75))
        nodes[f"{name} of itself"] = lambda x, f=f: f(x, x)
        nodes[f"{name}, constant first"] = lambda x, f=f: f(line(x), x)
        nodes[f"{name} of computed constants"] = lambda x, f=f: f(
            x, tf.sqrt(line(x)) * 0.5 + tf.math.log(line(x, 2, 3))
        )
        nodes[f"{name} of chance"] = lambda x, f=f: f(x, tf.random.uniform([], 0.5, 1))
        nodes[f"{name} of its mean"] = lambda x, f=f: f(x, tf.reduce_mean(x) + 2)
        nodes[f"{name} of its size"] = lambda x, f=f: f(x, tf.cast(tf.size(x), tf.float32))
    return nodes | {
        "bias_add": lambda x: tf.nn.bias_add(x, line(x, -1)),
        "add_n": lambda x: tf.add_n([x, line(x) + tf.zeros_like(x)]),
        "add_n of three": lambda x: tf.add_n([x, x, x]),
        "add twice": lambda x: x + line(x) + line(x, -3, 2),
        "add of integers": lambda x: x + tf.cast(order(x), tf.float32),
        "gather": lambda x: tf.gather(x, order(x), axis=-1),
        "gather of the last axis": lambda x: tf.gather(x, order(x), axis=len(x.shape) - 1),
        "gather of some": lambda x: tf.gather(x, order(x)[: x.shape[-1] // 2], axis=-1),
        "gather of images": lambda x: tf.gather(x, [1, 0, 2, 3]),
        "gather of each image": lambda x: tf.gather(
            x, tf.zeros([4, 1], tf.int32), axis=1, batch_dims=1
        ),
        "reverse": lambda x: tf.reverse(x, [-1]),
        "reverse of images": lambda x: tf.reverse(x, [0]),
        "backwards": lambda x: x[..., ::-1],
        "images backwards": lambda x: x[::-1],
        "without the first": lambda x: x[..., 1:],
        "without the last": lambda x: x[..., :-1],
        "every second": lambda x: x[..., ::2],
        "the first": lambda x: x[..., 0],
        "one new axis": lambda x: x[..., tf.newaxis],
        "slice": lambda x: tf.slice(x, [0] * (len(x.shape) - 1) + [1], [-1] * len(x.shape)),
        "slice of all": lambda x: tf.slice(x, [0] * len(x.shape), [-1] * len(x.shape)),
        "slice of images": lambda x: tf.slice(
            x, [1] + [0] * (len(x.shape) - 1), [-1] * len(x.shape)
        ),
        "roll": lambda x: tf.roll(x, 1, -1),
        "concat of halves": lambda x: tf.concat([x[..., 1:], x[..., :1]], -1),
        "concat of parts": lambda x: tf.concat(tf.split(x, x.shape[-1], -1)[::-1], -1),
        "concat of itself": lambda x: tf.concat([x, x], -1),
        "stack of channels": lambda x: tf.stack([x[..., i] for i in range(x.shape[-1])][::-1], -1),
        "stack of the first": lambda x: tf.stack([x[..., 0]] * x.shape[-1], -1),
        "stack of parts": lambda x: tf.stack(tf.unstack(x, axis=-1)[::-1], -1),
        "one class more": lambda x: tf.pad(x, [[0, 0]] * (len(x.shape) - 1) + [[1, 0]]),
        "concat of a class": lambda x: tf.concat([tf.zeros_like(x[..., :1]), x], -1),
        "batch norm in parts": lambda x: tf.nn.batch_normalization(
            x, line(x, -1), line(x, 1, 2), line(x, -0.5), line(x), 1e-3
        ),
        "batch norm without scale": lambda x: tf.nn.batch_normalization(
            x, line(x, -1), line(x, 1, 2), line(x, -0.5), None, 1e-3
        ),
        "batch norm of the batch": lambda x: tf.nn.batch_normalization(
            x, *tf.nn.moments(x, [0]), line(x, -0.5), line(x), 1e-3
        ),
        "batch norm, another factor": lambda x: (
            x * (tf.math.rsqrt(line(x, 1, 2) + 1e-3) * line(x))
            + (line(x, -0.5) - line(x) * (tf.math.rsqrt(line(x, 1, 2) + 2e-3) * line(x)))
        ),
        "keras normalisation": lambda x: (
            (x - line(x, -1)) / tf.maximum(tf.sqrt(line(x, 1, 2)), 1e-7)
        ),
        "l2_normalize": lambda x: tf.nn.l2_normalize(x, -1),
        "clip": lambda x: tf.clip_by_value(x, -0.1, 0.1),
        "cast to integers": lambda x: tf.cast(tf.cast(x, tf.int32), tf.float32),
        "cast to truth": lambda x: tf.cast(tf.cast(x, tf.bool), tf.float32),
        "cast to bytes": lambda x: tf.cast(tf.cast(x * 3, tf.uint8), tf.float32),
        "cast to double": lambda x: tf.cast(tf.cast(x, tf.float64), tf.float32),
        "dropout": lambda x: tf.nn.dropout(x, 0.5),
        "where": lambda x: tf.where(x > 0.25, x, 0.25 * tf.ones_like(x)),
        "identity_n": lambda x: tf.identity_n([x, x + 1])[0],
        "the second of identity_n": lambda x: tf.identity_n([x + 1, x])[1],
        "check_numerics": lambda x: tf.debugging.check_numerics(x, "it is not finite"),
        "ensure_shape": lambda x: tf.ensure_shape(x, x.shape),
        "fake_quant": lambda x: tf.quantization.fake_quant_with_min_max_args(x, -1, 1, 3),
        "cumsum": lambda x: tf.cumsum(x, -1),
        "sort": lambda x: tf.sort(x, -1),
        "half of a branch": lambda x: x + 0.5 * tf.nn.relu(x),
        "its own scale": lambda x: x * tf.sigmoid(x),
    }


def _list_of_images() -> dict[str, Nodes]:
    """Return nodes for values of four axes."""

    def kernel(x: Any, size: int) -> Any:
        channels = x.shape[-1]
        values = np.linspace(-1, 1, size * size * channels**2) + 0.5
        return tf.constant(values.reshape(size, size, channels, channels), tf.float32)

    return {
        "conv2d": lambda x: tf.nn.conv2d(x, kernel(x, 1), 1, "VALID"),
        "conv2d of 3": lambda x: tf.nn.conv2d(x, kernel(x, 3), 1, "SAME"),
        "conv2d of its own": lambda x: tf.nn.conv2d(x, tf.nn.relu(kernel(x, 1)), 1, "VALID"),
        "depthwise_conv2d": lambda x: tf.nn.depthwise_conv2d(
            x, kernel(x, 3)[..., :1], [1] * 4, "SAME"
        ),
        "fused_batch_norm": lambda x: tf.compat.v1.nn.fused_batch_norm(
            x, *[tf.linspace(0.5 + i, 1.5 + i, x.shape[-1]) for i in range(4)], is_training=False
        )[0],
        "fused batch norm of constants": lambda x: tf.compat.v1.nn.fused_batch_norm(
            x,
            *(
                tf.constant(np.linspace(0.5 + i, 1.5 + i, x.shape[-1]), tf.float32)
                for i in range(4)
            ),
            is_training=False,
        )[0],
        "avg_pool2d": lambda x: tf.nn.avg_pool2d(x, 3, 1, "SAME"),
        "max_pool2d": lambda x: tf.nn.max_pool2d(x, 3, 1, "SAME"),
        "max_pool2d of stride 2": lambda x: tf.nn.max_pool2d(x, 3, 2, "SAME"),
        "pad": lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]),
        "pad with ones": lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], constant_values=1),
        "mirror_pad": lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT"),
        "resize": lambda x: tf.image.resize(x, [48, 48]),
        "crop": lambda x: tf.image.central_crop(x, 0.875),
        "crop of a box": lambda x: tf.image.crop_to_bounding_box(x, 1, 1, 6, 6),
        "flip": tf.image.flip_left_right,
        "reverse of rows": lambda x: tf.reverse(x, [1]),
        "columns backwards": lambda x: x[:, :, ::-1],
        "every second row": lambda x: x[:, ::2],
        "transpose": lambda x: tf.transpose(x, [0, 2, 1, 3]),
        "transpose twice": lambda x: tf.transpose(tf.transpose(x, [0, 3, 1, 2]), [0, 2, 3, 1]),
        "standardisation": lambda x: tf.map_fn(tf.image.per_image_standardization, x),
        "standardisation by hand": lambda x: x - tf.reduce_mean(x, [1, 2, 3], keepdims=True),
        "scale of channels": lambda x: x * tf.sigmoid(tf.reduce_mean(x, [1, 2], keepdims=True)),
        "space_to_depth": lambda x: tf.nn.space_to_depth(x, 2)[..., : x.shape[-1]],
        "local_response_normalization": tf.nn.local_response_normalization,
        "add of rows": lambda x: x + tf.constant(np.ones((x.shape[1], 1, 1)), tf.float32),
        "multiply of rows": lambda x: (
            x * tf.constant(np.linspace(1, 2, x.shape[1]).reshape(-1, 1, 1), tf.float32)
        ),
    }


def _list_of_vectors() -> dict[str, Nodes]:
    """Return nodes for values of two axes."""

    def square(x: Any) -> Any:
        size = x.shape[-1]
        return tf.constant(
            np.eye(size) + np.linspace(-1, 1, size**2).reshape(size, size), tf.float32
        )

    softmax = tf.nn.softmax
    return {
        "matmul": lambda x: x @ square(x),
        "matmul, turned": lambda x: tf.matmul(x, square(x), transpose_b=True),
        "matmul of itself": lambda x: x @ tf.matmul(x, x, transpose_a=True),
        "matmul, then relu": lambda x: tf.nn.relu(x @ square(x)),
        "einsum": lambda x: tf.einsum("ni,ij->nj", x, square(x)),
        "reshape": lambda x: tf.reshape(x, [-1, x.shape[-1]]),
        "reshape of images": lambda x: tf.reshape(x, [-1, 2 * x.shape[-1]]),
        "reshape of the batch": lambda x: tf.reshape(x, [tf.shape(x)[0], -1]),
        "reshape of half the batch": lambda x: tf.reshape(x, [tf.shape(x)[0] // 2, -1]),
        "reshape to its shape": lambda x: tf.reshape(x, tf.shape(x)),
        "reshape of parts": lambda x: tf.reshape(x, [-1, 2, x.shape[-1] // 2]),
        "expand and squeeze": lambda x: tf.squeeze(x[:, tf.newaxis, tf.newaxis], [1, 2]),
        "transpose": tf.transpose,
        "mean of classes": lambda x: tf.reduce_mean(x, -1, keepdims=True),
        "without the mean": lambda x: x - tf.reduce_mean(x, -1, keepdims=True),
        "top_k": lambda x: tf.nn.top_k(x, 3)[0],
        "places of top_k": lambda x: tf.nn.top_k(x, 3)[1],
        "argmax": lambda x: tf.argmax(x, -1),
        "one_hot": lambda x: tf.one_hot(tf.argmax(x, -1), x.shape[-1]),
        "softmax twice": lambda x: softmax(softmax(x)),
        "softmax of a temperature": lambda x: softmax(x / 2.5),
        "softmax, then gather": lambda x: tf.gather(
            softmax(x), [1, 0, *range(2, x.shape[-1])], axis=1
        ),
        "softmax, then some": lambda x: softmax(x)[:, :3],
        "softmax, then backwards": lambda x: softmax(x)[:, ::-1],
        "softmax, then log": lambda x: tf.math.log(softmax(x)),
        "softmax, then scale": lambda x: softmax(x) * 100,
        "softmax of images": lambda x: softmax(x, 0),
        "softmax by hand": lambda x: tf.exp(x) / tf.reduce_sum(tf.exp(x), -1, keepdims=True),
        "softmax of some": lambda x: softmax(x[:, 1:]),
        "log_softmax, then exp": lambda x: tf.exp(tf.nn.log_softmax(x)),
        "one sigmoid": lambda x: tf.sigmoid(x[:, 3:4]),
        "one sigmoid, squeezed": lambda x: tf.squeeze(tf.sigmoid(x[:, 3:4]), 1),
        "one number, squeezed, of images": lambda x: tf.sigmoid(tf.squeeze(x[:, 3:4], 1)[:1]),
        "one number": lambda x: x[:, 3:4],
        "rounded probabilities": lambda x: tf.round(softmax(x) * 255) / 255,
        "adjustment by a prior": lambda x: softmax(
            x - 1.5 * tf.math.log(tf.constant(np.linspace(0.1, 1, x.shape[-1]), tf.float32))
        ),
        "features of the norm 1": lambda x: tf.nn.l2_normalize(x, -1) * 8,
        "conv2d": lambda x: tf.nn.conv2d(
            x[:, tf.newaxis, tf.newaxis], square(x)[tf.newaxis, tf.newaxis], 1, "VALID"
        )[:, 0, 0],
    }


def _list_nodes(place: Place) -> dict[str, Nodes]:
    is_image = place in ("before the stem", "between blocks")
    return _list_simple() | (_list_of_images() if is_image else _list_of_vectors())


def list_insertions() -> Iterator[Insertion]:
    """Yield a place and the name of what is inserted there."""
    for place in PLACES:
        for name in _list_nodes(place):
            yield place, name


def insert(insertion: Insertion) -> tuple[Any, str]:
    """Return the graph with nodes inserted, and the name of its output."""
    place, name = insertion
    value, channels = _VALUES[place]
    sides = {"before the stem": [SIZE] * 2, "between blocks": [8, 8]}.get(place, [])
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, *sides, channels], "x")
        with tf.name_scope(SCOPE):
            y = tf.identity(_list_nodes(place)[name](x), "y")
    edited = type(whole_graph())()
    edited.CopyFrom(whole_graph())
    last = y.op.name
    for node in edited.node:
        for number, used in enumerate(node.input):
            node.input[number] = last if used == value else used
    for node in graph.as_graph_def().node:
        if node.name != "x":
            edited.node.add().CopyFrom(node)
            for number, used in enumerate(node.input):
                edited.node[-1].input[number] = value if used == "x" else used
    edited.library.CopyFrom(graph.as_graph_def().library)
    return edited, last if place == "after it" else "logits"
