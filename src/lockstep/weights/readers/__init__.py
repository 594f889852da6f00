"""Files of weights that other programs wrote or shall read. No framework is needed.

`tensor_bundle` is how TensorFlow stores named tensors, `paddle_pickle` how Paddle and `mxnet_params` how MXNet does;
`nvidia_tensorflow`, `nvidia_paddle` and `nvidia_mxnet` are which of them NVIDIA's models have. `mxnet_symbol` reads what an
MXNet graph computes with them.
"""

from pathlib import Path

import numpy as np

from lockstep.system.errors import CheckpointError


def from_bfloat16(halves: np.ndarray) -> np.ndarray:
    """Return numbers of bfloat16, which NumPy has not, as float32; `halves` is their bits, uint16 of any shape."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def refuse_existing(*paths: Path) -> None:
    """Raise `CheckpointError` if one of the files is there: a conversion never replaces anything."""
    for path in paths:
        if path.exists():
            raise CheckpointError(f"{path} is there already; name a new file, or remove this one")
