"""Grad-CAM with JAX: where a stage's features support a class."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.backends.jax.model import Array, Arrays, Pass
from lockstep.backends.jax.programs import normalise
from lockstep.backends.jax.world import JaxWorld
from lockstep.backends.shared.channels_last import convert_all, new_arrays
from lockstep.backends.shared.explained_stage import choose_stage
from lockstep.models.architectures import Block
from lockstep.recipes import Recipe


class Explainer:
    """Weights in float32, without quantisation, whose stages can be differentiated."""

    def __init__(self, recipe: Recipe, tensors: dict[str, np.ndarray], world: JaxWorld) -> None:
        recipe = recipe.replace(precision="fp32", quantisation="none")
        arrays = convert_all(new_arrays(recipe), tensors, "weights")
        self._values = world.replicate(arrays)
        compute_heat = partial(_compute_heat, recipe, on_gpu=world.on_gpu)
        self._heat = jax.jit(compute_heat, static_argnames="stage")

    def heat(self, images: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return Grad-CAM (arXiv:1610.02391) of the last stage that is large enough: float32
        [N, height, width] of its output, at least 0.

        `images` are uint8 [N, size, size, 3], `classes` int64 [N]: the output of each image to
        explain.
        """
        stage = choose_stage(min(images.shape[1:3]))
        return np.asarray(self._heat(self._values, images, classes.astype(np.int32), stage=stage))


class _StagePass(Pass):
    """A pass in evaluation that keeps a stage's output, and adds something to it."""

    def __init__(
        self, recipe: Recipe, values: Mapping[str, Array], stage: int, added: Array, **options: Any
    ) -> None:
        super().__init__(recipe, values, training=False, **options)
        names = [block.name for block in recipe.spec.list_blocks()]
        self._last = [name for name in names if name.startswith(f"layer{stage}.")][-1]
        self._added = added
        self.output: Array = None

    def _block(self, x: Array, block: Block, kept: Array | None) -> Array:
        x = super()._block(x, block, kept)
        if block.name == self._last:
            self.output = x
            x = x + self._added
        return x


def _compute_heat(
    recipe: Recipe, values: Arrays, images: Array, classes: Array, *, stage: int, on_gpu: bool
) -> Array:
    x = normalise(recipe, images)

    def choose_logits(added: Array) -> tuple[Array, Array]:
        """Return the sum of the classes' logits, and the stage's output."""
        run = _StagePass(recipe, values, stage, added, on_gpu=on_gpu)
        logits = run.logits(x)
        return jnp.take_along_axis(logits, classes[:, None], axis=1).sum(), run.output

    # The gradient with respect to what is added to the output is that of the output.
    _, output = jax.eval_shape(choose_logits, jnp.zeros(()))
    gradient, features = jax.grad(choose_logits, has_aux=True)(jnp.zeros(output.shape))
    weights = gradient.mean(axis=(1, 2), keepdims=True)
    return jnp.maximum((weights * features).sum(axis=3), 0)
