"""JPEGs of patches and noise, and windows of them."""

import io
import threading
from collections.abc import Callable, Sequence

import numpy as np
import simplejpeg
from PIL import Image

from lockstep.data.decoding.decode import decode
from lockstep.data.decoding.jpeg import Window


def picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return patches and noise: sharp colour borders, at which upsampling matters."""
    patches = (
        rng.integers(0, 256, (-(-height // 7), -(-width // 7), 3))
        .repeat(7, 0)
        .repeat(7, 1)[:height, :width]
    )
    return np.clip(patches + rng.integers(-20, 21, (height, width, 3)), 0, 255).astype(np.uint8)


def encode(pixels: np.ndarray, sampling: str, quality: int = 90) -> bytes:
    if sampling == "Gray":
        return simplejpeg.encode_jpeg(pixels[:, :, :1].copy(), quality, colorspace="Gray")
    return simplejpeg.encode_jpeg(pixels, quality, colorsubsampling=sampling)


def progressive_jpeg(mode: str = "RGB", repeated: int = 0, without_data: bool = False) -> bytes:
    """Return a progressive JPEG of 24 x 16 pixels whose last scan is repeated, with or without its
    data."""
    file = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 256, (16, 24, len(mode)), np.uint8)
    Image.fromarray(values, mode).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    scan = data[last : last + 2 + data[last + 3]] if without_data else data[last:-2]
    return data[:-2] + repeated * scan + data[-2:]


def any_window(rng: np.random.Generator, height: int, width: int) -> Window:
    rows = int(rng.integers(1, height + 1))
    columns = int(rng.integers(1, width + 1))
    return (
        int(rng.integers(0, height - rows + 1)),
        int(rng.integers(0, width - columns + 1)),
        rows,
        columns,
    )


def wrong_in_threads(
    decode_window: Callable[[bytes, tuple[int, int], Window], np.ndarray | None],
    files: Sequence[bytes],
) -> list[int]:
    """Decode windows of files of 100 x 120 pixels, each file in a separate thread; return the file
    of every wrong window."""
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
