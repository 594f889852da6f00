"""ResNet-50 and its training step as users of Flax and Optax write them: a contender of
`train_step.py --backend jax`.

Architecture, loss and optimizer are those of Flax's own ImageNet example, in float32: Linen's
modules, decay as a term of the loss, SGD with Nesterov's momentum. The state is donated.
"""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

STAGES = (3, 4, 6, 3)
CLASSES = 1000
DECAY = 1e-4
normalise = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5)


class Bottleneck(nn.Module):
    """A residual block of three convolutions; the stride is that of the second one."""

    filters: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        convolve = partial(nn.Conv, use_bias=False)
        strides = (self.stride, self.stride)
        y = nn.relu(normalise()(convolve(self.filters, (1, 1))(x)))
        y = nn.relu(normalise()(convolve(self.filters, (3, 3), strides)(y)))
        y = convolve(4 * self.filters, (1, 1))(y)
        y = normalise(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = normalise(name="norm_proj")(
                convolve(4 * self.filters, (1, 1), strides, name="conv_proj")(x)
            )
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """Normalised images [N, H, W, 3] to logits."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], use_bias=False)(x)
        x = nn.relu(normalise()(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, count in enumerate(STAGES):
            for index in range(count):
                x = Bottleneck(64 * 2**stage, 2 if stage and not index else 1)(x)
        return nn.Dense(CLASSES)(jnp.mean(x, axis=(1, 2)))


class State(NamedTuple):
    """What a step changes."""

    params: Any
    batch_stats: Any
    optimizer: Any


model = ResNet50()
optimizer = optax.sgd(optax.constant_schedule(0.001), momentum=0.9, nesterov=True)


def draw_state(images: Any) -> State:
    """Return a random state. NumPy draws it, because compiling Flax's own initialisation takes
    longer than all steps."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    params, batch_stats = (
        jax.tree.map(
            lambda leaf: jnp.asarray(0.05 * random.standard_normal(leaf.shape, np.float32)),
            shapes[name],
        )
        for name in ("params", "batch_stats")
    )
    return State(params, batch_stats, optimizer.init(params))


@partial(jax.jit, donate_argnums=0)
def take_step(state: State, images: Any, labels: Any) -> tuple[State, Any]:
    """Return the state after a step, and the loss."""

    def compute_loss(params: Any) -> tuple[Any, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = model.apply(variables, images, mutable=["batch_stats"])
        targets = jax.nn.one_hot(labels, CLASSES)
        loss = jnp.mean(optax.softmax_cross_entropy(logits, targets))
        kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
        penalty = DECAY / 2 * sum(jnp.sum(kernel**2) for kernel in kernels)
        return loss + penalty, changed["batch_stats"]

    (loss, batch_stats), gradients = jax.value_and_grad(compute_loss, has_aux=True)(state.params)
    updates, momentum = optimizer.update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), batch_stats, momentum), loss
