"""Measure the milliseconds that each augmentation takes for an image of 224 px, in one thread."""

import time
from typing import Any

import cv2
import numpy as np

from lockstep.recipes.augmentation import Augmentation
from lockstep.recipes.augmentation_list import list_augmentations, read_augmentation
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


def make_photo() -> np.ndarray:
    """Return an image that is smooth, as a photo, with some noise: uint8 [SIZE, SIZE, 3]."""
    random = np.random.default_rng(0)
    areas = random.integers(0, 256, (14, 14, 3), dtype=np.uint8)
    smooth = cv2.resize(areas, (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
    noise = random.integers(-12, 13, smooth.shape)
    return np.clip(smooth + noise, 0, 255).astype(np.uint8)


def measure(augmentation: Augmentation, photo: np.ndarray) -> float:
    """Return the milliseconds for an image, the mean of many draws, in the fastest turn."""
    rows = np.random.default_rng(1).random((IMAGES, augmentation.numbers)).tolist()
    turns = []
    for _ in range(TURNS):
        seconds = 0.0
        for row in rows:
            pixels = photo.copy()
            start = time.perf_counter()
            augmentation.apply(pixels, augmentation.draw(row))
            seconds += time.perf_counter() - start
        turns.append(1000 * seconds / IMAGES)
    return min(turns)


def main() -> None:
    make_parser(__doc__).parse_args()
    cv2.setNumThreads(1)
    photo = make_photo()
    entries: list[dict[str, Any]] = [{"name": name} for name in list_augmentations()]
    results = {}
    for entry in (*entries, *OTHERS):
        name, *fields = entry.values()
        title = " ".join(map(str, (name, *fields)))
        results[title] = round(measure(read_augmentation(entry), photo), 3)
        print(f"{results[title]:7.3f} ms  {title}", flush=True)
    what = (
        f"milliseconds for an image of {SIZE} px, its draw included; the fastest of {TURNS} turns"
    )
    record("augmentations", {"what": what, "milliseconds": results})


if __name__ == "__main__":
    main()
