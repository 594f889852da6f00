"""What a benchmark asks of PyTorch: the versions and threads it computes with, and products of
matrices."""

import re
from typing import Any

import torch

from lockstep.backends import Products


def libraries() -> dict[str, Any]:
    """Return the versions of CUDA, cuDNN and oneDNN, and the number of threads on a CPU."""
    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "onednn": onednn and onednn[1],
        "threads": torch.get_num_threads(),
    }


def products(on_gpu: bool) -> Products:
    """Return how matrices are multiplied."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    device = torch.device("cuda" if on_gpu else "cpu")
    return Products(
        lambda array, dtype: torch.from_numpy(array).to(device, dtypes.get(dtype, torch.float32)),
        lambda result: torch.cuda.synchronize() if on_gpu else None,
    )
