"""An ONNX model as ONNX Runtime computes it, rebuilt from the nodes that the reader accounted for.

`write` is for the process that reads a file, `compute` for the one with ONNX Runtime.
"""

from pathlib import Path

import numpy as np

from lockstep.weights.formats.onnx_graph import OnnxGraph

_MODEL = "model.onnx"
_MOST_BYTES = 2**31 - 2**20
"""What a message of Protocol Buffers may have."""


def write(graph: OnnxGraph, output: str, folder: Path) -> None:
    """Write the nodes of a graph, with their constants, as a model with one output. Raises
    `ValueError` if a node runs others, or the model is too large."""
    onnx = graph.onnx
    nodes = list(graph.nodes)
    for node in nodes:
        if any(entry.type == onnx.AttributeProto.GRAPH for entry in node.attribute):
            raise ValueError(f"{node.op_type} contains other nodes")
    names = {name for node in nodes for name in node.input}
    stored = [name for name in names & graph.stored.keys() if name not in graph.makers]
    constants = [onnx.numpy_helper.from_array(graph.read(name), name) for name in stored]
    if sum(tensor.ByteSize() for tensor in constants) > _MOST_BYTES:
        raise ValueError("it has more than 2 GiB")
    images = onnx.helper.make_tensor_value_info(graph.inputs[0], graph.image_type, None)
    outputs = [onnx.ValueInfoProto(name=output)]
    rebuilt = onnx.helper.make_graph(nodes, "rebuilt", [images], outputs, constants)
    model = onnx.helper.make_model(rebuilt, opset_imports=graph.opsets, ir_version=graph.ir_version)
    (folder / _MODEL).write_bytes(model.SerializeToString())


def compute(folder: Path, images: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the outputs [N, outputs] of images, one at a time, and the program's version."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        (folder / _MODEL).read_bytes(), options, providers=["CPUExecutionProvider"]
    )
    image = session.get_inputs()[0]
    kind = image.type.removeprefix("tensor(").removesuffix(")")
    images = images.astype({"float": "float32"}.get(kind, kind))
    outputs = [session.run(None, {image.name: one[None]})[0] for one in images]
    return np.concatenate(outputs), f"ONNX Runtime {onnxruntime.__version__}"
