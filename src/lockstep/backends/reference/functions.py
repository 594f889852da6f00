"""The mathematics of a training step, forward and backward, in plain NumPy. Every engine computes
the same.

There are N images, H x W pixels, C channels and K logits. Activations are [N, H, W, C], kernels [O,
C / groups, k, k] (OIHW). A function returns its result and a function `back`. `back` turns the
gradient of the loss with respect to the result into the gradients with respect to the inputs. In
the formulas, d_ marks such a gradient.
"""

from collections.abc import Callable

import numpy as np

from lockstep.models.quantisation import LARGEST, LOWEST

Array = np.ndarray
Back = Callable[[Array], Array]


def padding(length: int, kernel: int, stride: int, kind: str) -> tuple[int, int]:
    """Return how many pixels are added before and after an axis.

    - "symmetric": (k - 1) / 2 on both sides.
    - "same", as in TensorFlow: n pixels become ceil(n / s). total = max((ceil(n / s) - 1) * s + k -
      n, 0) pixels are added; an odd one is added after the axis.
    - "none": no pixels.
    """
    if kind == "none":
        return 0, 0
    if kind == "symmetric":
        return kernel // 2, kernel // 2
    total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
    return total // 2, total - total // 2


class _Windows:
    """The windows of k x k pixels of padded images, `stride` apart. They are read one place within
    the window at a time."""

    def __init__(self, x: Array, kernel: int, stride: int, kind: str, fill: float) -> None:
        sides = [padding(length, kernel, stride, kind) for length in x.shape[1:3]]
        self.images = np.pad(x, ((0, 0), *sides, (0, 0)), constant_values=fill)
        self.places = [(i, j) for i in range(kernel) for j in range(kernel)]
        self.rows, self.columns = (
            (length - kernel) // stride + 1 for length in self.images.shape[1:3]
        )
        self._stride = stride
        (top, _), (left, _) = sides
        self._inside = np.s_[:, top : top + x.shape[1], left : left + x.shape[2]]

    def at(self, i: int, j: int, images: Array | None = None) -> Array:
        """Return pixel (i, j) of every window: a view [N, rows, columns, C] of the padded images,
        or of other `images`."""
        down, across = (self._stride * (count - 1) + 1 for count in (self.rows, self.columns))
        images = self.images if images is None else images
        return images[:, i : i + down : self._stride, j : j + across : self._stride]

    def without_padding(self, images: Array) -> Array:
        """Return padded images without their padding."""
        return images[self._inside]


def convolution(
    x: Array, weight: Array, *, stride: int, groups: int, padding: str
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """Return y [N, P, Q, O] and back: d_y -> (d_x, d_weight).

        y[n, p, q, o]         = sum over i, j, c of  x[n, s*p + i, s*q + j, c] * weight[o, c, i, j]
        d_weight[o, c, i, j]  = sum over n, p, q of  x[n, s*p + i, s*q + j, c] * d_y[n, p, q, o]
        d_x[n, u, v, c]       = sum over o, i, j of  weight[o, c, i, j] * d_y[n, p, q, o]
                                where u = s*p + i, v = s*q + j

    x is padded with zeros. c runs over the channels of o's group. There is no bias.
    """
    outputs, inputs, kernel, _ = weight.shape
    windows = _Windows(x, kernel, stride, padding, fill=0.0)
    kernels = weight.reshape(groups, outputs // groups, inputs, kernel, kernel)

    def split_groups(values: Array) -> Array:
        """Reshape [N, P, Q, channels] to [groups, N*P*Q, channels / groups]."""
        return values.reshape(-1, groups, values.shape[3] // groups).transpose(1, 0, 2)

    def join_groups(values: Array) -> Array:
        """Reshape [groups, N*P*Q, channels / groups] to [N, P, Q, channels]."""
        channels = groups * values.shape[2]
        return values.transpose(1, 0, 2).reshape(len(x), windows.rows, windows.columns, channels)

    y = np.zeros((groups, len(x) * windows.rows * windows.columns, outputs // groups), x.dtype)
    for i, j in windows.places:
        y += split_groups(windows.at(i, j)) @ kernels[..., i, j].transpose(0, 2, 1)

    def back(d_y: Array) -> tuple[Array, Array]:
        d_out = split_groups(d_y)
        d_images = np.zeros_like(windows.images)
        d_kernels = np.empty_like(kernels)
        for i, j in windows.places:
            d_kernels[..., i, j] = d_out.transpose(0, 2, 1) @ split_groups(windows.at(i, j))
            windows.at(i, j, d_images)[...] += join_groups(d_out @ kernels[..., i, j])
        return windows.without_padding(d_images), d_kernels.reshape(weight.shape)

    return join_groups(y), back


def batch_norm(
    x: Array, scale: Array, bias: Array, *, epsilon: float
) -> tuple[Array, Array, Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Return y, the batch's mean [C] and biased variance [C], and back: d_y -> (d_x, d_scale,
    d_bias).

        mean = sum x / M,  variance = sum (x - mean)^2 / M  over a channel's M = N*H*W values
        z    = (x - mean) / sqrt(variance + epsilon),  y = scale * z + bias
        d_scale = sum d_y * z,  d_bias = sum d_y
        d_x  = scale / sqrt(variance + epsilon) * (d_y - d_bias / M - z * d_scale / M)

    arXiv:1502.03167.
    """
    mean = x.mean(axis=(0, 1, 2))
    variance = np.square(x - mean).mean(axis=(0, 1, 2))
    deviation = np.sqrt(variance + epsilon)
    z = (x - mean) / deviation

    def back(d_y: Array) -> tuple[Array, Array, Array]:
        d_scale = (d_y * z).sum(axis=(0, 1, 2))
        d_bias = d_y.sum(axis=(0, 1, 2))
        values = x.size // x.shape[3]
        return scale / deviation * (d_y - d_bias / values - z * (d_scale / values)), d_scale, d_bias

    return scale * z + bias, mean, variance, back


def running_statistics(
    old_mean: Array,
    old_variance: Array,
    mean: Array,
    variance: Array,
    *,
    values: int,
    momentum: float,
) -> tuple[Array, Array]:
    """Return the running mean and variance after a batch with these (biased) statistics over M =
    `values` values.

    new = (1 - momentum) * old + momentum * batch's. The variance is first made unbiased: it is
    multiplied by M / (M - 1).
    """
    unbiased = variance * (values / (values - 1))
    return (1 - momentum) * old_mean + momentum * mean, (
        1 - momentum
    ) * old_variance + momentum * unbiased


def batch_norm_in_inference(
    x: Array, scale: Array, bias: Array, mean: Array, variance: Array, *, epsilon: float
) -> tuple[Array, Back]:
    """Return y = scale * (x - mean) / sqrt(variance + epsilon) + bias, with running statistics, and
    back: d_y -> d_x = d_y * scale / sqrt(variance + epsilon)."""
    deviation = np.sqrt(variance + epsilon)
    return scale * ((x - mean) / deviation) + bias, lambda d_y: d_y * (scale / deviation)


def relu(x: Array) -> tuple[Array, Back]:
    """Return max(x, 0) and back: d_y -> d_x = d_y where x > 0, else 0."""
    return np.maximum(x, 0), lambda d_y: np.where(x > 0, d_y, 0)


def max_pool(x: Array, *, kernel: int, stride: int, padding: str) -> tuple[Array, Back]:
    """Return the largest value of every window, and back, which passes its gradient to that place
    (the first of equals)."""
    windows = _Windows(x, kernel, stride, padding, fill=-np.inf)
    pixels = np.stack([windows.at(i, j) for i, j in windows.places])
    largest = pixels.argmax(axis=0)

    def back(d_y: Array) -> Array:
        d_images = np.zeros_like(windows.images)
        for place, (i, j) in enumerate(windows.places):
            windows.at(i, j, d_images)[...] += np.where(largest == place, d_y, 0)
        return windows.without_padding(d_images)

    return pixels.max(axis=0), back


def average_pool_2x2(x: Array) -> tuple[Array, Back]:
    """Return the mean of every 2 x 2 pixels, 2 apart, and back. At an odd edge it is the mean of
    the pixels that exist."""
    windows = _Windows(x, 2, 2, "same", fill=0.0)
    ones = _Windows(np.ones_like(x), 2, 2, "same", fill=0.0)
    y = np.zeros_like(windows.at(0, 0))
    counts = np.zeros_like(y)
    for i, j in windows.places:
        y += windows.at(i, j)
        counts += ones.at(i, j)

    def back(d_y: Array) -> Array:
        d_images = np.zeros_like(windows.images)
        for i, j in windows.places:
            windows.at(i, j, d_images)[...] += d_y / counts
        return windows.without_padding(d_images)

    return y / counts, back


def blur(x: Array, *, stride: int, padding: str) -> tuple[Array, Back]:
    """Return y and back: d_y -> d_x.

        y[n, p, q, c] = sum over i, j of  b[i] * b[j] * x[n, s*p + i, s*q + j, c]
                        where b = (1, 2, 1) / 4

    x gets a pixel on every side. "zero" adds zeros. "reflect" adds the pixels next to the outermost
    ones.
    arXiv:1904.11486.
    """
    if padding == "zero":
        windows = _Windows(x, 3, stride, "symmetric", fill=0.0)
    else:
        windows = _Windows(_mirror(x), 3, stride, "none", fill=0.0)
    weights = np.array([0.25, 0.5, 0.25], x.dtype)
    y = np.zeros_like(windows.at(0, 0))
    for i, j in windows.places:
        y += weights[i] * weights[j] * windows.at(i, j)

    def back(d_y: Array) -> Array:
        d_images = np.zeros_like(windows.images)
        for i, j in windows.places:
            windows.at(i, j, d_images)[...] += weights[i] * weights[j] * d_y
        if padding == "zero":
            return windows.without_padding(d_images)
        for axis in (1, 2):
            d_lines = np.moveaxis(d_images, axis, 0)  # a view
            d_lines[2] += d_lines[0]
            d_lines[-3] += d_lines[-1]
            d_images = np.moveaxis(d_lines[1:-1], 0, axis)
        return d_images

    return y, back


def _mirror(x: Array) -> Array:
    return np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")


def sigmoid(x: Array) -> tuple[Array, Back]:
    """Return y = 1 / (1 + exp(-x)) and back: d_y -> d_x = d_y * y * (1 - y)."""
    y = 0.5 * (1 + np.tanh(0.5 * x))  # without an overflow
    return y, lambda d_y: d_y * y * (1 - y)


def scale_channels(
    x: Array, factors: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """Return y = x [N, H, W, C] times factors [N, C], and back: d_y -> (d_x = d_y * factors,
    d_factors = sum over pixels of d_y * x)."""
    return x * factors[:, None, None], lambda d_y: (
        d_y * factors[:, None, None],
        (d_y * x).sum(axis=(1, 2)),
    )


def average_pool(x: Array) -> tuple[Array, Back]:
    """Return the mean over all pixels [N, C], and back: d_x[n, h, w, c] = d_y[n, c] / (H * W)."""
    _, height, width, _ = x.shape
    return x.mean(axis=(1, 2)), lambda d_y: np.broadcast_to(
        d_y[:, None, None] / (height * width), x.shape
    )


def linear(
    x: Array, weight: Array, bias: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Return y = x W^T + b [N, K], and back: d_y -> (d_x = d_y W, d_W = d_y^T x, d_b = sum over n
    of d_y)."""
    return x @ weight.T + bias, lambda d_y: (d_y @ weight, d_y.T @ x, d_y.sum(axis=0))


def normalise(images: Array, mean: Array, std: Array) -> Array:
    """Return (x - mean) / std for every colour."""
    return (images - mean) / std


def mix(x: Array, coefficients: Array, partners: Array) -> Array:
    """Mix images or targets: n becomes c[n] * x[n] + (1 - c[n]) * x[partner of n]
    (arXiv:1710.09412).

    `coefficients` are [N], or [N, H, W] with a weight for every pixel (CutMix, arXiv:1905.04899).
    """
    own = coefficients.reshape(*coefficients.shape, *[1] * (x.ndim - coefficients.ndim))
    return own * x + (1 - own) * x[partners]


def targets(labels: Array, logits: int, *, smoothing: float, dtype: np.dtype) -> Array:
    """Return smoothed one-hot rows [N, K]: (1 - s) * [k = label] + s / K. arXiv:1512.00567."""
    return (1 - smoothing) * np.eye(logits, dtype=dtype)[labels] + dtype.type(smoothing / logits)


def drop(x: Array, kept: Array, dropout: float) -> tuple[Array, Back]:
    """Apply dropout: kept values are divided by 1 - dropout, the others are 0. arXiv:1207.0580.
    Stochastic depth does the same to what a block adds to an image. arXiv:1603.09382.

    Also return back: d_y -> d_x.
    """
    factors = kept / x.dtype.type(1 - dropout)
    return x * factors, lambda d_y: d_y * factors


def cross_entropy(logits: Array, target: Array) -> tuple[Array, Callable[[], Array]]:
    """Return the losses [N] and back: () -> the gradient of their mean with respect to the logits.

    loss[n] = -sum over k of  target[n, k] * log p[n, k],   p = softmax(logits)
    d_logits = (sum of target * p - target) / N             the sum is over a row
    With class weights, a target is the product of target and weights.
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    total = target.sum(axis=1, keepdims=True)
    return -(target * log_p).sum(axis=1), lambda: (total * np.exp(log_p) - target) / len(logits)


def binarise(target: Array, above: float) -> Array:
    """Return 1 where a target is above a number, else 0."""
    return (target > above).astype(target.dtype)


def binary_cross_entropy(
    logits: Array, target: Array, reduction: str
) -> tuple[Array, Callable[[], Array]]:
    """Return the losses [N] and back: () -> the gradient of their mean with respect to the logits.

    loss[n] = mean or sum over k of  -(t * log s + (1 - t) * log(1 - s)),   s = 1 / (1 + exp(-x))
                                  =  max(x, 0) - x * t + log(1 + exp(-|x|))
    d_logits = (s - t) / N, with the mean also / K          t is target[n, k], x is logits[n, k]
    """
    small = np.exp(-np.abs(logits))
    losses = np.maximum(logits, 0) - logits * target + np.log1p(small)
    sigmoid = np.where(logits >= 0, 1, small) / (1 + small)
    count = len(logits) * (logits.shape[1] if reduction == "mean" else 1)
    reduced = losses.mean(axis=1) if reduction == "mean" else losses.sum(axis=1)
    return reduced, lambda: (sigmoid - target) / count


def rank_labels(logits: Array, labels: Array) -> Array:
    """Return how many classes rank above the label, int64 [N]: larger logits, equal logits of lower
    classes, and NaN."""
    own = logits[np.arange(len(labels)), labels][:, None]
    before = np.arange(logits.shape[1])[None] < labels[:, None]
    return (~(logits <= own) | ((logits == own) & before)).sum(axis=1)


def score(logits: Array, labels: Array) -> Array:
    """Return a row for every image, [N, 5]: loss, rank of the right class, prediction, label, and
    confidence, which is the largest value of softmax(logits).

    Logits that are not finite have such losses, without a warning.
    """
    with np.errstate(invalid="ignore"):
        losses, _ = cross_entropy(logits, np.eye(logits.shape[1])[labels])
        confidences = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    ranks = rank_labels(logits, labels)
    return np.stack([losses, ranks, logits.argmax(axis=1), labels, confidences], axis=1)


def fake_quantise(x: Array, scale: Array) -> tuple[Array, Back]:
    """Return x rounded to int8 multiples of the scale, and back; see
    `lockstep.models.quantisation`.

    q = round(x / scale), halves to even;  y = scale * min(max(q, -128), 127);  d_x = d_y where -128
    <= q <= 127, else 0
    """
    q = np.rint(x / scale)
    is_within = (q >= LOWEST) & (q <= LARGEST)
    return np.clip(q, LOWEST, LARGEST) * scale, lambda d_y: np.where(is_within, d_y, 0)


def round_to(x: Array, precision: str) -> Array:
    """Return the values rounded to bf16 or fp16 (to nearest, ties to even); in other precisions
    unchanged."""
    if precision == "fp16":
        return x.astype(np.float16).astype(x.dtype)
    if precision == "bf16":  # the upper half of a float32
        bits = x.astype(np.float32).view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
            0xFFFF0000
        )
        return np.where(np.isfinite(x), nearest.view(np.float32), x).astype(x.dtype)
    return x
