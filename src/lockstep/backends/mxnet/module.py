"""A model in the usual form of MXNet: a symbol and its arrays."""

from collections.abc import Mapping
from typing import Any

import mxnet as mx
import numpy as np

from lockstep.backends.mxnet.model import Pass, variables
from lockstep.backends.shared.layout import Layout
from lockstep.models.state import check_fit
from lockstep.recipes import Recipe


def load_module(recipe: Recipe, tensors: Mapping[str, np.ndarray]) -> Any:
    """Return the model as a `gluon.SymbolBlock` in evaluation mode: normalised NCHW images to
    logits.

    With padding "same", the padding is right only for images of the recipe's `eval_crop`.
    """
    check_fit(Layout(recipe).shapes, tensors, "weights")
    size = (recipe.eval_crop, recipe.eval_crop)
    images = mx.sym.var("data", dtype="float32")
    logits = Pass(recipe, variables(recipe), size, training=False, on_gpu=False).logits(images)
    block = mx.gluon.SymbolBlock([logits], [images])
    for name, parameter in block.collect_params().items():
        value = mx.nd.array(np.asarray(tensors[name], np.float32))
        parameter.shape = value.shape
        parameter.initialize(ctx=mx.cpu())
        parameter.set_data(value)
    return block
