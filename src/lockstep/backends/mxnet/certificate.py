"""For the certificate of a conversion: weights files as MXNet itself reads them, and what it
computes of a graph."""

import json
from pathlib import Path

import numpy as np

from lockstep.backends.mxnet.framework_import import mx
from lockstep.recipes import Recipe


def read(path: Path, recipe: Recipe) -> dict[str, np.ndarray]:
    """Return the arrays of a `.params` by name, of any shape and dtype. `recipe` is not needed.
    Raises what MXNet raises."""
    return {name: value.asnumpy() for name, value in mx.nd.load(str(path)).items()}


def compute(folder: Path, images: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the outputs [N, outputs] of images, float32, and the program's version.

    The folder holds `symbol.json`, a graph with one output; `arrays.npz`, its variables by name;
    and `about.json`, with the name of the images and their number of channels.
    """
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    symbol = mx.sym.load_json((folder / "symbol.json").read_text(encoding="utf-8"))
    stored = np.load(folder / "arrays.npz", allow_pickle=False)
    arrays = {name: mx.nd.array(stored[name]) for name in stored.files}
    channel = 3 if images.shape[3] == 3 else 1
    if about["channels"] == 4:  # NVIDIA's pipelines fill the fourth with zeros
        widths = [(0, int(axis == channel)) for axis in range(4)]
        images = np.pad(images, widths)
    arguments = {}
    for name in symbol.list_arguments():
        # Labels have no effect on inference.
        arguments[name] = arrays.get(name, mx.nd.zeros((1,)))
    arguments[about["images"]] = mx.nd.array(images[:1])
    states = {name: arrays[name] for name in symbol.list_auxiliary_states()}
    executor = symbol.bind(mx.cpu(), arguments, aux_states=states, grad_req="null")
    outputs = []
    for image in images:
        arguments[about["images"]][:] = mx.nd.array(image[None])
        outputs.append(executor.forward(is_train=False)[0].asnumpy())
    return np.concatenate(outputs), f"MXNet {mx.__version__}"
