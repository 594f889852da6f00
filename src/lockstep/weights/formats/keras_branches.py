"""Names of `keras.applications.ResNet50` in versions of Keras from 2015 to 2018, changed to those
of later versions.

    conv1, bn_conv1                                           the stem
    res<stage><block>_branch2{a,b,c}, bn<stage><block>_...    a block
    res<stage><block>_branch1, bn<stage><block>_branch1       its shortcut
    fc1000                                                    the classifier

Stages count from 2, and blocks are letters.

Keras 1 put the layer's name into those of the variables too: `conv1_W`, `conv1_b`,
`bn_conv1_gamma`, `bn_conv1_beta`, `bn_conv1_running_mean`, `bn_conv1_running_std`. The last one is
a variance in spite of its name. Layers, layouts and images are those of later versions: v1, HWIO
kernels with biases, BGR minus a mean. Batch norm's epsilon is Keras' default.

Sources: keras/applications/resnet50.py of Keras 2.0 and fchollet/deep-learning-models, resnet50.py;
keras/layers/normalization.py of Keras 1.2 and 2.0.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from lockstep.system.errors import CheckpointError

EPSILON = 1e-3
"""What batch norms add to the variance if a file does not describe its layers."""
_BRANCH = re.compile(r"(res|bn)([2-5])([a-z])_branch(1|2[abc])")
_PLACES = {"1": 0, "2a": 1, "2b": 2, "2c": 3}
_KINDS = {"res": "conv", "bn": "bn"}
_OTHERS = {"conv1": "conv1_conv", "bn_conv1": "conv1_bn", "fc1000": "predictions"}
_VARIABLES = {
    "W": "kernel",
    "b": "bias",
    "running_mean": "moving_mean",
    "running_std": "moving_variance",
}
"""Variables by Keras 1's names."""


def has_branches(names: Mapping[str, str]) -> bool:
    """Return whether variables, by `<layer>/<variable>`, have the names of these versions."""
    return any(_BRANCH.fullmatch(name.rpartition("/")[0]) for name in names)


def rename_variables(path: Path, places: Mapping[str, str]) -> dict[str, str]:
    """Return the paths of variables of these versions by later names. Raises `CheckpointError` if
    two get the same name."""
    renamed = {}
    for name, place in places.items():
        layer, _, variable = name.rpartition("/")
        renamed[f"{rename_layer(layer)}/{rename_variable(layer, variable)}"] = place
    if len(renamed) < len(places):
        raise CheckpointError(
            f"{path} has variables named by several versions of Keras; save the model again"
        )
    return renamed


def rename_variable(layer: str, variable: str) -> str:
    """Return the later name of a layer's variable."""
    variable = variable.removeprefix(f"{layer}_")
    return _VARIABLES.get(variable, variable)


def rename_layer(name: str) -> str:
    """Return the later name of a layer.

    >>> rename_layer("res4f_branch2a"), rename_layer("bn2a_branch1"), rename_layer("other")
    ('conv4_block6_1_conv', 'conv2_block1_0_bn', 'other')
    """
    match = _BRANCH.fullmatch(name)
    if match is None:
        return _OTHERS.get(name, name)
    kind, stage, block, branch = match.groups()
    return f"conv{stage}_block{ord(block) - ord('a') + 1}_{_PLACES[branch]}_{_KINDS[kind]}"
