"""Pictures that cost a decoder about what ImageNet's do: 500 x 375 pixels, about 110 KB, with
detail of every size."""

from pathlib import Path

import cv2
import numpy as np
import simplejpeg

from benchmarks.gpu.steps import Rows, print_rows

OCTAVES = ((3, 60.0), (8, 40.0), (24, 25.0), (70, 16.0), (200, 10.0))
"""Cells across the picture, and the deviation of their brightness: the spectrum of photos falls
with frequency."""


def measure(folder: str, count: int = 512, height: int = 375, width: int = 500) -> Rows:
    """Draw pictures into folders by class, if the folder does not exist; yield their mean number of
    bytes. The same count gives the same files."""
    if Path(folder).exists():  # these are photos
        return
    random = np.random.default_rng(0)
    sizes = []
    for number in range(count):
        picture = _draw(random, height, width)
        data = simplejpeg.encode_jpeg(picture, 95, colorspace="RGB", colorsubsampling="420")
        file = Path(folder) / f"train/class{number % 10}/{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        sizes.append(len(data))
    yield {"what": "pictures", "mean_bytes": sum(sizes) / count}


def _draw(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    pixels = np.full((height, width, 3), random.uniform(60, 180, 3), np.float32)
    for cells, deviation in OCTAVES:
        shape = (max(cells * height // width, 1), cells, 3)
        coarse = random.normal(0, deviation, shape).astype(np.float32)
        mixed = 0.98 * coarse.mean(axis=2, keepdims=True) + 0.3 * coarse
        pixels += cv2.resize(mixed, (width, height), interpolation=cv2.INTER_CUBIC)
    pixels += random.normal(0, 8, pixels.shape).astype(np.float32)
    return np.clip(pixels, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    print_rows(measure)
