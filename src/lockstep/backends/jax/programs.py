"""What an engine compiles: a training step, logits and scores, as functions without state.

Engines of the same recipe in one process share them, so that it is compiled once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.backends.jax.batch_norm import ALONE, OverRanks
from lockstep.backends.jax.convolutions import keep_known_options, list_cpu_options
from lockstep.backends.jax.losses import ImageLosses, mix_images, rank_labels, score_images
from lockstep.backends.jax.model import COMPUTED_IN, Array, Arrays, Pass
from lockstep.backends.jax.update import (
    Numbers,
    Pace,
    Update,
    Values,
    clear_removed,
    drop_numbers,
)
from lockstep.backends.jax.world import JaxWorld
from lockstep.backends.shared.batch_columns import Columns
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.trained_tensors import rate_factors


class Rows(NamedTuple):
    """A batch on the device."""

    images: Array
    """uint8 [N, H, W, 3]."""
    labels: Array
    columns: Columns


@dataclass(frozen=True)
class Programs:
    """The compiled functions of engines."""

    step: Callable[[Values, Arrays, Arrays, Pace, Numbers, Rows], tuple[Values, Array]]
    """A training step; see `Step.take`. The memory of the values before it becomes that of the
    values after it."""
    logits: Callable[[Arrays, Arrays, Array], Array]
    """Tensors, scales and uint8 images [N, H, W, 3] to float32 logits [N, logits]."""
    scores: Callable[[Arrays, Arrays, Array, Array], tuple[Array, Array]]
    """Tensors, scales, images and labels to scores, float32 [N, 5], as `score_images` returns
    them, and logits."""
    largest_inputs: Callable[[Arrays, Array], Arrays]
    """Tensors and images to the largest magnitude of each layer's input, without quantisation."""


class Helpers(NamedTuple):
    """Small compiled functions of all engines of a world."""

    find_pace: Callable[[Pace, Array], Pace]
    """A table and the number of a step to its row."""
    copy: Callable[[Array], Array]
    gather: Callable[[Array], Array]
    """A table to the rows of all ranks."""
    take_first: Callable[[Arrays, Array], Arrays]
    """Arrays, and whether this rank is the first, to the arrays of the first rank."""
    clear_removed: Callable[[Values, Arrays], Values]


@lru_cache(1)
def find_helpers(world: JaxWorld) -> Helpers:
    """Return the helpers of a world, which are compiled when they are first called."""

    def take_first(arrays: Arrays, is_first: Array) -> Arrays:
        own = [jnp.where(is_first, array, 0) for array in arrays.values()]
        return dict(zip(arrays, world.sum(own), strict=True))

    return Helpers(
        world.jit(lambda table, step: jax.tree.map(lambda column: column[step], table)),
        world.jit(lambda array: array + 0),
        world.jit(world.gather),
        world.jit(take_first),
        world.jit(clear_removed, donate_argnums=0),
    )


_KEPT = 64
"""Number of recipes and executions whose functions are kept."""


def find_programs(recipe: Recipe, execution: Execution, world: JaxWorld) -> Programs:
    """Return the functions of a recipe, which are compiled when they are first called."""
    return _build_programs(_Key(drop_numbers(recipe)), _Key(execution), world)


class _Key:
    """Settings as a key: equal if all of their fields are."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._text = settings.model_dump_json()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(_KEPT)
def _build_programs(recipe_key: _Key, execution_key: _Key, world: JaxWorld) -> Programs:
    recipe: Recipe = recipe_key.settings
    execution: Execution = execution_key.settings
    options = list_compiler_options(execution, on_gpu=world.on_gpu)
    step = Step(recipe, execution, world)
    exact = recipe.evaluation_recipe()
    on_gpu = world.on_gpu

    def score(tensors: Arrays, scales: Arrays, images: Array, labels: Array) -> tuple[Array, Array]:
        logits = compute_logits(exact, tensors, scales, images, on_gpu=on_gpu)
        if recipe.eval_flips:
            flipped = lax.rev(images, (2,))
            mirrored = compute_logits(exact, tensors, scales, flipped, on_gpu=on_gpu)
            logits = (logits + mirrored) / 2
        return score_images(logits, labels), logits

    def find_largest_inputs(tensors: Arrays, images: Array) -> Arrays:
        run = Pass(recipe, tensors, training=False, on_gpu=on_gpu)
        run.logits(normalise(recipe, images))
        return run.largest_inputs

    return Programs(
        world.jit(step.take, donate_argnums=0, compiler_options=options),
        jax.jit(partial(compute_logits, recipe, on_gpu=on_gpu), compiler_options=options),
        jax.jit(score, compiler_options=options),
        jax.jit(find_largest_inputs, compiler_options=options),
    )


QUICKLY_COMPILED = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""XLA's options that compile a step of a small model several times faster."""


def list_compiler_options(execution: Execution, *, on_gpu: bool) -> dict[str, Any]:
    """Return XLA's options for an execution."""
    options: dict[str, Any] = {}
    if not on_gpu:
        options |= list_cpu_options()
    if execution.compile == "off":
        options |= keep_known_options(QUICKLY_COMPILED)
    if on_gpu and execution.deterministic:
        options["xla_gpu_deterministic_ops"] = True
    return options


def compute_logits(
    recipe: Recipe, tensors: Arrays, scales: Arrays, images: Array, *, on_gpu: bool
) -> Array:
    """Return float32 logits [N, logits] of uint8 images [N, H, W, 3]. There are no `scales` where
    nothing is quantised."""
    run = Pass(recipe, tensors, training=False, on_gpu=on_gpu, scales=scales or None)
    return run.logits(normalise(recipe, images))


def normalise(recipe: Recipe, images: Array) -> Array:
    """Return uint8 images as float32, (x - mean) / std."""
    mean, std = (np.array(colours, np.float32) for colours in (recipe.mean, recipe.std))
    return (images.astype(jnp.float32) - mean) / std


class Step:
    """A training step."""

    def __init__(self, recipe: Recipe, execution: Execution, world: JaxWorld) -> None:
        self._recipe = recipe
        self._world = world
        self._parts = execution.accumulation_steps
        self._sent = COMPUTED_IN.get(execution.all_reduce_precision)
        self._recomputes = execution.recompute == "blocks"
        is_synchronised = recipe.batch_norm == "synchronised" and world.ranks > 1
        self._over = OverRanks(world.sum, world.ranks) if is_synchronised else ALONE
        self._losses = ImageLosses(recipe)
        self._update = Update(recipe)
        self._trained = list(rate_factors(recipe))

    def take(
        self,
        values: Values,
        removed: Arrays,
        scales: Arrays,
        pace: Pace,
        numbers: Numbers,
        rows: Rows,
    ) -> tuple[Values, Array]:
        """Return the values after a step, and float32 [4]: sum of losses, top-1 and top-5 hits,
        number of images, of all ranks. Masks have `removed` weights: bool, by name. Inputs are
        quantised with `scales`, by layer; there are none where nothing is quantised."""
        gradients, statistics, sums = self._differentiate(values, scales, rows)
        if self._world.ranks > 1:
            totals = self._world.sum(list(gradients.values()), self._sent)
            gradients = dict(zip(gradients, totals, strict=True))
            (sums,) = self._world.sum([sums])
        values = values._replace(tensors=values.tensors | statistics)
        return self._update.apply(values, gradients, removed, pace, numbers), sums

    def _differentiate(
        self, values: Values, scales: Arrays, rows: Rows
    ) -> tuple[Arrays, Arrays, Array]:
        """Return the gradients of scale / ranks * (mean loss), added up over the parts, the running
        statistics after it, and the sums."""
        if self._parts == 1:
            return self._differentiate_part(values, scales, {}, rows)
        parts = jax.tree.map(
            lambda column: column.reshape(self._parts, -1, *column.shape[1:]), rows
        )

        def add(total: tuple[Arrays, Arrays, Array], part: Rows) -> tuple[Any, None]:
            gradients, statistics, sums = total
            more, statistics, more_sums = self._differentiate_part(values, scales, statistics, part)
            added = {name: gradients[name] + more[name] for name in gradients}
            return (added, statistics, sums + more_sums), None

        first = jax.tree.map(lambda column: column[0], parts)
        _, changing, _ = jax.eval_shape(self._differentiate_part, values, scales, {}, first)
        start = (
            {name: jnp.zeros_like(values.tensors[name]) for name in self._trained},
            {name: values.tensors[name] for name in changing},
            jnp.zeros(4, jnp.float32),
        )
        return lax.scan(add, start, parts)[0]

    def _differentiate_part(
        self, values: Values, scales: Arrays, statistics: Arrays, rows: Rows
    ) -> tuple[Arrays, Arrays, Array]:
        """Return the gradients, statistics and sums of a part, which starts from `statistics`."""
        x = normalise(self._recipe, rows.images)
        columns = rows.columns
        target: tuple[Array, ...] = ()
        if columns.partners is not None:
            x = mix_images(x, columns.coefficients, columns.partners, columns.boxes)
            target = (columns.target_coefficients, columns.partners)
        tensors = values.tensors | statistics
        factor = values.scale.value / (self._parts * self._world.ranks)

        def compute_loss(trained: Arrays) -> tuple[Array, tuple[Array, Array, Arrays]]:
            run = Pass(
                self._recipe,
                tensors | trained,
                training=True,
                on_gpu=self._world.on_gpu,
                over=self._over,
                recompute=self._recomputes,
                scales=scales or None,
            )
            logits = run.logits(x, columns.kept_features, columns.kept_blocks)
            losses = self._losses(logits, rows.labels, *target)
            return jnp.mean(losses) * factor, (losses, logits, run.statistics)

        # Only what leads to a trained tensor is computed backwards.
        trained = {name: tensors[name] for name in self._trained}
        gradients, (losses, logits, moved) = jax.grad(compute_loss, has_aux=True)(trained)
        rank = rank_labels(logits, rows.labels)
        sums = [losses, rank < 1, rank < 5, jnp.ones_like(losses)]
        return gradients, moved, jnp.stack([jnp.sum(x.astype(jnp.float32)) for x in sums])
