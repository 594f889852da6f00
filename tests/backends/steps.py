"""The steps and the trajectories that engines are compared on."""

from dataclasses import replace

from tests.backends.cases import (
    BASIC,
    BINARY,
    BLURRED,
    MODERN,
    NARROWED,
    OTHER_COLOURS,
    V1,
    WEIGHTED,
    Step,
)

OF_NARROW_MODELS = {
    "narrow resnet50": {
        "at 32 pixels": Step(mixup="sample"),
        "not smoothed": Step({"label_smoothing": 0.0}),
        "with SAME padding and 1001 logits": Step({"padding": "same", "logits": 1001}),
    },
    "narrow resnext101-32x4d": {
        "at 32 pixels": Step(mixup="sample"),
        "with CutMix": Step(mixup="cut"),
        "in two parts": Step(mixup="sample", parts=2),
    },
}
"""Each kind of step is carried out by the tiny model as well, and by one of the narrow models."""
FROZEN = (
    *("conv1", "bn1", "layer1", "layer3"),
    *("layer2.0.conv2.weight", "layer4.0.bn2", "layer4.0.bn3.bias", "fc.weight"),
)
"""What is below the lowest trained tensor, a whole stage between trained ones, and single tensors.
The third batch norm of the last stage keeps only its bias, so that its statistics move."""
STEPS = {
    "smoothed": Step(),
    "not smoothed": Step({"label_smoothing": 0.0}),
    "one mixup coefficient": Step(mixup="batch"),
    "a mixup coefficient each": Step(mixup="sample"),
    "binary cross-entropy of 1001 logits": Step(
        BINARY | {"logits": 1001, "class_reduction": "sum"}, "sample"
    ),
    "SAME padding": Step({"padding": "same"}),
    "basic blocks": Step({"model": BASIC}),
    "v1 strides": Step({"model": V1}),
    "modern parts": Step({"model": MODERN}, "sample"),
    "a blur before convolutions, Flax's padding": Step({"model": BLURRED, "padding": "flax"}),
    "other batch norm": Step({"bn_momentum": 0.4, "bn_epsilon": 0.01}),
    "other colours": Step(OTHER_COLOURS, "sample"),
    "class weights": Step(WEIGHTED | {"label_smoothing": 0.0}),
    "binary targets, CutMix and dropout": Step(
        BINARY | {"target_threshold": 0.2, "dropout": 0.4}, "cut"
    ),
    "stochastic depth": Step({"stochastic_depth": 0.6}),
    "class weights, dropout, stochastic depth and mixup in two parts": Step(
        WEIGHTED | {"dropout": 0.4, "stochastic_depth": 0.6}, "sample", parts=2
    ),
    "two parts": Step(parts=2),
    "two parts with mixup": Step(mixup="sample", parts=2),
    "frozen tensors": Step({"frozen": FROZEN}, "sample"),
    "frozen backbone": Step({"frozen": "backbone"}),
} | {
    f"{model} {kind}": replace(step, changes=step.changes | NARROWED[model], is_steady=True)
    for model, steps in OF_NARROW_MODELS.items()
    for kind, step in steps.items()
}

MUCH_DECAY = {
    "weight_decay": 0.05,
    "weight_decay_roles": ("bn_scale", "fc_weight", "fc_bias"),
    "nesterov": True,
}
"""Much decay with Nesterov's momentum, whose step has the decay twice: in the gradient and in the
velocity."""

FROZEN_AND_RATES = MUCH_DECAY | {
    "frozen": FROZEN,
    "lr_multipliers": {"backbone": 0.5, "layer2": 3, "layer2.0.bn1.weight": 0.25, "fc": 2},
    "lr_depth_decay": 0.75,
    "ema_decay": 0.9,
}
"""Prefixes of four lengths, of which the longest one counts."""

TRAJECTORIES = {
    "plain": ({}, "none", 1),
    "no momentum": ({"momentum": 0.0}, "none", 1),
    "much decay": (MUCH_DECAY, "none", 1),
    "mixup": ({}, "sample", 1),
    "two parts": ({}, "none", 2),
    "moving average": ({"ema_decay": 0.9}, "none", 1),
    "frozen tensors and rates by tensor": (FROZEN_AND_RATES, "none", 2),
}
