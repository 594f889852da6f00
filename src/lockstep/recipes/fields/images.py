"""Which training images an epoch has, with which crops and flips, and how pixels are resized and
normalised."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.recipes import limits
from lockstep.recipes.augmentation_list import Augmentations
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import Colour, Deviation, Fraction, Positive

Side = Annotated[int, Field(ge=32), limits.SIDE]
"""Height or width of images in pixels."""


class ImageFields(Settings):
    """Which training images an epoch has, with which crops and flips, and how pixels are resized
    and normalised."""

    class_order: Literal["index", "number", "text"] = "index"
    """The order of class folders that are all numbers, and so their labels. "index": the order in
    the index of the images: "number" in a new one, "text" in one that an earlier version made.
    "number": 0, 1, 2, 10; equal numbers such as 01 and 1 in the order of their names. "text": 0, 1,
    10, 2, as torchvision and Keras sort. A resumed run keeps its own order."""
    order: Literal["shuffled", "permuted", "windowed"] = "shuffled"
    """The order of the images, different in every epoch. "shuffled": random. "permuted": random,
    computed position by position without an array of all positions. Use it for very many images.
    `sampling` and `repeated_augmentation` still build that array. "windowed": for shards in an
    object store.
    Shards come in random order, and the images of `window_shards` shards are shuffled among
    themselves, so that each shard is read once, nearly from front to back. Every order is a
    function of (seed, epoch, position): every image comes once, on any number of ranks, and a
    resumed run keeps the order."""
    window_shards: Annotated[int, Field(ge=1), limits.SHARDS] = 16
    """Number of shards whose images are mixed if `order` is "windowed"."""
    sampling: Literal["plain", "balanced", "square_root"] = "plain"
    """How often an epoch has the images of each class. "plain": every image comes once. "balanced":
    every class comes equally often. "square_root": a class comes in proportion to the square root
    of its number of images (arXiv:1805.00932). An epoch has as many images as the data set. Images
    of a rare class come several times in it, some once more than others. Of a frequent class, some
    images are left out, different ones in each epoch."""
    repeated_augmentation: Annotated[int, Field(ge=1, le=100)] = 1
    """Number of copies of an image in a step, each with a different crop, flip and so on
    (arXiv:1901.09335). An epoch is as long as without it: with 3, it has three copies of a third of
    the images, of different ones in each epoch. Most copies of an image go to different ranks.
    1: every image comes once."""
    image_size: Side = 224
    """Height and width of a training image in pixels. If it is set and neither `eval_resize` nor
    `eval_crop` is, evaluation follows it: `eval_crop` is this size and `eval_resize` is 256/224 of
    it."""
    image_sizes: tuple[tuple[Annotated[int, Field(ge=0), limits.EPOCHS], Side], ...] = ()
    """Sizes of training images that change by epoch: pairs of an epoch, counted from 0, and the
    size from this epoch on. [[0, 160], [71, 192]]: 160 px in the first 71 epochs, then 192 px.
    `image_size` is the last size unless you set it. If you set only `image_size`, all epochs have
    it. Empty: `image_size` in all epochs."""
    crop: Literal["random_resized", "random", "centre", "squash"] = "random_resized"
    """How a square is cut from a training image. "random_resized": a window of random area, aspect
    ratio and place is resized to it. "random": the shorter side is resized to `image_size`,
    `crop_padding` pixels are added on every side, and a square is cut at a random place (the simple
    random crop of arXiv:2204.07118). "centre": the same without padding, at the centre. "squash":
    the whole image is resized to the square, which changes its aspect ratio."""
    crop_padding: Annotated[int, Field(ge=0)] = 4
    """Number of pixels that are added on every side before a "random" `crop`, and less than
    `image_size`. The image is reflected there; its outermost pixels are not repeated."""
    crop_area: tuple[Positive, Positive] = (0.08, 1.0)
    """Range of the random crop's area, as a share of the image's area."""
    crop_aspect: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Range of the random crop's aspect ratio, width over height. The logarithm of the ratio is
    drawn uniformly."""
    crop_attempts: Annotated[int, Field(ge=1), limits.ATTEMPTS] = 100
    """Number of times that area and aspect ratio are drawn until a crop fits into the image. If
    none fits, the largest centred crop is used."""
    flip_probability: Fraction = 0.5
    """Probability that a training image is mirrored left to right."""
    vertical_flip_probability: Fraction = 0.0
    """Probability that a training image is mirrored upside down. Both flips are drawn
    independently."""
    augmentations: Augmentations = ()
    """What is done to the pixels of a training image after crop, resize and flip, in this order. An
    entry is a name, or a mapping of its name and fields, such as {name: solarise, probability:
    0.2}. `mymodule:Fog` is a class that you wrote. docs/reference/augmentations.md lists
    them."""
    mean: Colour = (123.675, 116.28, 103.53)
    """Mean of red, green and blue on the scale 0 to 255. Images are normalised as (x - mean) / std.
    """
    std: Deviation = (58.395, 57.12, 57.375)
    """Standard deviation of red, green and blue on the scale 0 to 255. Images are normalised as (x
    - mean) / std."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation of the resize, in training and in evaluation. With `antialias` it is Pillow's
    filter of this name, else OpenCV's: "bilinear" weighs 4 pixels and "bicubic" 16, with a = -0.75
    in the cubic (Pillow: a = -0.5)."""
    training_interpolation: Literal["same", "bilinear", "bicubic", "random"] = "same"
    """Interpolation of the resize in training. "same": `interpolation`. "random": "bilinear" or
    "bicubic", drawn for every image with equal probability, as timm does."""
    antialias: bool = False
    """Whether the resize filters when it shrinks an image, as Pillow does. If false, it samples 4
    or 16 pixels, as OpenCV does (see `interpolation`). If it is set and `eval_antialias` is not,
    evaluation follows it."""
    dct_scaling: bool = False
    """Whether a JPEG whose crop is at least twice as large as the output is decoded at 1/2, 1/4 or
    1/8 of its size, as libjpeg can. This is faster for large photos and filters while it shrinks.
    It changes the pixels that training and evaluation see."""
    exif_orientation: bool = False
    """Whether a photo is turned or mirrored as its EXIF orientation says, in training and in
    evaluation. If false, it is used as it is stored."""

    @property
    def varies_images(self) -> bool:
        """Whether a training image looks different in different epochs, apart from mixtures."""
        crops_randomly = self.crop == "random_resized" and self.crop_area != (1.0, 1.0)
        crops_randomly |= self.crop == "random"
        flips = self.flip_probability > 0 or self.vertical_flip_probability > 0
        is_drawn = self.training_interpolation == "random" or len(self.augmentations) > 0
        return crops_randomly or flips or is_drawn

    @model_validator(mode="after")
    def _check_images_fields(self) -> Self:
        if self.crop_area[0] > self.crop_area[1] or self.crop_area[1] > 1:
            raise ValueError(
                f"crop_area must be a rising range within 0 to 1, not {list(self.crop_area)}"
            )
        epochs = [epoch for epoch, _ in self.image_sizes]
        if epochs != sorted(set(epochs)) or epochs[:1] not in ([], [0]):
            raise ValueError(
                f"image_sizes must begin with epoch 0, and epochs must rise, not {epochs}"
            )
        if self.image_sizes and self.image_sizes[-1][1] != self.image_size:
            raise ValueError(
                f"image_sizes ends with {self.image_sizes[-1][1]}, but image_size is"
                f" {self.image_size}; set only one of them"
            )
        if self.crop_aspect[0] > self.crop_aspect[1]:
            raise ValueError(f"crop_aspect must be a rising range, not {list(self.crop_aspect)}")
        smallest = min(size for _, size in [*self.image_sizes, (0, self.image_size)])
        if self.crop_padding >= smallest:
            raise ValueError(
                f"crop_padding must be less than image_size ({smallest}), not"
                f" {self.crop_padding}: the image is reflected once"
            )
        return self
