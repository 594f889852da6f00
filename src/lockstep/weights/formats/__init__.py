"""Read and write weights files of other programs. No framework is needed.

| format of named arrays | models in it |
|---|---|
| `tensor_bundle`: TensorFlow | `nvidia_tensorflow` |
| `paddle_pickle`: Paddle | `nvidia_paddle` |
| `torch_file`: PyTorch; `torch_pickle` makes the tensors | `torch_models`, written by `torch_writing` |
| `mxnet_params`: MXNet; `mxnet_symbol` reads the graph | `nvidia_mxnet` |
| `keras_variables`: Keras; `keras_process` reads it first | `keras_file`; older names: `keras_branches` |
| ONNX's own library; `onnx_metadata` is the preprocessing | `onnx_weights`, by `network` |
| `tensorflow_graph`: TensorFlow's graphs; `tensorflow_nodes` makes them ONNX's | `tensorflow_weights`, by `network` |

`timm_folder` is the folder of timm and of the Hugging Face Hub. `pickles` interprets the pickles of
Paddle and PyTorch.
"""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.system.errors import CheckpointError

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""The type of arrays that hold bfloat16 numbers as a file has them, since NumPy has no bfloat16.
`numbers` converts them."""


def numbers(values: np.ndarray) -> np.ndarray:
    """Return an array with its bfloat16 numbers as float32, in the same shape; any other array
    unchanged."""
    return np.asarray(from_bfloat16(values["bfloat16"])) if values.dtype == BFLOAT16 else values


def dtype_name(dtype: "np.dtype[Any]") -> str:
    """Return the name of a type of numbers: "float32", "bfloat16", ... whatever its byte order is."""
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def from_bfloat16(halves: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers as float32, since NumPy has no bfloat16; `halves` holds their bits,
    uint16 of any shape."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


MOST_ARRAYS = 20_000
"""A file of weights may have at most this many arrays. A ResNet-152 with velocities and averages
has 3,000. Comparing the arrays with every model, and listing those that do not fit, takes time and
memory for each."""


def refuse_many(path: Path | str, arrays: int) -> None:
    """Raise `CheckpointError` if a file has more arrays than weights have."""
    if arrays > MOST_ARRAYS:
        raise CheckpointError(
            f"{path} has {arrays:,} arrays; expected at most {MOST_ARRAYS:,}: a ResNet-152 with"
            " velocities and averages has 3,000; name a file of one network's weights"
        )


def refuse_existing(*paths: Path) -> None:
    """Raise `CheckpointError` if one of the files exists: a conversion never overwrites anything,
    nor a link to nothing."""
    for path in paths:
        try:
            exists = path.exists() or path.is_symlink()
        except OSError as error:
            raise CheckpointError(
                f"{path!s:.200} cannot be written: {error.strerror or error}"
            ) from None
        if exists:
            raise CheckpointError(f"{path} already exists; name a new file, or remove this one")
