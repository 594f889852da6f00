"""The model and its initial weights."""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.models.architectures import ModelSpec
from lockstep.recipes import limits
from lockstep.recipes.field_validation import Settings
from lockstep.recipes.fields.kinds import Fraction, Positive


class ModelFields(Settings):
    """The model and its initial weights."""

    model: str | ModelSpec = "resnet50"
    """Name of a model in `lockstep.models.architectures.MODELS`, or the fields of a `ModelSpec`."""
    logits: Annotated[int, Field(ge=1), limits.LOGITS] = 1000
    """Number of outputs of the classifier, at least the number of classes. NVIDIA's TensorFlow
    model has 1001 and leaves the last unused."""
    padding: Literal["symmetric", "same", "flax"] = "symmetric"
    """"symmetric": all sides are padded equally. "same": TensorFlow's SAME, which pads one row and
    one column more at the end than at the start where the stride is 2. "flax": as in Flax's example
    for ImageNet, "symmetric" in a 7x7 convolution and "same" in every other window."""
    bn_momentum: Fraction = 0.1
    """Weight of the new batch in the running statistics, as in PyTorch. Other frameworks write 0.9
    for PyTorch's 0.1."""
    bn_epsilon: Positive = 1e-5
    """Value that batch norm adds to the variance."""
    batch_norm: Literal["local", "synchronised"] = "local"
    """"local": statistics over one rank's share of a step, as in the originals. "synchronised":
    statistics over the global batch of all ranks."""
    conv_init: Literal["normal", "truncated_normal"] = "normal"
    """Distribution of the initial kernels: He initialisation with variance 2 / fan.
    "truncated_normal" is cut off at two standard deviations and widened to the same variance."""
    conv_init_fan: Literal["in", "out"] = "in"
    """The fan in the variance of initial kernels. "in": the number of values that enter an output.
    "out": the number of values that leave an input."""
    fc_init: Literal["uniform", "as_conv"] = "uniform"
    """Initial weight of the classifier. "uniform": uniform in ±1/sqrt(fan in). "as_conv": drawn
    like the kernels of convolutions."""
    fc_bias_init: Literal["zero", "uniform"] = "zero"
    """Initial biases of the classifier and of squeeze-and-excitation. "zero": 0. "uniform": uniform
    in ±1/sqrt(fan in), PyTorch's default."""
    stem_channels: Literal[3, 4] = 3
    """Number of input channels of the stem in the published code. 4: that code pads images with a
    channel of zeros. A model has three channels here in both cases, because weights of the fourth
    have no effect: they get no gradient, and weight decay makes them a millionth of their initial
    values in 90 epochs. 4 still changes two things: initial kernels of the stem have a fan in of
    196 instead of 147, and 2:4 sparsity prunes the stem too: its groups are red, green, blue and a
    weight of 0. mask_1d sets the smallest of the three colours to 0."""
    zero_init_last_bn: bool = False
    """Whether the last batch norm of every block starts with scale 0. A block then starts as the
    identity."""

    def choose_padding(self, kernel: int) -> Literal["symmetric", "same"]:
        """Return how a window of `kernel` x `kernel` values is padded."""
        if self.padding != "flax":
            return self.padding
        return "symmetric" if kernel == 7 else "same"
