"""How sure an accuracy is: its 95 % interval."""

import math
from collections.abc import Sequence

_Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: two-sided intervals of 95 %."""


def wilson(hits: int, images: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share (Wilson 1927, doi:10.1080/01621459.1927.10502953),
    within 0 to 1.

    >>> [round(bound, 4) for bound in wilson(81, 263)]
    [0.2553, 0.3662]
    """
    if images == 0:
        return 0.0, 1.0
    share = hits / images
    shrink = 1 + _Z**2 / images
    centre = (share + _Z**2 / (2 * images)) / shrink
    half = _Z * math.sqrt(share * (1 - share) / images + (_Z / (2 * images)) ** 2) / shrink
    # At the ends the bound is the share itself, except for rounding.
    return 0.0 if hits == 0 else centre - half, 1.0 if hits == images else centre + half


MOST_WITH_INTERVAL = 5000
"""An accuracy of fewer images than this is shown with its 95 % interval, which is 1.7
points wide at 90 % of 5,000 images, and wider for fewer."""


def format_accuracy(percent: float, images: int, interval: Sequence[float] | None = None) -> str:
    """Return a top-1 accuracy as it is shown, with its 95 % interval if it is of few images.
    `interval` is another one, in percent, which is shown for any number of images.

    >>> format_accuracy(94.0909, 220)
    '94.09 % (90.2 to 96.5)'
    >>> format_accuracy(76.13, 50000)
    '76.13 %'
    """
    text = f"{percent:.2f} %"
    if interval is None:
        if images >= MOST_WITH_INTERVAL:
            return text
        interval = [100 * bound for bound in wilson(round(percent * images / 100), images)]
    low, high = interval
    return f"{text} ({low:.1f} to {high:.1f})"
