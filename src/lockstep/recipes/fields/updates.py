"""How weights are updated: optimizer, weight decay, moving average, frozen tensors."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from lockstep.models.architectures import ListedRole
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import Fraction, NotNegative, Positive, Prefixes


class UpdateFields(Settings):
    """How weights are updated: optimizer, weight decay, moving average, frozen tensors."""

    momentum: Fraction = 0.875
    """Momentum m of SGD: v = m*v + g; w -= lr*v."""
    nesterov: bool = False
    """Whether weights move by Nesterov's momentum: w -= lr*(g + m*v), with the velocity v = m*v + g
    after this step. It is `--nesterov` of NVIDIA's PyTorch code. No published recipe uses it."""
    weight_decay: NotNegative = 1 / 32768
    """Coupled weight decay: weight_decay * w is added to the gradient, only for tensors whose role
    is in `weight_decay_roles`."""
    weight_decay_roles: tuple[ListedRole, ...] = ("conv_weight", "fc_weight", "fc_bias")
    """Roles of the tensors that weight decay applies to. `conv_weight` includes the convolutions of
    squeeze-and-excitation, `fc_bias` their biases. `bn_scale` and `bn_bias` are the scales
    and biases of all batch norms; `shortcut_bn_scale` and `shortcut_bn_bias` are only those of the
    batch norms in shortcuts."""
    ema_decay: Fraction = 0.0
    """Decay of the moving average of weights and statistics: mu_t = min(ema_decay, (1 + t) / (10 +
    t)). 0: no average. It is updated once in a step, with any number of accumulation parts.
    NVIDIA's PyTorch code updates it after every part, so that its average follows the weights
    faster if it accumulates."""
    frozen: Prefixes = ()
    """Tensors that training leaves as they are, with their moving averages: prefixes of their names
    in whole parts, such as "layer1" or "layer4.0.bn1", or "backbone" for all but the classifier. A
    batch norm whose scale and bias are both frozen computes with its running statistics, which
    stay. Nothing is computed backwards below the lowest trained tensor."""
    lr_multipliers: Mapping[str, Positive] = Field(default_factory=dict)
    """Factors of the learning rate by prefix, as in `frozen`. The longest prefix of a tensor's name
    counts; without one the factor is 1. {"backbone": 0.1, "layer4": 0.5}: the classifier learns at
    the full rate, the last stage at half of it, and the rest at a tenth."""
    lr_depth_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate for every step down from the classifier: the rate of a tensor is
    multiplied by lr_depth_decay ^ depth. The depth is 0 in the classifier, 1 in the last block, and
    the number of blocks + 1 in the stem. 1: the same rate everywhere."""
