"""What a file of PyTorch is that Lockstep cannot read, by the names of its tensors and values."""

import re
from collections.abc import Collection, Iterable
from typing import Any

_NETWORKS = {
    "a Transformers ResNet": r"embedder\.embedder\.convolution|encoder\.stages\.\d+\.layers\.",
    "a MoCo checkpoint, whose fc is no classifier": r"encoder_q\.",
    "a checkpoint of self-supervised training": (
        r"project(or|ion|ion_head)\.|predictor\.|prototypes\.|online_encoder\.|dino_loss"
    ),
    "a ResNet of CLIP": r"attnpool\.",
    "a ResNet of Detectron2": r"(bottom_up\.|^)(stem\.conv1|res2\.0)\.",
    "a network that detects or segments": r"rpn\.|roi_heads?\.|aux_classifier\.|lateral_convs",
    "a DenseNet": r"denseblock1\.",
    "a VGG": r"features\.28\.|features\.2\d\.bias|classifier\.6\.",
    "an EfficientNet or a MobileNet": (
        r"blocks\.0\.0\.(conv_dw|conv_pw|conv)\.|features\.1\.(conv|0\.block)\.|_blocks\.0\."
    ),
    "a ConvNeXt": r"stages\.0\.(blocks\.0\.conv_dw|0\.dwconv)\.|features\.1\.0\.block\.0",
    "a Swin transformer": r"relative_position_bias_table",
    "a vision transformer": r"patch_embed|cls_token|class_token|class_embedding",
    "an Inception": r"Mixed_5b\.|inception3a\.",
    "a RegNet": r"trunk_output\.|s1\.b1\.",
    "a ResNetV2": r"stages\.0\.blocks\.0\.norm1\.|root\.conv\.",
    "a ResNet for small images": r"layer\d\.0\.shortcut\.0\.",
    "a quantized network": r"_packed_params|fake_quant|activation_post_process|zero_point$",
    "a network whose pruning masks are not applied": r"weight_mask$",
    "a network with parametrizations": r"weight_[guv]$|parametrizations\.",
    "a network with adapters (LoRA)": r"lora_[AB]\b",
    "a checkpoint of the robustness library": r"attacker\.|new_mean$",
}
"""Kinds by a pattern of the name of a tensor."""
_PROGRAMS = {"pytorch-lightning_version": "a Lightning checkpoint", "meta": "a file of OpenMMLab"}
"""Kinds by the name of a value next to the state_dict."""
_LOSS = re.compile(r"(^|\.)(criterion|\w*loss\w*)\.", re.MULTILINE)


def describe_other(names: Iterable[str], values: Collection[Any]) -> str:
    """Return what a file with tensors and values of these names is, if that is known; "" if not."""
    lines = "\n".join(names)
    for kind, pattern in _NETWORKS.items():
        if re.search(pattern, lines, re.MULTILINE):
            return kind
    for value, kind in _PROGRAMS.items():
        if value in values:
            return f"{kind} with a loss of its own" if _LOSS.search(lines) else kind
    return ""
