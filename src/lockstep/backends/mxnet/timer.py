"""What a benchmark asks of MXNet: the versions and threads it computes with, and products of
matrices."""

import os
from typing import Any

import mxnet as mx

from lockstep.backends import Products
from lockstep.backends.mxnet import framework_import
from lockstep.system.machine import first_number


def libraries() -> dict[str, Any]:
    """Return the number of threads on a CPU."""
    return {"threads": first_number(framework_import.threads)}


def products(on_gpu: bool) -> Products:
    """Return how matrices are multiplied."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    context = mx.gpu(int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else mx.cpu()
    return Products(
        lambda array, dtype: mx.nd.array(array, context).astype(names.get(dtype, "float32")),
        lambda result: result.wait_to_read(),
        lambda a, b: mx.nd.dot(a, b),
    )
