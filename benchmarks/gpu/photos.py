"""Pictures that cost a decoder about what ImageNet's do: 500 x 375 pixels, about 110 KB, with
detail of every size."""

from pathlib import Path

import cv2
import numpy as np
import simplejpeg

CLASSES = 10
HEIGHT = 375
WIDTH = 500
QUALITY = 95
OCTAVES = ((3, 60.0), (8, 40.0), (24, 25.0), (70, 16.0), (200, 10.0))
"""Cells across the picture, and the deviation of their brightness: the spectrum of photos falls
with frequency."""


def picture(random: np.random.Generator, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Return a picture: uint8 RGB [height, width, 3]."""
    pixels = np.full((height, width, 3), random.uniform(60, 180, 3), np.float32)
    for cells, deviation in OCTAVES:
        coarse = random.normal(0, deviation, (max(cells * height // width, 1), cells, 3)).astype(
            np.float32
        )
        grey = coarse.mean(axis=2, keepdims=True) * 1.4
        pixels += cv2.resize(
            0.7 * grey + 0.3 * coarse, (width, height), interpolation=cv2.INTER_CUBIC
        )
    pixels += random.normal(0, 8, pixels.shape).astype(np.float32)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def draw_photos(root: Path, count: int, height: int = HEIGHT, width: int = WIDTH) -> int:
    """Write `count` JPEGs in folders by class; return their mean number of bytes. The same count
    gives the same files."""
    random = np.random.default_rng(0)
    total = 0
    for number in range(count):
        folder = root / f"class{number % CLASSES}"
        folder.mkdir(parents=True, exist_ok=True)
        data = simplejpeg.encode_jpeg(
            picture(random, height, width), QUALITY, colorspace="RGB", colorsubsampling="420"
        )
        (folder / f"{number:04d}.jpg").write_bytes(data)
        total += len(data)
    return total // count
