"""Images that show nothing: constant, nearly black or nearly white."""

import numpy as np

MOST_DIFFERENCE = 2
"""The levels of a constant image's colours differ by at most this; lossy formats round."""
MARGIN = 8
"""A level that is this near to 0 or 255 is nearly black or white."""
SHARE = 0.99
"""The share of levels that are nearly black or white in such an image."""


def describe_flat_pixels(pixels: np.ndarray) -> str:
    """Return "constant", "nearly black" or "nearly white" if an image, uint8 [height, width, 3], is
    that, else "". One that is constant and black is "constant"."""
    if np.ptp(pixels, axis=(0, 1)).max() <= MOST_DIFFERENCE:
        return "constant"
    if (pixels <= MARGIN).mean() >= SHARE:
        return "nearly black"
    if (pixels >= 255 - MARGIN).mean() >= SHARE:
        return "nearly white"
    return ""
