"""One node in place of several of a TensorFlow graph, where ONNX has one operator.

- The convolutions of the groups of a grouped convolution, between Split and Concat, become one.
- So does a batch norm in the parts of `tf.nn.batch_normalization`, as Keras 3 exports it.
"""

from lockstep.weights.formats.tensorflow_graph import Node, message
from lockstep.weights.formats.tensorflow_values import Values, get_list, get_text


def merge_groups(values: Values, nodes: list[Node]) -> list[Node]:
    """Return the nodes with one convolution in place of the convolutions of groups and their
    Concat."""
    splits = {node.name: node for node in values.graph.nodes if node.op == "Split"}
    parts: set[str] = set()
    merged: dict[str, Node] = {}
    for node in nodes:
        group = _find_group(values, splits, node)
        if group:
            images = _find_split(values, splits, group[0].inputs[0])
            kernels = _find_split(values, splits, group[0].inputs[1])
            assert images is not None
            assert kernels is not None
            inputs = (images.inputs[1], kernels.inputs[1])
            whole = Node(node.name, "Conv2D", inputs, group[0].attributes)
            values.replace_node(whole)
            merged[node.name] = whole
            parts |= {images.name, kernels.name, *(conv.name for conv in group)}
    return [merged.get(node.name, node) for node in nodes if node.name not in parts]


def _find_group(values: Values, splits: dict[str, Node], node: Node) -> list[Node]:
    """Return the convolutions of a Concat whose images and kernels are the parts of one Split
    each; empty otherwise."""
    if node.op != "ConcatV2" or len(node.inputs) < 3:
        return []
    group = []
    for value in node.inputs[:-1]:
        conv = values.find_maker(value)
        if conv is None or conv.op != "Conv2D" or len(conv.inputs) != 2:
            return []
        group.append(conv)
    channel = {"NHWC": 3, "NCHW": 1}.get(get_text(group[0], "data_format", "NHWC"))
    if channel is None or not _is_axis(values, node.inputs[-1], channel):
        return []
    for i, axis in ((0, channel), (1, 3)):
        split = _find_split(values, splits, group[0].inputs[i])
        if split is None or not _is_axis(values, split.inputs[0], axis):
            return []
        if split.attributes["num_split"].i != len(group):
            return []
        for number, conv in enumerate(group):
            if values.source(conv.inputs[i]) != f"{split.name}:{number}":
                return []
    windows = set()
    for conv in group:
        padding = get_text(conv, "padding", "")
        windows.add((padding, *get_list(conv, "strides"), *get_list(conv, "dilations")))
    return group if len(windows) == 1 else []


def _is_axis(values: Values, value: str, axis: int) -> bool:
    """Return whether a constant is an axis of four, which may be counted from the end."""
    return values.read_integers(value, 1) in ([axis], [axis - 4])


def _find_split(values: Values, splits: dict[str, Node], value: str) -> Node | None:
    """Return the Split whose part a value is, if it has all that it needs."""
    node = splits.get(values.source(value).rpartition(":")[0])
    if node is None or len(node.inputs) != 2 or "num_split" not in node.attributes:
        return None
    return node


def merge_norms(values: Values, nodes: list[Node], layout: str) -> list[Node]:
    """Return the nodes with one batch norm in place of its parts.

    These compute x * f + (beta - mean * f), where f is rsqrt(variance + epsilon) * gamma.
    """
    products: set[str] = set()
    norms: dict[str, Node] = {}
    for node in nodes:
        try:
            product = _find_input(values, node, 0, "Mul")
            shift = _find_input(values, node, 1, "Sub")
            shrunk = _find_input(values, shift, 1, "Mul")
            factor = _find_input(values, product, 1, "Mul")
            root = _find_input(values, factor, 0, "Rsqrt")
            total = _find_input(values, root, 0, "AddV2")
            epsilon = values.evaluate(total.inputs[1])
            factors = {values.source(part.inputs[1]) for part in (shrunk, product)}
        except LookupError:
            continue
        is_norm = node.op == "AddV2" and len(factors) == 1
        if is_norm and epsilon is not None and epsilon.size == 1:
            inputs = (
                product.inputs[0],
                factor.inputs[1],
                shift.inputs[0],
                shrunk.inputs[0],
                total.inputs[0],
            )
            attributes = {
                "epsilon": message("Value")(f=float(epsilon.ravel()[0])),
                "is_training": message("Value")(),
                "data_format": message("Value")(s=layout.encode()),
            }
            norms[node.name] = Node(node.name, "FusedBatchNormV3", inputs, attributes)
            values.replace_node(norms[node.name])
            products.add(product.name)
    return [norms.get(node.name, node) for node in nodes if node.name not in products]


def _find_input(values: Values, node: Node, number: int, op: str) -> Node:
    """Return the node that makes an input. Raises `LookupError` if it is of another operator."""
    maker = values.find_maker(node.inputs[number])
    if maker is None or maker.op != op:
        raise LookupError
    return maker
