"""Pictures that cost a decoder about what ImageNet's do: 500 x 375 pixels, about 110 KB."""

from pathlib import Path

import cv2
import numpy as np
import simplejpeg

from benchmarks.gpu.rows import Rows, print_rows


def measure(folder: str, count: int = 512, height: int = 375, width: int = 500) -> Rows:
    """Draw pictures into folders by class, if the folder does not exist; yield their mean number of
    bytes. The same count gives the same files."""
    if Path(folder).exists():  # these are photos
        return
    random = np.random.default_rng(0)
    sizes = []
    for number in range(count):
        areas = random.normal(110, 60, (height // 24, width // 24, 3)).astype(np.float32)
        details = random.normal(0, 18, (height // 2, width // 2, 1)).astype(np.float32)
        pixels = cv2.resize(areas, (width, height), interpolation=cv2.INTER_CUBIC)
        pixels += cv2.resize(details, (width, height))[..., None]
        pixels += random.normal(0, 8, pixels.shape)
        picture = np.clip(pixels, 0, 255).astype(np.uint8)
        data = simplejpeg.encode_jpeg(picture, 95, colorspace="RGB", colorsubsampling="420")
        file = Path(folder) / f"train/class{number % 10}/{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        sizes.append(len(data))
    yield {"what": "pictures", "mean_bytes": sum(sizes) / count}


if __name__ == "__main__":
    print_rows(measure)
