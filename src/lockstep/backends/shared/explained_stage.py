"""Which stage's output explains a prediction (Grad-CAM)."""

LEAST_PLACES = 4
"""A map with fewer places a side only shows which half of the image supports a class."""
_STAGES = 4


def choose_stage(side: int) -> int:
    """Return the last stage, 1 to 4, whose output has at least `LEAST_PLACES` a side, for images
    whose shorter side has this many pixels: at least 32, as recipes require.

    >>> choose_stage(224), choose_stage(64), choose_stage(32)
    (4, 3, 2)
    """
    stage = _STAGES
    # The stem halves an image twice, and each stage after the first once.
    while stage > 1 and side <= 2 ** (stage + 1) * (LEAST_PLACES - 1):
        stage -= 1
    return stage
