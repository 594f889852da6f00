"""Training photos that look like a validation photo: re-encoded, resized or slightly cropped.

An image is hashed by pHash (Zauner 2010, phash.org/docs/pubs/thesis_zauner.pdf): which of 64 low
frequencies of its 32 x 32 grey means are above their median. There is a hash of the whole image and
of two middle parts, so that a crop of up to a tenth has a counterpart. Two images are candidates if
few bits of two hashes differ, and alike if their grey means correlate, shifted by up to two pixels.
"""

from collections.abc import Iterator

import numpy as np
from PIL import Image

MOST_IMAGES = 2**21
"""More images than this in both splits are not compared: it would take hours, and different photos
would have the same hashes."""
HASHES = 3
"""The number of hashes of an image, uint64. All are 0 if it shows too little to be hashed."""
_SIDE = 32
_MARGINS = (0.0, 0.025, 0.05)
"""What each hash leaves out on every side, as a share of the side."""
_PAIRS = ((0, 0), (0, 1), (1, 0), (0, 2), (2, 0))
"""Which hashes of two images are compared."""
_MOST_BITS = 10
"""Hashes of re-encoded photos differ in at most 6 bits, those of different photos in 14 or more (of
19,900 pairs of ImageNet's; 32 on average)."""
_LEAST_AMPLITUDE = 0.25
"""The median amplitude of the frequencies, in levels, below which their signs are noise: photos
have more than 0.4, images without details 0."""
_LEAST_CORRELATION = 0.88
_MOST_SHIFT = 2
_MOST_IN_BUCKET = 256
"""At most this many images with 16 equal bits are candidates for an image."""
_MOST_CHECKED = 3
"""At most this many validation images are compared with a training image, the nearest first."""
_MOST_PAIRS = 2**20
"""About this many pairs of near hashes are kept; data sets of drawings can have many more."""
_BITS = np.array([i.bit_count() for i in range(2**16)], np.uint8)
_WAVES = np.cos(np.pi / _SIDE * np.outer(np.arange(1, 9), np.arange(_SIDE) + 0.5))


def hash_image(pixels: np.ndarray) -> np.ndarray:
    """Return the hashes of an image, uint8 RGB [height, width, 3]: uint64 [`HASHES`]."""
    hashes = np.zeros(HASHES, np.uint64)
    for i, means in enumerate(_average(pixels)):
        amplitudes = (_WAVES @ means @ _WAVES.T / _SIDE**2 * 4).ravel()
        amplitudes -= np.median(amplitudes)
        if np.median(np.abs(amplitudes)) >= _LEAST_AMPLITUDE:
            hashes[i] = np.packbits(amplitudes > 0).view(np.uint64)[0]
    return hashes


def _average(pixels: np.ndarray) -> np.ndarray:
    """Return the grey means of an image and of its middle parts: float64 [`HASHES`, 32, 32]."""
    image = Image.fromarray(pixels).convert("L").convert("F")
    means = []
    for margin in _MARGINS:
        left = margin * image.width
        top = margin * image.height
        box = (left, top, image.width - left, image.height - top)
        means.append(np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX, box)))
    return np.array(means, np.float64)


def find_candidates(training: np.ndarray, validation: np.ndarray) -> dict[int, list[int]]:
    """Return the validation images that each training image may be like, the nearest first.

    Both arrays are hashes, uint64 [images, `HASHES`]. Of the four quarters of two hashes, one must
    differ in at most a bit. This is so if the hashes differ in at most 7.
    """
    keys: list[int] = []
    for some in _find_near(training, validation):
        keys += some.tolist()
        if len(keys) > _MOST_PAIRS:
            break
    candidates: dict[int, list[int]] = {}
    for key in sorted(keys):
        nearest = candidates.setdefault(key >> 40, [])
        if len(nearest) < _MOST_CHECKED and key % 2**32 not in nearest:
            nearest.append(key % 2**32)
    return candidates


def _find_near(training: np.ndarray, validation: np.ndarray) -> Iterator[np.ndarray]:
    """Yield pairs of images with hashes of which few bits differ: int64, of the training image, the
    number of bits and, in 32 bits, the validation image."""
    for mine, others in _PAIRS:
        rows = np.flatnonzero(training[:, mine])
        columns = np.flatnonzero(validation[:, others])
        first = training[rows, mine]
        second = validation[columns, others]
        for i, j in _find_buckets(first.view(np.uint16), second.view(np.uint16)):
            bits = _BITS[(first[i] ^ second[j]).view(np.uint16).reshape(-1, 4)].sum(axis=1)
            near = np.flatnonzero(bits <= _MOST_BITS)
            place = bits[near].astype(np.int64) << 32 | columns[j[near]]
            yield rows[i[near]] << 40 | place


def _find_buckets(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the numbers of pairs of hashes of which a quarter differs in at most a bit. Both arrays
    are quarters, uint16 [4 * images]."""
    for quarter in range(4):
        keys = first[quarter::4]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        for flipped in (0, *(1 << bit for bit in range(16))):
            wanted = second[quarter::4] ^ np.uint16(flipped)
            begins = np.searchsorted(keys, wanted, "left")
            counts = np.searchsorted(keys, wanted, "right") - begins
            counts = np.minimum(counts, _MOST_IN_BUCKET)
            ends = np.cumsum(counts)
            j = np.repeat(np.arange(len(wanted)), counts)
            within = np.arange(len(j)) - np.repeat(ends - counts, counts)
            yield order[begins[j] + within], j


def are_alike(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether two images, uint8 RGB [height, width, 3], are the same photo."""
    ours = _average(first)
    theirs = _average(second)
    size = _SIDE - 2 * _MOST_SHIFT
    for a, b in _PAIRS:
        middle = ours[a, _MOST_SHIFT:-_MOST_SHIFT, _MOST_SHIFT:-_MOST_SHIFT]
        windows = np.lib.stride_tricks.sliding_window_view(theirs[b], (size, size))
        rows = np.vstack([middle.reshape(1, -1), windows.reshape(-1, size * size)])
        if np.corrcoef(rows)[0, 1:].max() >= _LEAST_CORRELATION:
            return True
    return False
