"""The images of a step, and how each is cropped, changed, mixed and dropped: pure functions of
(seed, epoch, position).

The images of an epoch and their order are those of `recipes.epoch_order`.
Step s takes positions s*B to (s+1)*B - 1 of it, for any number of ranks. A step is divided into
units of equal size, one for each rank and accumulation part. A unit takes consecutive positions
from the front of the step and the mirrored positions from the back. Reversing a unit then pairs the
same images as reversing the whole step, so that mixing by reversal is the same for one rank and for
many.

Training and evaluation crop and resize an image in the same way: window -> resize -> square at an
offset.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from lockstep.recipes.epoch_order import SampleOrder, order_samples
from lockstep.recipes.image_sizes import find_size, list_sizes
from lockstep.recipes.mixing import draw_mixing
from lockstep.recipes.philox import Numbers, Purpose, uniform
from lockstep.recipes.recipe import Recipe
from lockstep.recipes.stochastic_depth import drop_rates
from lockstep.system.errors import RecipeError


class SizeTable(Protocol):
    """Heights and widths of all images: an array [images, 2], or looked up on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, samples: np.ndarray) -> np.ndarray:
        """Return the heights and widths of some images: int64 [N, 2]."""


@dataclass(frozen=True)
class BatchPlan:
    """What a loader does for one batch of N images, and what a step mixes and drops."""

    samples: np.ndarray
    """int64 [N]: rows of the index. -1 is padding: a black image that is not counted."""
    windows: np.ndarray
    """int32 [N, 4]: top, left, height and width of the window, in pixels of the stored image."""
    resized: np.ndarray
    """int32 [N, 2]: height and width that the window is resized to."""
    offsets: np.ndarray
    """int32 [N, 2]: top and left of the output square in the resized window. What lies outside the
    window is reflected at its border; the outermost pixels are not repeated."""
    flips: np.ndarray
    """bool [N]: whether the image is mirrored left to right."""
    size: int
    """Height and width of the output square."""
    vertical_flips: np.ndarray | None = None
    """bool [N]: whether the image is mirrored upside down; None if none is."""
    is_bicubic: np.ndarray | None = None
    """bool [N]: whether the resize is "bicubic", else "bilinear"; None: the recipe decides for all
    images."""
    augmentations: np.ndarray | None = None
    """object [N, augmentations]: what each of the recipe's augmentations has drawn for the image;
    None without augmentations."""
    coefficients: np.ndarray | None = None
    """float32 [N]: weight of the image itself, as `Mixing.coefficients`; None if none is mixed."""
    partners: np.ndarray | None = None
    """int64 [N]: what the image is mixed with, as an index into the image's unit of the batch; None
    if none is mixed."""
    target_coefficients: np.ndarray | None = None
    """float32 [N]: as `Mixing.target_coefficients`; None without CutMix."""
    boxes: np.ndarray | None = None
    """int32 [N, 4]: as `Mixing.boxes`; None without CutMix."""
    kept_features: np.ndarray | None = None
    """bool [N, features]: the features of each image that dropout leaves; None without dropout."""
    kept_blocks: np.ndarray | None = None
    """bool [N, blocks]: the blocks of each image that stochastic depth leaves; None without it."""

    def batch_columns(self) -> dict[str, Any]:
        """Return what a batch takes over from its plan, by the names of `lockstep.data.Batch`."""
        return {name: getattr(self, name) for name in _BATCH_COLUMNS}


_BATCH_COLUMNS = (
    *("coefficients", "partners", "target_coefficients", "boxes"),
    *("kept_features", "kept_blocks"),
)


def unit_positions(unit: int, units: int, step_images: int) -> np.ndarray:
    """Return the positions within a step that belong to a unit: int64 [step_images / units], in
    increasing order.

    A unit of odd size also takes one position from the middle.

    >>> unit_positions(0, 2, 8), unit_positions(1, 2, 8)
    (array([0, 1, 6, 7]), array([2, 3, 4, 5]))
    """
    size = step_images // units
    half = size // 2
    front = np.arange(unit * half, (unit + 1) * half)
    middle = np.arange(units * half + unit, units * half + unit + size % 2)
    return np.concatenate([front, middle, step_images - 1 - front[::-1]])


def steps_per_epoch(recipe: Recipe, images: int, *, ranks: int = 1, parts: int = 1) -> int:
    """Return the optimizer steps of an epoch. Images that do not fill a last step are left out
    (different ones in each epoch).

    Raises `RecipeError` if the images do not fill one step. It says what fits this many ranks and
    accumulation parts.
    """
    if images < recipe.global_batch_images:
        raise RecipeError(
            f"global_batch_images is {recipe.global_batch_images}, but there are only {images}"
            f" training images. {_advise_batch(recipe, images, ranks, parts)}"
        )
    return images // recipe.global_batch_images


def _advise_batch(recipe: Recipe, images: int, ranks: int, parts: int) -> str:
    """Return how to train on so few images: with at most eight steps in an epoch."""
    for size in (recipe.image_size, 2 * STRIDE):
        for batch in range(max(images // 8, 1), images + 1):
            try:
                smaller = recipe.replace(global_batch_images=batch, image_size=size)
                check_shares(smaller, ranks * parts)
                check_batch_norm(smaller, ranks, parts)
            except RecipeError:
                continue
            resized = f" --set image_size={size}" if size != recipe.image_size else ""
            return f"Use a smaller value: --set global_batch_images={batch}{resized}"
    return "Add images, or use fewer ranks and accumulation steps"


STRIDE = 32
"""Pixels of an image, on each axis, for one value in front of the global pool: five halvings."""


def check_shares(recipe: Recipe, units: int) -> None:
    """Raise `RecipeError` if the images of a step do not divide into this many equal units."""
    if recipe.global_batch_images % units:
        raise RecipeError(
            f"global_batch_images ({recipe.global_batch_images}) must be a multiple of ranks times"
            f" accumulation steps ({units})"
        )


def check_batch_norm(recipe: Recipe, ranks: int, parts: int) -> None:
    """Raise `RecipeError` if batch norm gets a single value of each channel, which has no variance.

    A step is computed on this many ranks, each in this many accumulation parts. Statistics over all
    ranks are still those of one part.
    """
    images = recipe.global_batch_images // parts
    if recipe.batch_norm == "local":
        images //= ranks
    size = list_sizes(recipe)[0]
    if images * math.ceil(size / STRIDE) ** 2 == 1:
        raise RecipeError(
            f"one image of {size} pixels leaves a single value of each channel, which"
            " batch norm cannot normalise; expected two images or more on each rank and"
            f" accumulation part, or image_size above {STRIDE}"
        )


def training_plans(
    recipe: Recipe,
    sizes: SizeTable,
    first_step: int,
    *,
    labels: np.ndarray | None = None,
    shards: np.ndarray | None = None,
    rank: int = 0,
    ranks: int = 1,
    parts: int = 1,
) -> Iterator[BatchPlan]:
    """Yield one rank's plan for every step from `first_step` to the end of the run.

    `sizes` is [images, 2]: height and width of every image of the index. `labels` is [images]; it
    may be left out if the recipe's sampling is "plain", and `shards`, the number of every image's
    file, if its order is not "windowed". A plan has N = global_batch_images / ranks images: `parts`
    units, one after the other.
    """
    step_images = recipe.global_batch_images
    units = ranks * parts
    check_shares(recipe, units)
    per_epoch = steps_per_epoch(recipe, len(sizes))
    own_units = range(rank * parts, (rank + 1) * parts)
    positions = [unit_positions(unit, units, step_images) for unit in own_units]
    for epoch in range(first_step // per_epoch, recipe.epochs):
        order = order_samples(recipe, epoch, len(sizes), labels, shards)
        for step in range(max(first_step - epoch * per_epoch, 0), per_epoch):
            start = step * step_images
            plans = [
                _training_unit(recipe, sizes, order, epoch, start, start + rows)
                for rows in positions
            ]
            yield _join_units(plans)


def _training_unit(
    recipe: Recipe,
    sizes: SizeTable,
    order: SampleOrder,
    epoch: int,
    start: int,
    positions: np.ndarray,
) -> BatchPlan:
    samples = order[positions]
    size = find_size(recipe, epoch)
    numbers = Numbers(recipe.seed, epoch, positions)
    step_numbers = Numbers(recipe.seed, epoch, np.array([start]))
    mixing = draw_mixing(recipe, size, step_numbers, numbers)
    windows, resized, offsets = draw_crops(recipe, size, sizes[samples], numbers)
    flips = uniform(numbers(Purpose.FLIP)[:, :2])
    return BatchPlan(
        samples=samples,
        windows=windows,
        resized=resized,
        offsets=offsets,
        flips=flips[:, 0] < recipe.flip_probability,
        vertical_flips=flips[:, 1] < recipe.vertical_flip_probability,
        is_bicubic=_choose_bicubic(recipe, numbers),
        size=size,
        augmentations=_draw_augmentations(recipe, numbers),
        kept_features=keep_features(recipe, epoch, positions),
        kept_blocks=keep_blocks(recipe, epoch, positions),
        **({} if mixing is None else vars(mixing)),
    )


def _join_units(units: list[BatchPlan]) -> BatchPlan:
    if len(units) == 1:
        return units[0]
    joined: dict[str, Any] = {"size": units[0].size}
    for field in fields(BatchPlan):
        values = [getattr(unit, field.name) for unit in units]
        if isinstance(values[0], np.ndarray):
            joined[field.name] = np.concatenate(values)
    return BatchPlan(**joined)


def _choose_bicubic(recipe: Recipe, numbers: Numbers) -> np.ndarray | None:
    if recipe.training_interpolation != "random":
        return None
    return uniform(numbers(Purpose.INTERPOLATION)[:, 0]) < 0.5


def _draw_augmentations(recipe: Recipe, numbers: Numbers) -> np.ndarray | None:
    """Return what the augmentations do to each image; None without augmentations.

    An augmentation's place in the recipe selects its random numbers.
    """
    if not recipe.augmentations:
        return None
    from lockstep.recipes.plug_ins import naming

    parameters = np.empty((numbers.count, len(recipe.augmentations)), object)
    for place, augmentation in enumerate(recipe.augmentations):
        drawn = uniform(numbers.rows(Purpose.AUGMENTATION, augmentation.numbers, place))
        with naming(augmentation, "draw"):
            for image, row in enumerate(drawn.tolist()):
                parameters[image, place] = augmentation.draw(row)
    return parameters


def keep_features(recipe: Recipe, epoch: int, positions: np.ndarray) -> np.ndarray | None:
    """Return which features dropout leaves of the images at some positions of an epoch: bool [N,
    features]; None without dropout."""
    if not recipe.dropout:
        return None
    numbers = Numbers(recipe.seed, epoch, positions)
    drawn = numbers.rows(Purpose.DROPOUT, recipe.spec.features)
    return uniform(drawn) >= recipe.dropout


def keep_blocks(recipe: Recipe, epoch: int, positions: np.ndarray) -> np.ndarray | None:
    """Return which residual blocks stochastic depth leaves of the images at some positions of an
    epoch: bool [N, blocks]; None without it."""
    if not recipe.stochastic_depth:
        return None
    rates = list(drop_rates(recipe).values())
    numbers = Numbers(recipe.seed, epoch, positions)
    return uniform(numbers.rows(Purpose.STOCHASTIC_DEPTH, len(rates))) >= rates


def evaluation_plans(
    recipe: Recipe, sizes: SizeTable, batch: int, *, rank: int = 0, ranks: int = 1
) -> Iterator[BatchPlan]:
    """Yield one rank's plans for an evaluation. All ranks together have every image once.

    All ranks get the same number of plans, each with `batch` images. The last plans are padded with
    -1.
    """
    for samples in _evaluation_shares(len(sizes), batch, ranks)[rank]:
        yield centre_plan(recipe, samples, sizes[samples])


def order_evaluation_samples(images: int, batch: int, ranks: int) -> np.ndarray:
    """Return the samples in the order in which an evaluation scores them: int64 [images].

    An engine returns the scores of the first rank's plans, then the scores of the second rank's
    plans, and so on, without padding.
    """
    samples = _evaluation_shares(images, batch, ranks).reshape(-1)
    return samples[samples >= 0]


def _evaluation_shares(images: int, batch: int, ranks: int) -> np.ndarray:
    """Return the samples of the plans of every rank: int64 [ranks, plans, batch]. -1 is padding."""
    plans = -(-images // (batch * ranks))
    samples = np.arange(plans * ranks * batch).reshape(plans, ranks, batch).transpose(1, 0, 2)
    return np.where(samples < images, samples, -1)


def centre_plan(recipe: Recipe, samples: np.ndarray, sizes: np.ndarray) -> BatchPlan:
    """Return the evaluation plan of some images: resize the shorter side to `eval_resize`, then
    crop the centre.

    Sides and offsets are rounded as `eval_side_rounding` and `eval_offset_rounding` say.
    """
    resized = _resize_sides(recipe, sizes.astype(np.int64))
    offsets = _OFFSETS[recipe.eval_offset_rounding]((resized - recipe.eval_crop) / 2)
    return BatchPlan(
        samples=samples,
        windows=whole_windows(sizes),
        resized=resized.astype(np.int32),
        offsets=offsets.astype(np.int32),
        flips=np.zeros(len(samples), bool),
        size=recipe.eval_crop,
    )


_OFFSETS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "even": np.rint,
    "up": lambda halves: np.floor(halves + 0.5),
    "down": np.floor,
}
"""How `eval_offset_rounding` rounds numbers that are whole or have a half."""


def _resize_sides(recipe: Recipe, sides: np.ndarray) -> np.ndarray:
    """Return heights and widths after the resize of an evaluation: int64 [N, 2], like `sides`."""
    if recipe.eval_side_rounding == "down":
        return resize_shorter_sides(sides, recipe.eval_resize)
    shorter = sides.min(axis=1, keepdims=True)
    if recipe.eval_side_rounding == "nearest":
        return (2 * recipe.eval_resize * sides + shorter) // (2 * shorter)
    scales = np.float32(recipe.eval_resize) / shorter.astype(np.float32)
    # The shorter side may lose a pixel. If the crop needs that pixel, NVIDIA's code fails.
    return np.maximum((sides.astype(np.float32) * scales).astype(np.int64), recipe.eval_crop)


DrawNumbers = Callable[..., np.ndarray]
"""Called with a purpose, and with the number of the attempt if it is not the first one. Returns
random numbers for every image: uint64 [N, 4]."""
Crops = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Windows, sizes after the resize, and offsets, as in `BatchPlan`."""


def draw_crops(recipe: Recipe, side: int, sizes: np.ndarray, numbers: DrawNumbers) -> Crops:
    """Return the crops of training images of these heights and widths, int [N, 2], to squares with
    this side."""
    return _CROPS[recipe.crop](recipe, side, sizes.astype(np.int64), numbers)


def resize_shorter_sides(sizes: np.ndarray, size: int) -> np.ndarray:
    """Return heights and widths after a resize of the shorter side to `size`: int64 [N, 2], like
    `sizes`. The longer side is rounded down, as by torchvision."""
    return size * sizes // sizes.min(axis=1, keepdims=True)


def whole_windows(sizes: np.ndarray) -> np.ndarray:
    """Return windows of whole images of these heights and widths: int32 [N, 4]."""
    return np.concatenate([np.zeros_like(sizes), sizes], axis=1).astype(np.int32)


def _resize_random_windows(
    recipe: Recipe, side: int, sizes: np.ndarray, numbers: DrawNumbers
) -> Crops:
    return random_windows(recipe, sizes, numbers), *_fill_square(side, len(sizes))


def _squash(recipe: Recipe, side: int, sizes: np.ndarray, numbers: DrawNumbers) -> Crops:
    return whole_windows(sizes), *_fill_square(side, len(sizes))


def _fill_square(side: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    resized = np.full((count, 2), side, np.int32)
    return resized, np.zeros_like(resized)


def _cut_randomly(recipe: Recipe, side: int, sizes: np.ndarray, numbers: DrawNumbers) -> Crops:
    resized = resize_shorter_sides(sizes, side)
    places = resized + 2 * recipe.crop_padding - side + 1
    offsets = np.floor(uniform(numbers(Purpose.CROP)[:, 2:]) * places) - recipe.crop_padding
    return whole_windows(sizes), resized.astype(np.int32), offsets.astype(np.int32)


def _cut_centre(recipe: Recipe, side: int, sizes: np.ndarray, numbers: DrawNumbers) -> Crops:
    resized = resize_shorter_sides(sizes, side)
    offsets = np.rint((resized - side) / 2)
    return whole_windows(sizes), resized.astype(np.int32), offsets.astype(np.int32)


_CROPS: dict[str, Callable[[Recipe, int, np.ndarray, DrawNumbers], Crops]] = {
    "random_resized": _resize_random_windows,
    "random": _cut_randomly,
    "centre": _cut_centre,
    "squash": _squash,
}


def random_windows(recipe: Recipe, sizes: np.ndarray, numbers: DrawNumbers) -> np.ndarray:
    """Return a random crop window for every image: int32 [N, 4] (top, left, height, width).

    The share of the area is uniform in `crop_area`, the logarithm of the aspect ratio is uniform in
    `crop_aspect`, and the place is uniform where the window fits. If no window fits in
    `crop_attempts` attempts, the window is the largest centred one with an allowed aspect ratio
    (arXiv:1409.4842; torchvision, DALI).
    """
    heights = sizes[:, 0].astype(np.int64)
    widths = sizes[:, 1].astype(np.int64)
    windows = _centre_windows(recipe, heights, widths)
    waiting = np.ones(len(sizes), bool)
    smallest, largest = recipe.crop_area
    low, high = np.log(recipe.crop_aspect)
    for attempt in range(recipe.crop_attempts):
        u = uniform(numbers(Purpose.CROP, attempt))
        share = smallest + (largest - smallest) * u[:, 0]
        area = heights * widths * share
        # The last bit of exp can differ between NumPy builds. Rounded to float32, the value is the
        # same.
        aspect = np.exp(low + (high - low) * u[:, 1]).astype(np.float32).astype(np.float64)
        height = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        width = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        fits = waiting & (height > 0) & (height <= heights) & (width > 0) & (width <= widths)
        top = np.floor(u[:, 2] * (heights - height + 1)).astype(np.int64)
        left = np.floor(u[:, 3] * (widths - width + 1)).astype(np.int64)
        windows[fits] = np.stack([top, left, height, width], axis=1)[fits]
        waiting &= ~fits
        if not waiting.any():
            break
    return windows.astype(np.int32)


def _centre_windows(recipe: Recipe, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    narrowest, widest = recipe.crop_aspect
    height = np.minimum(heights, np.maximum(np.rint(widths / narrowest), 1)).astype(np.int64)
    width = np.minimum(widths, np.maximum(np.rint(heights * widest), 1)).astype(np.int64)
    return np.stack([(heights - height) // 2, (widths - width) // 2, height, width], axis=1)
