"""JPEGs of patches and noise, and windows of them."""

import numpy as np
import simplejpeg

from lockstep.data.turbojpeg import Window


def picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Patches and noise: sharp borders of colour, where upsampling shows."""
    patches = rng.integers(0, 256, (-(-height // 7), -(-width // 7), 3)).repeat(7, 0).repeat(7, 1)[:height, :width]
    return np.clip(patches + rng.integers(-20, 21, (height, width, 3)), 0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, sampling: str, quality: int = 90) -> bytes:
    if sampling == "Gray":
        return simplejpeg.encode_jpeg(pixels[:, :, :1].copy(), quality, colorspace="Gray")
    return simplejpeg.encode_jpeg(pixels, quality, colorsubsampling=sampling)


def any_window(rng: np.random.Generator, height: int, width: int) -> Window:
    rows, columns = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
    return int(rng.integers(0, height - rows + 1)), int(rng.integers(0, width - columns + 1)), rows, columns
