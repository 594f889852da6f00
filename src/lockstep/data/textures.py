"""A small synthetic data set for the demo and the tests: ten kinds of texture as JPEGs in an image
folder.

Every image is a function of (seed, split, number): a pattern with random angle, period, phase, two
colours, shading and noise, 96 pixels on its shorter side and up to 144 on the other.
"""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import simplejpeg

from lockstep.recipes.philox import Purpose, draw, uniform
from lockstep.system.errors import as_path
from lockstep.system.files import write_bytes
from lockstep.system.machine import cores

Plane = np.ndarray
Pattern = Callable[[Plane, Plane, np.ndarray], Plane]
SHORTER_PIXELS = 96


def _bricks(x: Plane, y: Plane, chance: np.ndarray) -> Plane:
    row = np.floor(y / np.pi)
    mortar = (np.abs(np.sin(y)) < 0.35) | (np.abs(np.sin(x / 3 + row * np.pi / 2)) < 0.12)
    return np.where(mortar, 1.0, -1.0)


def _blobs(x: Plane, y: Plane, chance: np.ndarray) -> Plane:
    angles = 2 * np.pi * chance[:6]
    waves = (
        np.sin(0.8 * (x * np.cos(a) + y * np.sin(a)) + 9 * b)
        for a, b in zip(angles, chance[6:], strict=True)
    )
    return np.tanh(2 * sum(waves, start=np.zeros_like(x)))


PATTERNS: dict[str, Pattern] = {
    "blobs": _blobs,
    "bricks": _bricks,
    "checks": lambda x, y, _: np.sign(np.sin(x) * np.sin(y)),
    "dots": lambda x, y, _: np.where(np.cos(x) + np.cos(y) > 0.9, 1.0, -1.0),
    "grid": lambda x, y, _: np.where(np.maximum(np.cos(x), np.cos(y)) > 0.85, 1.0, -1.0),
    "rays": lambda x, y, chance: np.sign(np.sin(np.arctan2(y, x) * (6 + np.floor(6 * chance[0])))),
    "rings": lambda x, y, _: np.sin(np.hypot(x, y)),
    "spiral": lambda x, y, chance: np.sin(
        np.hypot(x, y) + np.arctan2(y, x) * (4 + np.floor(4 * chance[0]))
    ),
    "stripes": lambda x, y, _: np.sin(x),
    "zigzag": lambda x, y, _: np.sign(np.sin(x + 2 * np.arcsin(np.sin(y)))),
}
"""Each returns values from -1 to 1 of two coordinates, and of random numbers from 0 to 1."""


def draw_texture(kind: str, number: int, seed: int = 0) -> np.ndarray:
    """Return an image of a kind: uint8 RGB [height, width, 3]. Different numbers give different
    images."""
    stream = sorted(PATTERNS).index(kind)
    chance = uniform(draw(seed, Purpose.TEXTURE, 0, 8, epoch=number, attempt=stream)).reshape(-1)
    longer = SHORTER_PIXELS + int(chance[0] * 49)
    height, width = (SHORTER_PIXELS, longer) if chance[1] < 0.5 else (longer, SHORTER_PIXELS)
    rows, columns = np.mgrid[:height, :width] - np.array([height, width]).reshape(2, 1, 1) * (
        0.3 + 0.4 * chance[2]
    )
    angle = 2 * np.pi * chance[3]
    period = 10 + 14 * chance[4]
    x = (columns * np.cos(angle) + rows * np.sin(angle)) * (2 * np.pi / period)
    y = (rows * np.cos(angle) - columns * np.sin(angle)) * (2 * np.pi / period)
    centred = kind in ("rings", "rays", "spiral")
    shift = 0.0 if centred else 2 * np.pi * chance[5]
    share = (1 + PATTERNS[kind](x + shift, y + shift, chance[16:28])) / 2
    dark = 90 * chance[6:9]
    bright = 140 + 115 * chance[9:12]
    if chance[12] < 0.5:
        dark, bright = bright, dark
    shade = 1 - 0.4 * chance[13] * columns / width
    noise = uniform(
        draw(seed, Purpose.TEXTURE, 8, -(-height * width * 3 // 4), epoch=number, attempt=stream)
    )
    noise = (noise.reshape(-1)[: height * width * 3].reshape(height, width, 3) - 0.5) * (
        10 + 40 * chance[14]
    )
    pixels = (dark + (bright - dark) * share[..., None]) * shade[..., None] + noise
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def draw_data_set(
    folder: str | Path,
    *,
    train_images: int = 2000,
    val_images: int = 400,
    seed: int = 0,
    kinds: Collection[str] = tuple(PATTERNS),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Draw textures as a data set: `FOLDER/train/KIND/NUMBER.jpg` and `FOLDER/val/KIND/NUMBER.jpg`.

    Existing files are not overwritten. No image is in both splits.

    Args:
        folder: The folder to write.
        train_images: The number of training images, divided equally among the kinds.
        val_images: The number of validation images, divided in the same way.
        seed: The same seed draws the same images.
        kinds: The kinds to draw, which become the classes; by default all ten.
        progress: A function to call with the numbers of images drawn and to draw.

    >>> import lockstep
    >>> lockstep.draw_data_set("textures", train_images=20, val_images=10)
    """
    jobs = list(_jobs(as_path(folder, "target"), kinds, train_images, val_images))
    with ThreadPoolExecutor(cores()) as pool:
        for done, _ in enumerate(pool.map(lambda job: _write(seed, *job), jobs), start=1):
            if progress is not None:
                progress(done, len(jobs))


def _jobs(
    root: Path, kinds: Collection[str], train_images: int, val_images: int
) -> Iterator[tuple[Path, str, int]]:
    train = train_images // len(kinds)
    val = val_images // len(kinds)
    for split, first, count in (("train", 0, train), ("val", train, val)):
        for kind in kinds:
            folder = root / split / kind
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(first, first + count):
                path = folder / f"{number:05d}.jpg"
                if not path.exists():
                    yield path, kind, number


def _write(seed: int, path: Path, kind: str, number: int) -> None:
    encoded = simplejpeg.encode_jpeg(draw_texture(kind, number, seed), quality=90, colorspace="RGB")
    write_bytes(path, encoded, is_flushed=False)
