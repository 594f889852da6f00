"""How images of an evaluation are resized and cropped."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.recipes import limits
from lockstep.recipes.field_validation import Settings


class EvaluationFields(Settings):
    """How images of an evaluation are resized and cropped."""

    eval_resize: Annotated[int, Field(ge=32), limits.SIDE] = 256
    """Evaluation: the shorter side of an image is resized to this many pixels, the other in
    proportion (rounded as in `eval_side_rounding`)."""
    eval_crop: Annotated[int, Field(ge=32), limits.SIDE] = 224
    """Evaluation: after the resize, a centred square of this many pixels a side is cut out."""
    eval_antialias: bool = False
    """Evaluation: whether the resize filters, as `antialias` does in training."""
    eval_side_rounding: Literal["down", "nearest", "float32_down"] = "down"
    """Evaluation: how the sides are rounded after the resize. "down": as torchvision. "nearest": to
    the nearest number, halves up, as DALI. "float32_down": down, computed in float32 as NVIDIA's
    TensorFlow code; a side of 376 pixels then becomes 255 instead of 256."""
    eval_offset_rounding: Literal["even", "up", "down"] = "even"
    """Evaluation: how half a pixel in the place of the crop is rounded. "even": to the even number,
    as torchvision. "up": as DALI. "down": as NVIDIA's TensorFlow code."""
    eval_sampling: Literal["half_pixel", "half_pixel_symmetric", "asymmetric"] = "half_pixel"
    """Evaluation: where the resize samples, in ONNX's words. "half_pixel": the image fills the
    rounded sides, as with Pillow and OpenCV. "half_pixel_symmetric": both directions have the scale
    of the shorter side, from the image's centre, as DALI's `subpixel_scale`. "asymmetric": pixel i
    is sampled at i times the scale, as TensorFlow 1's `resize_bilinear`."""
    eval_flips: bool = False
    """Evaluation: whether the logits of an image are the mean of those of the image and of its
    mirror image. It takes twice the time. `predict`, `serve` and exported programs compute the
    image alone."""

    @model_validator(mode="after")
    def _check_evaluation_fields(self) -> Self:
        if self.eval_crop > self.eval_resize:
            raise ValueError(
                f"eval_crop ({self.eval_crop}) must fit into eval_resize ({self.eval_resize});"
                " set both"
            )
        return self
