"""Measure the milliseconds of a processor that each augmentation takes for an image of 224 px, and
those of decoding, cropping and resizing one."""

import io
import time
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from PIL import Image

from lockstep.data.decoding.augment import cutting, decode_into
from lockstep.recipes import Recipe
from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.augmentation_list import list_augmentations, read_augmentation
from lockstep.recipes.order import training_plans
from measuring import make_parser, record

SIZE = 224
IMAGES = 400
TURNS = 5
OTHERS: tuple[dict[str, Any], ...] = (
    {"name": "colour_jitter", "hue": 0.1},
    {"name": "gaussian_blur", "probability": 1.0},
    {"name": "gaussian_blur", "probability": 1.0, "dialect": "torchvision"},
    {"name": "random_erasing", "probability": 1.0, "fill": "noise"},
)
"""Entries that take longer than with their defaults."""


def make_photo(height: int, width: int) -> np.ndarray:
    """Return an image that is smooth, as a photo, with some noise: uint8 [height, width, 3]."""
    random = np.random.default_rng(0)
    areas = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    smooth = cv2.resize(areas, (width, height), interpolation=cv2.INTER_CUBIC)
    noise = random.integers(-12, 13, smooth.shape)
    return np.clip(smooth + noise, 0, 255).astype(np.uint8)


def measure(work: Callable[[int], None]) -> float:
    """Return the milliseconds of the thread for an image: the mean of many in the fastest turn."""
    turns = []
    for _ in range(TURNS):
        start = time.thread_time()
        for image in range(IMAGES):
            work(image)
        turns.append(1000 * (time.thread_time() - start) / IMAGES)
    return round(min(turns), 3)


def measure_augmentation(augmentation: Augmentation) -> float:
    """Return the milliseconds of an augmentation for an image, its draw included."""
    rows = np.random.default_rng(1).random((IMAGES, augmentation.numbers)).tolist()
    photo = make_photo(SIZE, SIZE)

    def change(image: int) -> None:
        augmentation.apply(photo.copy(), augmentation.draw(rows[image]))

    return measure(change)


def measure_decoding() -> float:
    """Return the milliseconds of a random crop of a JPEG of 500 x 375 pixels."""
    file = io.BytesIO()
    Image.fromarray(make_photo(375, 500)).save(file, "JPEG", quality=90)
    sizes = np.tile([[375, 500]], (IMAGES, 1))
    plan = next(training_plans(Recipe(global_batch_images=IMAGES), sizes, 0))
    out = np.empty((SIZE, SIZE, 3), np.uint8)

    def decode(image: int) -> None:
        how = cutting(plan, image)
        decode_into(file.getvalue(), (375, 500), **how, antialias=False, out=out)

    return measure(decode)


def main() -> None:
    make_parser(__doc__).parse_args()
    cv2.setNumThreads(1)
    entries: list[dict[str, Any]] = [{"name": name} for name in list_augmentations()]
    results = {"decode, crop and resize": measure_decoding()}
    for entry in (*entries, *OTHERS):
        fields = [f"{name}={value}" for name, value in entry.items() if name != "name"]
        title = " ".join([entry["name"], *fields])
        results[title] = measure_augmentation(read_augmentation(entry))
        print(f"{results[title]:7.3f} ms  {title}", flush=True)
    what = f"milliseconds of a thread for an image of {SIZE} px; the fastest of {TURNS} turns"
    record("augmentations", {"what": what, "milliseconds": results})


if __name__ == "__main__":
    main()
