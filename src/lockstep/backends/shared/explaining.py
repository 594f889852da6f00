"""Which stage's output explains a prediction (Grad-CAM)."""

from lockstep.system.errors import BackendError

LEAST_PLACES = 4
"""A map of fewer places a side only says which half of the image speaks for a class."""
_STAGES = 4


def choose_stage(side: int) -> int:
    """Return the last stage, 1 to 4, whose output has at least `LEAST_PLACES` a side, for images
    whose shorter side has this many pixels.

    Raises `BackendError` if the images are too small for all of them.

    >>> choose_stage(224), choose_stage(64), choose_stage(32)
    (4, 3, 2)
    """
    for stage in range(_STAGES, 0, -1):
        places = -(-side // 2 ** (stage + 1))  # the stem halves an image twice, each stage once
        if places >= LEAST_PLACES:
            return stage
    least = 4 * (LEAST_PLACES - 1) + 1
    raise BackendError(
        f"Grad-CAM needs images of at least {least} pixels a side, not {side}: the features of"
        f" smaller ones have fewer than {LEAST_PLACES} x {LEAST_PLACES} places. Evaluate larger"
        " ones: --set eval_crop=64"
    )
