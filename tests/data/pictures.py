"""JPEGs of patches and noise, and windows of them."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import simplejpeg

from lockstep.data.decoding.decode import decode
from lockstep.data.decoding.jpeg import Window


def picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return patches and noise: sharp colour borders, at which upsampling matters."""
    patches = rng.integers(0, 256, (-(-height // 7), -(-width // 7), 3)).repeat(7, 0).repeat(7, 1)[:height, :width]
    return np.clip(patches + rng.integers(-20, 21, (height, width, 3)), 0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray, sampling: str, quality: int = 90) -> bytes:
    if sampling == "Gray":
        return simplejpeg.encode_jpeg(pixels[:, :, :1].copy(), quality, colorspace="Gray")
    return simplejpeg.encode_jpeg(pixels, quality, colorsubsampling=sampling)


def any_window(rng: np.random.Generator, height: int, width: int) -> Window:
    rows, columns = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
    return int(rng.integers(0, height - rows + 1)), int(rng.integers(0, width - columns + 1)), rows, columns


def wrong_in_threads(
    decode_window: Callable[[bytes, tuple[int, int], Window], np.ndarray | None], files: Sequence[bytes]
) -> list[int]:
    """Decode windows of files of 100 x 120 pixels, each file in a separate thread; return the file of every wrong window."""
    wrong: list[int] = []

    def work(number: int) -> None:
        whole = decode(files[number])
        for top in range(60):
            part = decode_window(files[number], (100, 120), (top, top, 40, 50))
            if part is None or not np.array_equal(part, whole[top : top + 40, top : top + 50]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(files))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
