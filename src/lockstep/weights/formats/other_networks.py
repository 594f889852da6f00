"""What a file of PyTorch is that Lockstep cannot read, by the names of its tensors and values."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from lockstep.system.errors import CheckpointError

_NETWORKS = {
    "a Transformers ResNet": r"embedder\.embedder\.convolution|encoder\.stages\.\d+\.layers\.",
    "a MoCo checkpoint, whose fc is no classifier": r"encoder_q\.",
    "a checkpoint of self-supervised training": (
        r"^(module\.)?(projector|projection|projection_head|predictor|prototypes|online_encoder)\."
    ),
    "a ResNet of CLIP": r"attnpool\.",
    "a ResNet of Detectron2": r"\bres2\.0\.conv1\.",
    "a network that detects or segments": r"\brpn\.|roi_heads?\.|aux_classifier\.|lateral_convs",
    "a DenseNet": r"denseblock1\.",
    "a VGG or an AlexNet": r"classifier\.6\.|features\.28\.|pre_logits\.fc1\.",
    "a ConvNeXt": r"features\.1\.0\.layer_scale|stages\.0\.(blocks\.0\.conv_dw|0\.dwconv)\.",
    "an EfficientNet or a MobileNet": (
        r"blocks\.0\.0\.conv|features\.1\.(conv|block|0\.block)\.|_blocks\.0\."
    ),
    "a vision transformer": r"patch_embed|cls_token|class_token|class_embedding|relative_pos",
    "an Inception": r"Mixed_5b\.|inception3a\.",
    "a RegNet": r"trunk_output\.|\bs1\.b1\.",
    "a ResNetV2": r"stages\.0\.blocks\.0\.norm3\.",
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


def name_kind(
    path: Path, error: CheckpointError, names: Iterable[str], values: Collection[Any]
) -> CheckpointError:
    """Return an error that says first what a file with tensors and values of these names is, if
    that is known."""
    lines = "\n".join(names)
    kind = next((program for value, program in _PROGRAMS.items() if value in values), "")
    if kind and _LOSS.search(lines):
        kind += " with a loss of its own"
    for network, pattern in _NETWORKS.items():
        if re.search(pattern, lines, re.MULTILINE):
            kind = network
            break
    problem = str(error)
    if not kind or not problem.startswith(f"{path} "):
        return error
    return CheckpointError(f"{path} is {kind}: it {problem.removeprefix(f'{path} ')}")
