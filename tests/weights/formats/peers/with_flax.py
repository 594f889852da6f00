"""Save variables with Flax's own functions, and load Lockstep's.

    with_flax.py save FOLDER    files of a narrow ResNet in every form, and its logits
    with_flax.py load FOLDER    loads ours.* into the network, and computes their logits

The network has the layers and the names of Flax's example for ImageNet. It is written for this test
and shares no code with either.
"""

import sys
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.flax import load_file, save_file


class Residual(nn.Module):
    width: int
    outputs: int
    stride: int

    def list_kernels(self):
        raise NotImplementedError

    @nn.compact
    def __call__(self, x):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=True, epsilon=1e-5)
        y = x
        kernels = self.list_kernels()
        for number, (width, size, stride) in enumerate(kernels, start=1):
            y = norm()(conv(width, (size, size), (stride, stride))(y))
            if number < len(kernels):
                y = nn.relu(y)
        if y.shape != x.shape:
            x = conv(self.outputs, (1, 1), (self.stride, self.stride), name="conv_proj")(x)
            x = norm(name="norm_proj")(x)
        return nn.relu(x + y)


class BottleneckResNetBlock(Residual):
    def list_kernels(self):
        return (self.width, 1, 1), (self.width, 3, self.stride), (self.outputs, 1, 1)


class ResNetBlock(Residual):
    def list_kernels(self):
        return (self.width, 3, self.stride), (self.outputs, 3, 1)


class ResNet(nn.Module):
    kind: type
    layers: tuple
    stem: int
    widths: tuple
    expansion: int
    logits: int = 10

    @nn.compact
    def __call__(self, x):
        around = [(3, 3), (3, 3)]
        x = nn.Conv(self.stem, (7, 7), (2, 2), around, use_bias=False, name="conv_init")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=True, epsilon=1e-5, name="bn_init")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, (count, width) in enumerate(zip(self.layers, self.widths, strict=True)):
            for number in range(count):
                stride = 2 if stage and not number else 1
                x = self.kind(width, width * self.expansion, stride)(x)
        return nn.Dense(self.logits)(x.mean(axis=(1, 2)))


NETWORKS = {
    "small": ResNet(BottleneckResNetBlock, (2, 1, 1, 1), 8, (8, 16, 32, 64), 4),
    "basic": ResNet(ResNetBlock, (1, 2, 1, 1), 8, (8, 16, 32, 64), 1),
}


def list_shapes(network, images):
    return jax.eval_shape(network.init, jax.random.key(0), images)


def compute_logits(network, variables, images):
    return jax.jit(network.apply)(variables, images)


def draw(network, images):
    """Return variables in which all values are different, and variances are positive."""
    random = np.random.default_rng(3)
    variables = list_shapes(network, images)

    def draw_leaf(path, leaf):
        if path[-1] in ("scale", "var"):
            return random.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        width = max(np.prod(leaf.shape[:-1]), 1) ** 0.5
        return (random.standard_normal(leaf.shape) / width).astype(np.float32)

    flat = flatten_dict(variables)
    return unflatten_dict({path: draw_leaf(path, leaf) for path, leaf in flat.items()})


def save(folder):
    images = jnp.asarray(np.load(folder / "images.npy"))
    for name, network in NETWORKS.items():
        variables = draw(network, images)
        np.save(folder / f"{name}-logits.npy", compute_logits(network, variables, images))
        in_order = serialization.msgpack_serialize(variables)
        (folder / f"{name}-in-order.msgpack").write_bytes(in_order)
        (folder / f"{name}.msgpack").write_bytes(serialization.to_bytes(variables))
        flat = flatten_dict(variables, sep="/")
        np.savez(folder / f"{name}.npz", **flat)
        save_file(flat, folder / f"{name}.safetensors")
        dotted = flatten_dict(variables, sep=".")
        halves = {path: jnp.asarray(leaf, jnp.bfloat16) for path, leaf in dotted.items()}
        save_file(halves, folder / f"{name}-bf16.safetensors")
        np.savez_compressed(folder / f"{name}-bf16.npz", **halves)
        (folder / f"{name}-bf16.msgpack").write_bytes(serialization.to_bytes(halves))
    save_training(folder, NETWORKS["small"], images)


def save_training(folder, network, images):
    """Save the state of a training after one step, and the gradients, which are the velocities."""

    class State(TrainState):
        batch_stats: dict

    variables = draw(network, images)
    state = State.create(
        apply_fn=network.apply,
        params=variables["params"],
        tx=optax.sgd(optax.constant_schedule(0.1), momentum=0.9, nesterov=True),
        batch_stats=variables["batch_stats"],
    )

    def loss(params):
        return network.apply({**variables, "params": params}, images).mean()

    gradients = jax.jit(jax.grad(loss))(state.params)
    state = state.apply_gradients(grads=gradients)
    (folder / "checkpoint_1").write_bytes(serialization.to_bytes(state))
    np.savez(folder / "gradients.npz", **flatten_dict(gradients, sep="/"))
    np.savez(folder / "trained.npz", **flatten_dict(state.params, sep="/"))


def load(folder):
    images = jnp.asarray(np.load(folder / "images.npy"))
    network = NETWORKS["small"]
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape), list_shapes(network, images))
    read = {"msgpack": serialization.from_bytes(empty, (folder / "ours.msgpack").read_bytes())}
    read["npz"] = unflatten_dict(dict(np.load(folder / "ours.npz")), sep="/")
    read["safetensors"] = unflatten_dict(load_file(folder / "ours.safetensors"), sep="/")
    for ending, variables in read.items():
        assert jax.tree.structure(variables) == jax.tree.structure(empty), ending
        logits = compute_logits(network, variables, images)
        np.save(folder / f"ours-{ending}-logits.npy", logits)


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
