"""Prune layers with Paddle's own `prune_model`.

    with_paddle.py INPUT.npz OUTPUT.npz

INPUT has weights in Lockstep's layout. OUTPUT gets each weight's mask as `<algorithm> <name>`, bool
in the same layout.
"""

import sys

import numpy as np
import paddle
from paddle.incubate import asp


def layer(weight):
    if weight.ndim == 2:
        made = paddle.nn.Linear(weight.shape[1], weight.shape[0], bias_attr=False)
        made.weight.set_value(weight.T)
    else:
        made = paddle.nn.Conv2D(weight.shape[1], weight.shape[0], weight.shape[2:], bias_attr=False)
        made.weight.set_value(weight)
    return made


def prune(weights, algorithm):
    layers = {name: layer(weight) for name, weight in weights.items()}
    masks = asp.prune_model(
        paddle.nn.LayerList(layers.values()), mask_algo=algorithm, with_mask=False
    )
    for name, made in layers.items():
        kept = masks[made.weight.name] == 1
        yield name, kept if kept.ndim == 4 else kept.T


weights = dict(np.load(sys.argv[1]))
algorithms = ("mask_1d", "mask_2d_greedy", "mask_2d_best")
np.savez(
    sys.argv[2],
    **{f"{way} {name}": kept for way in algorithms for name, kept in prune(weights, way)},
)
