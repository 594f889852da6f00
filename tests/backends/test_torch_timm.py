"""A model with all parts that torchvision's ResNets lack computes what timm computes.

The figures are those of timm 1.0.31 in float64, of

    ResNet(Bottleneck, (2, 1, 1, 1), num_classes=10, cardinality=2, stem_width=4,
           stem_type="deep_tiered", avg_down=True, channels=(8, 8, 16, 16), aa_layer=BlurPool2d,
           block_args={"attn_layer": "se"})
"""

import hashlib

import numpy as np
import pytest
import torch

from lockstep.backends.reference.model import Network
from lockstep.backends.torch.model import Model
from lockstep.models.architectures import ModelSpec, Tensor
from lockstep.recipes import Recipe

SPEC = ModelSpec(
    block="bottleneck",
    layers=(2, 1, 1, 1),
    stem="tiered",
    stem_width=8,
    widths=(16, 16, 32, 32),
    groups=2,
    expansion=2,
    shortcut_pool=True,
    squeeze_widths=(8, 8, 8, 8),
    blur="after",
)
NAMES = "280ae2266eb531e9"
"""The first digits of the SHA-256 of the names, one a line, without counters."""
LOGITS = np.array(
    [
        [-0.6548207162, 0.3843601546, 1.1686786632, 1.2354164314, 0.5655120479],
        [-0.4152668308, -1.1065541641, -1.103680304, -0.4382838617, 0.4557159234],
        [-0.5643059855, 0.3354539796, 1.0112701683, 1.0690195953, 0.4953232972],
        [-0.3448740216, -0.9400822757, -0.9463732113, -0.3895914366, 0.3650102282],
    ]
).reshape(2, 10)
GRADIENTS = {
    "conv1.0.weight": 117.42994649891246,
    "layer1.0.se.fc1.bias": 2.7542336524627666,
    "layer2.0.downsample.1.weight": 19.19025187556629,
    "fc.weight": 33.690651035681654,
}
"""Norms of the gradients of the sum of squares of all logits, in training."""
IMAGES = np.sin(0.01 * np.arange(2 * 3 * 45 * 45)).reshape(2, 3, 45, 45)


def make_tensor(i: int, tensor: Tensor) -> np.ndarray:
    """Return the values of the tensor with number i."""
    values = np.sin(0.7 * np.arange(np.prod(tensor.shape)) + i).reshape(tensor.shape)
    if tensor.role in ("bn_scale", "bn_var"):
        return 1 + 0.5 * values
    if len(tensor.shape) == 1:
        return 0.3 * values
    return values / np.sqrt(np.prod(tensor.shape[1:]))


@pytest.fixture
def recipe(tiny_recipe: Recipe) -> Recipe:
    return tiny_recipe.replace(model=SPEC)


VALUES = {tensor.name: make_tensor(i, tensor) for i, tensor in enumerate(SPEC.list_tensors(10))}


def test_names_are_timms_in_their_order() -> None:
    assert hashlib.sha256("\n".join(VALUES).encode()).hexdigest().startswith(NAMES)


def test_the_reference_computes_as_timm(recipe: Recipe) -> None:
    images = IMAGES.transpose(0, 2, 3, 1)
    logits, _ = Network(recipe, VALUES, training=False).logits(images)
    assert logits == pytest.approx(LOGITS, rel=1e-6)
    network = Network(recipe, VALUES, training=True)
    logits, back = network.logits(images)
    back(2 * logits)
    norms = {name: np.linalg.norm(network.gradients[name]) for name in GRADIENTS}
    assert norms == pytest.approx(GRADIENTS, rel=1e-6)


def test_the_module_computes_as_timm(recipe: Recipe) -> None:
    module = Model(SPEC, recipe).double()
    values = {name: torch.from_numpy(value.copy()) for name, value in VALUES.items()}
    module.load_state_dict(values, strict=False)
    images = torch.from_numpy(IMAGES)
    assert module.eval()(images).detach().numpy() == pytest.approx(LOGITS, rel=1e-6)
    module.train()(images).square().sum().backward()
    gradients = dict(module.named_parameters())
    norms = {name: float(gradients[name].grad.norm()) for name in GRADIENTS}
    assert norms == pytest.approx(GRADIENTS, rel=1e-6)
