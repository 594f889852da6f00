"""AutoAugment with the policy for ImageNet (arXiv:1805.09501), as torchvision and as timm do it."""

from typing import Any, Literal

from pydantic import model_validator

from lockstep.recipes.fields.kinds import Strength
from lockstep.recipes.operations import (
    LARGEST,
    Fill,
    Interpolations,
    Operation,
    Operations,
    draw_normal,
    number_of_timm,
    number_of_torchvision,
)

_TIMM = {"interpolation": "random", "fill": (124, 116, 104)}
"""Values of fields for timm's policies where they are not set. The fill is ImageNet's mean."""
_LAST = 9
"""The largest of torchvision's magnitudes."""
_FULL = 10
"""timm's magnitude at which an operation has its full strength."""

_Step = tuple[str, float, int]
"""An operator, its probability and its magnitude."""


def _read_policy(text: str) -> tuple[tuple[_Step, _Step], ...]:
    """Return the pairs of a policy: two operators in a line, each with probability and
    magnitude."""
    pairs = []
    for line in text.strip().splitlines():
        first, p, m, second, q, n = line.split()
        pairs.append(((first, float(p), int(m)), (second, float(q), int(n))))
    return tuple(pairs)


_IMAGENET = _read_policy("""
    posterise 0.4 8  rotate 0.6 9
    solarise 0.6 5  autocontrast 0.6 5
    equalise 0.8 8  equalise 0.6 3
    posterise 0.6 7  posterise 0.6 6
    equalise 0.4 7  solarise 0.2 4
    equalise 0.4 4  rotate 0.8 8
    solarise 0.6 3  equalise 0.6 7
    posterise 0.8 5  equalise 1.0 2
    rotate 0.2 3  solarise 0.6 8
    equalise 0.6 8  posterise 0.4 6
    rotate 0.8 8  colour 0.4 0
    rotate 0.4 9  equalise 0.6 2
    equalise 0.0 7  equalise 0.8 8
    invert 0.6 4  equalise 1.0 8
    colour 0.6 4  contrast 1.0 8
    rotate 0.8 8  colour 1.0 2
    colour 0.8 8  solarise 0.8 7
    sharpness 0.4 7  invert 0.6 8
    shear_x 0.6 5  equalise 1.0 9
    colour 0.4 0  equalise 0.6 3
    equalise 0.4 7  solarise 0.2 4
    solarise 0.6 5  autocontrast 0.6 5
    invert 0.6 4  equalise 1.0 8
    colour 0.6 4  contrast 1.0 8
    equalise 0.8 8  equalise 0.6 3
""")
"""The policy of the paper's appendix."""
_V0 = _read_policy("""
    equalise 0.8 1  shear_y 0.8 4
    colour 0.4 9  equalise 0.6 3
    colour 0.4 1  rotate 0.6 8
    solarise 0.8 3  equalise 0.4 7
    solarise 0.4 2  solarise 0.6 2
    colour 0.2 0  equalise 0.8 8
    equalise 0.4 8  solarise_add 0.8 3
    shear_x 0.2 9  rotate 0.6 8
    colour 0.6 1  equalise 1.0 2
    invert 0.4 9  rotate 0.6 0
    equalise 1.0 9  shear_y 0.6 3
    colour 0.4 7  equalise 0.6 0
    posterise 0.4 6  autocontrast 0.4 7
    solarise 0.6 8  colour 0.6 9
    solarise 0.2 4  rotate 0.8 9
    rotate 1.0 7  translate_y 0.8 9
    shear_x 0.0 0  solarise 0.8 4
    shear_y 0.8 0  colour 0.6 4
    colour 1.0 0  rotate 0.6 2
    equalise 0.8 4  equalise 0.0 8
    equalise 1.0 4  autocontrast 0.6 2
    shear_y 0.4 7  solarise_add 0.6 7
    posterise 0.8 2  solarise 0.6 10
    solarise 0.6 8  equalise 0.6 1
    colour 0.8 6  rotate 0.4 5
""")
"""The policy of TensorFlow's EfficientNet for TPUs."""


class AutoAugment(Operations):
    """Apply one of 25 pairs of operations, drawn for each image, each with its probability and
    magnitude."""

    policy: Literal["torchvision", "original", "originalr", "v0", "v0r"] = "torchvision"
    """The pairs, and whose magnitudes they use. "torchvision" is its policy for ImageNet. The
    others are timm's: "original" has the same pairs, "v0" those of TensorFlow's EfficientNet.
    With "r", posterising changes more at a larger magnitude."""
    magnitude_std: Strength = 0.0
    """timm's `mstd`: standard deviation of the magnitudes, cut off at 0 and 10. torchvision: 0."""
    interpolation: Interpolations = "nearest"
    """Interpolation of changes of geometry. "random" is "bilinear" or "bicubic", drawn for each
    operation: the default of timm's policies."""
    fill: Fill = (0, 0, 0)
    """Red, green and blue of pixels that come from outside the image. timm: 124, 116, 104."""

    @model_validator(mode="before")
    @classmethod
    def _follow_policy(cls, fields: dict[str, Any]) -> dict[str, Any]:
        is_timm = fields.get("policy", "torchvision") != "torchvision"
        return _TIMM | fields if is_timm else fields

    @model_validator(mode="after")
    def _check_policy(self) -> "AutoAugment":
        if self.policy == "torchvision" and self.magnitude_std:
            raise ValueError('magnitude_std is timm\'s; expected one of its policies, "original"')
        return self

    @property
    def numbers(self) -> int:
        """Return 9: which pair, and of each operation: whether, magnitude, sign, interpolation."""
        return 9

    def draw(self, numbers: list[float]) -> tuple[Operation, ...]:
        """Return the operations of an image: none, one or two."""
        policy = _V0 if self.policy.startswith("v0") else _IMAGENET
        pair = policy[int(numbers[0] * len(policy))]
        drawn = []
        for place, (operator, probability, magnitude) in enumerate(pair):
            whether, noise, sign, interpolation = numbers[1 + 4 * place : 5 + 4 * place]
            if whether < probability:
                number = self._make_number(operator, magnitude, noise, negative=sign < 0.5)
                how = self.choose_interpolation(interpolation)
                drawn.append(Operation(operator, number, how))
        return tuple(drawn)

    def _make_number(
        self, operator: str, magnitude: float, noise: float, *, negative: bool
    ) -> float:
        if self.policy == "torchvision":
            largest = LARGEST.get(operator, 0)  # no magnitude inverts
            return number_of_torchvision(
                operator, largest, int(magnitude), _LAST, negative=negative
            )
        if self.magnitude_std:
            magnitude = draw_normal(noise, magnitude, self.magnitude_std)
        share = max(0.0, min(magnitude, _FULL)) / _FULL
        if operator == "posterise" and self.policy == "original":
            return int(share * 4) + 4
        # Of the increasing numbers, timm's policies have only those of posterising.
        increasing = operator == "posterise" and self.policy.endswith("r")
        return number_of_timm(operator, share, negative=negative, increasing=increasing)
