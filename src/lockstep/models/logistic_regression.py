"""Logistic regression with an L2 penalty: the classifier that fits fixed features best.

With images i = 1 ... n, features x_i and labels y_i it is the minimum over W and b of

    1/n * sum_i -log softmax(W z_i + b)[y_i] + penalty / 2 * (|W|^2 + |b|^2)

where z_i = (x_i - mean) / scale, with the mean of all features and the root of the mean of
|x_i - mean|^2. The penalty makes it strictly convex, so that there is exactly one minimum. Newton's
method finds it; each step is a system of equations that conjugate gradients solve (Nocedal and
Wright, Numerical Optimization, algorithm 7.1). Everything is computed in float64 and in one order.

The search can begin at another classifier than 0. Then W and b are what is added to that one, so
that the penalty keeps the sum close to it.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

_NEWTON_STEPS = 50
_GRADIENT_STEPS = 100
"""At most this many steps of conjugate gradients in a step of Newton's method."""
_TOLERANCE = 1e-8
"""Gradient at the end, as a share of the gradient at 0."""


def fit_classifier(
    features: np.ndarray,
    labels: np.ndarray,
    classes: int,
    penalty: float,
    *,
    start: tuple[np.ndarray, np.ndarray] | None = None,
    begin_step: Callable[[float], None] = lambda done: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight, float64 [classes, features], and bias, float64 [classes], of the best
    classifier of features [images, features] with labels, int64 [images].

    `start` is the weight and the bias that the search begins at; by default 0. `begin_step` is
    called before each step of conjugate gradients with the share of the search that is done, 0 to
    1: how far the logarithm of the gradient has fallen. It may raise an error to end the search.
    """
    mean = features.mean(axis=0, dtype=np.float64)
    centred = features - mean
    scale = np.sqrt(np.square(centred).sum() / len(centred)) or 1.0
    rows = centred / scale
    images, count = rows.shape
    first = (0.0, 0.0) if start is None else start
    logits = np.zeros((images, classes))
    if start is not None:
        logits += features @ start[0].T + start[1]
    basis = None
    if images < count:
        # The best weight is a sum of the images' features: fewer unknowns, the same minimum.
        basis, rows = np.linalg.qr(rows.T)
        rows = rows.T
    weight = _minimise(
        np.column_stack([rows, np.ones(images)]), logits, labels, penalty, begin_step
    )
    bias = weight[:, -1]
    weight = weight[:, :-1] if basis is None else weight[:, :-1] @ basis.T
    weight = weight / scale
    return first[0] + weight, first[1] + bias - weight @ mean


def _minimise(
    rows: np.ndarray,
    first: np.ndarray,
    labels: np.ndarray,
    penalty: float,
    begin_step: Callable[[float], None],
) -> np.ndarray:
    """Return the weight of rows [images, columns] with the least loss, float64 [classes,
    columns]. Its logits are added to the `first` ones, [images, classes]."""
    weight = np.zeros((first.shape[1], rows.shape[1]))
    loss, shares = _compute_loss(weight, rows, first, labels, penalty)
    smallest = 0.0
    for _ in range(_NEWTON_STEPS):
        gradient = _compute_gradient(weight, shares, rows, labels, penalty)
        length = float(np.linalg.norm(gradient))
        smallest = smallest or _TOLERANCE * length
        if length <= smallest:
            break
        left = math.log(smallest / length) / math.log(_TOLERANCE)
        begin = partial(begin_step, min(max(1 - left, 0.0), 1.0))
        step = _solve(_curvature(shares, rows, penalty), -gradient, begin)
        slope = float((gradient * step).sum())
        size = 1.0
        while True:
            next_weight = weight + size * step
            next_loss, next_shares = _compute_loss(next_weight, rows, first, labels, penalty)
            if next_loss <= loss + 1e-4 * size * slope or size < 1e-6:
                break
            size /= 2
        if next_loss >= loss:  # rounding
            break
        weight = next_weight
        loss = next_loss
        shares = next_shares
    return weight


def _compute_loss(
    weight: np.ndarray, rows: np.ndarray, first: np.ndarray, labels: np.ndarray, penalty: float
) -> tuple[float, np.ndarray]:
    """Return the loss, and the softmax of all images: float64 [images, classes]."""
    logits = first + rows @ weight.T
    logits -= logits.max(axis=1, keepdims=True)
    powers = np.exp(logits)
    sums = powers.sum(axis=1, keepdims=True)
    right = np.take_along_axis(logits, labels[:, None], axis=1) - np.log(sums)
    loss = -float(right.mean()) + penalty / 2 * float(np.square(weight).sum())
    return loss, powers / sums


def _compute_gradient(
    weight: np.ndarray, shares: np.ndarray, rows: np.ndarray, labels: np.ndarray, penalty: float
) -> np.ndarray:
    errors = shares.copy()
    errors[np.arange(len(labels)), labels] -= 1
    return errors.T @ rows / len(rows) + penalty * weight


def _curvature(
    shares: np.ndarray, rows: np.ndarray, penalty: float
) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that multiplies the matrix of second derivatives with a direction."""

    def multiply(direction: np.ndarray) -> np.ndarray:
        changes = shares * (rows @ direction.T)
        changes -= shares * changes.sum(axis=1, keepdims=True)
        return changes.T @ rows / len(rows) + penalty * direction

    return multiply


def _solve(
    multiply: Callable[[np.ndarray], np.ndarray],
    wanted: np.ndarray,
    begin_step: Callable[[], None],
) -> np.ndarray:
    """Return roughly x with multiply(x) = wanted, the closer the smaller `wanted` is."""
    solution = np.zeros_like(wanted)
    rest = wanted.copy()
    direction = rest
    square = float((rest * rest).sum())
    enough = min(0.5, square**0.25) ** 2 * square
    for _ in range(_GRADIENT_STEPS):
        begin_step()
        product = multiply(direction)
        size = square / float((direction * product).sum())
        solution = solution + size * direction
        rest = rest - size * product
        before = square
        square = float((rest * rest).sum())
        if square <= enough:
            break
        direction = rest + square / before * direction
    return solution
