"""The resize and crop of evaluation, written once for the programs of all frameworks.

`crop_centre` computes with whatever `Operations` gives it: NumPy, a framework's tensors, or the
nodes of a graph. It needs nothing of Lockstep, so that its source can be copied next to a model
(`lockstep.inference.preprocessing_file`).

The pixels are those of `lockstep.data.decoding`, which uses Pillow and OpenCV. Where these
libraries compute in integers, this module does so too. Few pixels differ, by one level of 255, in
OpenCV's bicubic resize and with a filter in the geometry of an original. Of images that are more
than twice as high as wide (in those geometries: higher than wide), Pillow 13 filters the columns
first. Then a fifth of the pixels differ.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

Value = Any
"""A tensor of a framework. It has the operators + - * / and, between integers, //."""
_PILLOW_CUBIC = -0.5
"""Pillow's a of the cubic."""
_OPENCV_CUBIC = -0.75
"""OpenCV's a of the cubic."""
_PILLOW_ONE = 2**22
"""Pillow's weights are multiples of 1 over this number."""
_OPENCV_ONE = 2**11
"""OpenCV's bilinear weights are multiples of 1 over this number."""


@dataclass(frozen=True)
class Geometry:
    """How evaluation resizes and crops. The fields of the same names are documented in
    `lockstep.recipes.Recipe`."""

    eval_resize: int
    eval_crop: int
    interpolation: str
    eval_antialias: bool
    eval_side_rounding: str
    eval_offset_rounding: str
    eval_sampling: str


def read_geometry(recipe: Any) -> Geometry:
    """Return the geometry of a `lockstep.recipes.Recipe`."""
    return Geometry(**{field.name: getattr(recipe, field.name) for field in fields(Geometry)})


class Operations(ABC):
    """What `crop_centre` computes with. Integers are int64, real numbers float64, pixels float32 or
    uint8."""

    module: Any
    """A framework's module, whose functions are those that all frameworks name alike."""

    def call(self, function: str, *arguments: Any) -> Value:
        """Return what a function of the module returns."""
        return getattr(self.module, function)(*arguments)

    @abstractmethod
    def cast(self, value: Value, dtype: str) -> Value:
        """Return a tensor in this dtype."""

    @abstractmethod
    def length(self, images: Value, axis: int) -> Any:
        """Return the length of an axis, as `count` takes it."""

    @abstractmethod
    def integer(self, length: Any) -> Value:
        """Return a length, or the result of + - * // of lengths, as an integer tensor []."""

    @abstractmethod
    def count(self, first: Any, end: Any) -> Value:
        """Return the integers from `first` to before `end` as real numbers [end - first]."""

    def real(self, value: Value) -> Value:
        """Return a tensor as real numbers."""
        return self.cast(value, "float64")

    def single(self, value: Value) -> Value:
        """Return a tensor in float32."""
        return self.cast(value, "float32")

    def round_to_float32(self, value: Value) -> Value:
        """Return real numbers rounded to the nearest that float32 has."""
        return self.real(self.single(value))

    def truncate(self, value: Value) -> Value:
        """Return numbers as integers, rounded towards 0."""
        return self.cast(value, "int64")

    def floor(self, value: Value) -> Value:
        """Return numbers rounded down."""
        return self.call("floor", value)

    def minimum(self, a: Value, b: Value) -> Value:
        """Return the smaller one of two tensors, element by element."""
        return self.call("minimum", a, b)

    def maximum(self, a: Value, b: Value) -> Value:
        """Return the larger one of two tensors, element by element."""
        return self.call("maximum", a, b)

    def clip(self, value: Value, low: float, high: float) -> Value:
        """Return real or float32 numbers, those beyond the bounds replaced by them."""
        return self.call("clip", value, low, high)

    @abstractmethod
    def total(self, value: Value, axis: int) -> Value:
        """Return the sums of a matrix of real numbers along an axis, which keeps the length 1."""

    @abstractmethod
    def take(self, pixels: Value, index: Value, axis: int) -> Value:
        """Return the elements at some places of an axis."""

    def reshape(self, value: Value, shape: tuple[int, ...]) -> Value:
        """Return a tensor in another shape; -1 stands for what is left."""
        return self.call("reshape", value, shape)

    def transpose(self, value: Value, axes: tuple[int, ...]) -> Value:
        """Return a tensor with its axes in another order."""
        return self.call("transpose", value, axes)

    def product(self, a: Value, b: Value) -> Value:
        """Return the matrix products of the last two axes, of real numbers."""
        return self.call("matmul", a, b)


def crop_centre(images: Value, geometry: Geometry, ops: Operations) -> Value:
    """Return what evaluation sees of images of one size.

    `images` are uint8 [N, H, W, 3]. The result is float32 [N, 3, S, S] with whole numbers from 0 to
    255, where S is `eval_crop`.
    """
    lengths = ops.length(images, 1), ops.length(images, 2)
    height = ops.integer(lengths[0])
    width = ops.integer(lengths[1])
    shorter = ops.minimum(height, width)
    rows = _place_samples(height, shorter, geometry, ops)
    columns = _place_samples(width, shorter, geometry, ops)
    if geometry.eval_antialias:
        if geometry.eval_sampling != "half_pixel":
            rows, columns = _store_as_box(rows, columns, geometry, ops)
        pixels = ops.real(ops.transpose(images, (0, 3, 1, 2)))
        pixels = _frame(pixels, lengths, geometry, ops)
        # Pillow filters every row first, and rounds in between.
        weights = _filter_weights(columns, lengths[1], 0, geometry, ops)
        pixels = _divide_by_one(ops.product(pixels, weights), ops)
        weights = _filter_weights(rows, lengths[0], 1, geometry, ops)
        return ops.single(_divide_by_one(ops.product(weights, pixels), ops))
    if geometry.interpolation == "bilinear" and geometry.eval_sampling == "half_pixel":
        pixels = _blend_in_integers(images, rows, columns, geometry, ops)
    else:
        pixels = _blend(images, rows, height, 1, geometry, ops)
        pixels = _round(_blend(pixels, columns, width, 2, geometry, ops), ops)
    return ops.transpose(pixels, (0, 3, 1, 2))


@dataclass(frozen=True)
class _Samples:
    """Where the pixels of the crop sample an axis. Pixel i of the source covers i to i + 1."""

    start: Value
    """Where the first pixel of the crop begins: real []."""
    step: Value
    """The width of a pixel of the crop: real []."""

    def centres(self, geometry: Geometry, ops: Operations) -> Value:
        """Return the centre of each pixel of the crop: real [S]."""
        return self.start + (ops.count(0, geometry.eval_crop) + 0.5) * self.step


def _place_samples(length: Value, shorter: Value, geometry: Geometry, ops: Operations) -> _Samples:
    side = _resize_side(length, shorter, geometry, ops)
    surplus = side - geometry.eval_crop
    half = surplus // 2
    rest = surplus - half * 2
    if geometry.eval_offset_rounding == "up":
        offset = half + rest
    elif geometry.eval_offset_rounding == "down":
        offset = half
    else:
        offset = half + rest * (half - (half // 2) * 2)
    step = ops.real(length) / ops.real(side)
    start = ops.real(length) * 0.0
    if geometry.eval_sampling == "half_pixel_symmetric":
        step = ops.real(shorter) / ops.real(_resize_side(shorter, shorter, geometry, ops))
        start = ops.real(length) * 0.5 - ops.real(side) * 0.5 * step
    elif geometry.eval_sampling == "asymmetric":
        start = step * -0.5 + 0.5
    return _Samples(start + ops.real(offset) * step, step)


def _store_as_box(
    rows: _Samples, columns: _Samples, geometry: Geometry, ops: Operations
) -> tuple[_Samples, _Samples]:
    """Return samples as Pillow has them: it stores the box that they share evenly, in a framed
    image, as float32."""
    longest = ops.maximum(
        ops.maximum(rows.step, columns.step) * geometry.eval_crop,
        rows.step * 0.0 + geometry.eval_crop,
    )
    frame = ops.floor(longest * (-2.0 / geometry.eval_crop)) * -1.0 + 2.0
    stored = []
    for samples in (rows, columns):
        start = samples.start + frame
        first = ops.round_to_float32(start)
        end = ops.round_to_float32(start + samples.step * geometry.eval_crop)
        step = end / float(geometry.eval_crop) - first / float(geometry.eval_crop)
        stored.append(_Samples(first - frame, step))
    return stored[0], stored[1]


def _resize_side(length: Value, shorter: Value, geometry: Geometry, ops: Operations) -> Value:
    """Return the length of a side after the resize: an integer []."""
    if geometry.eval_side_rounding == "nearest":
        return (length * (2 * geometry.eval_resize) + shorter) // (shorter * 2)
    if geometry.eval_side_rounding == "down":
        return length * geometry.eval_resize // shorter
    resize = ops.single(shorter * 0 + geometry.eval_resize)
    side = ops.truncate(ops.single(length) * (resize / ops.single(shorter)))
    return ops.maximum(side, shorter * 0 + geometry.eval_crop)


def _divide_by_one(sums: Value, ops: Operations) -> Value:
    """Return weighted sums over `_PILLOW_ONE`, as real whole numbers from 0 to 255. Pillow computes
    in integers, too."""
    quotients = (ops.truncate(sums) + _PILLOW_ONE // 2) // _PILLOW_ONE
    return ops.clip(ops.real(quotients), 0.0, 255.0)


def _margin(length: Any, geometry: Geometry) -> Any:
    """Return how far samples may lie beyond a border, with the filter's pixels. The border
    continues there."""
    return 0 if geometry.eval_sampling == "half_pixel" else 2 * length // geometry.eval_crop + 8


def _frame(pixels: Value, lengths: tuple[Any, Any], geometry: Geometry, ops: Operations) -> Value:
    """Return pixels [N, 3, H, W] with a margin around them."""
    if geometry.eval_sampling == "half_pixel":
        return pixels
    for axis, length in enumerate(lengths, start=2):
        margin = _margin(length, geometry)
        places = ops.count(-margin, length + margin)
        pixels = ops.take(pixels, _limit(places, ops.integer(length), ops), axis)
    return pixels


def _filter_weights(
    samples: _Samples, length: Any, axis: int, geometry: Geometry, ops: Operations
) -> Value:
    """Return Pillow's weight of every source pixel for every sample, times `_PILLOW_ONE`.

    They are real numbers, [S, sources] if `axis` is 1, and [sources, S] if it is 0. Sources are
    along this axis.
    """
    margin = _margin(length, geometry)
    shapes = ((-1, 1), (1, -1)) if axis == 0 else ((1, -1), (-1, 1))
    sources = ops.reshape(ops.count(-margin, length + margin) + 0.5, shapes[0])
    centres = ops.reshape(samples.centres(geometry, ops), shapes[1])
    weights = _weigh(
        (sources - centres) / ops.clip(samples.step, 1.0, 1e9), _PILLOW_CUBIC, geometry, ops
    )
    return ops.floor(weights * float(_PILLOW_ONE) / ops.total(weights, axis) + 0.5)


def _blend_in_integers(
    images: Value, rows: _Samples, columns: _Samples, geometry: Geometry, ops: Operations
) -> Value:
    """Return weighted sums of the 4 nearest pixels of every sample with OpenCV's integers: float32
    [N, S, S, 3]."""
    height = ops.integer(ops.length(images, 1))
    width = ops.integer(ops.length(images, 2))
    (upper, lower), row_weights = _nearest_two(rows, height, geometry, ops)
    (left, right), column_weights = _nearest_two(columns, width, geometry, ops)
    blended: Value = 2
    for row, row_weight in zip((upper, lower), row_weights, strict=True):
        line: Value = 0
        for column, column_weight in zip((left, right), column_weights, strict=True):
            part = ops.truncate(ops.take(ops.take(images, row, 1), column, 2))
            line = part * ops.reshape(column_weight, (-1, 1)) + line
        blended = (line // 16) * ops.reshape(row_weight, (-1, 1, 1)) // 65536 + blended
    return ops.clip(ops.single(blended // 4), 0.0, 255.0)


def _nearest_two(
    samples: _Samples, length: Value, geometry: Geometry, ops: Operations
) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """Return the two nearest pixels of every sample along an axis, and their integer weights."""
    positions = ops.round_to_float32(samples.centres(geometry, ops) - 0.5)  # as OpenCV stores them
    first = ops.floor(positions)
    share = positions * float(_OPENCV_ONE) - first * float(_OPENCV_ONE)
    rest = ops.round_to_float32(first - positions + 1.0) * float(_OPENCV_ONE)
    weights = _round_to_even(rest, ops), _round_to_even(share, ops)
    return (_limit(first, length, ops), _limit(first + 1.0, length, ops)), weights


def _round_to_even(value: Value, ops: Operations) -> Value:
    """Return the nearest integers, halves rounded to even numbers. Values are multiples of more
    than a millionth."""
    whole = ops.floor(value)
    is_even = ops.floor(whole * 0.5) * 2.0 - whole + 1.0
    return ops.truncate(ops.floor(value + 0.5 - is_even * 2.0**-20))


def _limit(places: Value, length: Value, ops: Operations) -> Value:
    """Return the nearest places within an axis, as integers."""
    last = ops.real(length) - 1.0
    return ops.truncate(ops.maximum(ops.minimum(places, last), last * 0.0))


def _blend(
    pixels: Value, samples: _Samples, length: Value, axis: int, geometry: Geometry, ops: Operations
) -> Value:
    """Return weighted sums of the 2 or 4 nearest pixels of every sample along an axis, as OpenCV
    does, in float32."""
    positions = samples.centres(geometry, ops) - 0.5
    first = ops.floor(positions)
    nearest = range(-1, 3) if geometry.interpolation == "bicubic" else range(2)
    shape = (-1, 1, 1) if axis == 1 else (-1, 1)
    blended: Value = 0.0
    for number in nearest:
        place = first + float(number)
        weight = ops.single(_weigh(positions - place, _OPENCV_CUBIC, geometry, ops))
        part = ops.single(ops.take(pixels, _limit(place, length, ops), axis))
        blended = part * ops.reshape(weight, shape) + blended
    return blended


def _weigh(distance: Value, a: float, geometry: Geometry, ops: Operations) -> Value:
    """Return the weights of pixels at some distances from a sample, in units of the filter."""
    t = ops.maximum(distance, distance * -1.0)
    near = ops.clip(t, 0.0, 1.0)
    if geometry.interpolation == "bilinear":
        return near * -1.0 + 1.0
    far = ops.clip(t, 1.0, 2.0)  # each part is 0 where the other one counts
    return (
        (near * (a + 2) - (a + 3)) * near * near + 1.0 + (((far - 5.0) * far + 8.0) * far - 4.0) * a
    )


def _round(pixels: Value, ops: Operations) -> Value:
    """Return pixels as whole numbers from 0 to 255, halves rounded up as Pillow and OpenCV do."""
    return ops.clip(ops.floor(pixels + 0.5), 0.0, 255.0)
