"""The precision of the computation, and loss scaling."""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.recipes import limits
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import Positive


class PrecisionFields(Settings):
    """The precision of the computation, and loss scaling."""

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp16"
    """Precision of convolutions and matrix products. Weights, statistics and updates are always
    float32. "tf32" is float32 with TensorFloat-32 products where a GPU has them. With "fp16",
    evaluations are in fp32."""
    loss_scaling: Literal["none", "static", "dynamic"] = "none"
    """Loss scaling, applied in fp16 only. "static": the scale is constant. "dynamic": a step with a
    gradient that is not finite is skipped, and the scale is adapted."""
    loss_scale: Positive = 128.0
    """The loss scale. With dynamic loss scaling, the initial one."""
    loss_scale_growth: Annotated[float, Field(gt=1)] = 2.0
    """Factor by which a dynamic loss scale is multiplied after `loss_scale_growth_steps` steps
    without overflow."""
    loss_scale_growth_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1000
    """Number of consecutive steps without overflow after which a dynamic loss scale is multiplied
    by `loss_scale_growth`."""
    loss_scale_backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor by which a dynamic loss scale is multiplied after `loss_scale_backoff_steps` steps
    with overflow."""
    loss_scale_backoff_steps: Annotated[int, Field(ge=1), limits.COUNTED] = 1
    """Number of consecutive steps with overflow after which a dynamic loss scale is multiplied by
    `loss_scale_backoff`."""
