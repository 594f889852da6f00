"""The training step in plain NumPy, by default in float64. It is written to be readable; small
models train in seconds.

The state is float32 at the end of every step, as on every engine, so that a run can be read,
written and resumed exactly. Between two states, everything is computed in float64.

A step of every engine, on a batch with these arrays:

| array of a batch | shape |
|---|---|
| `images`, `labels` | uint8 [N, H, W, 3], [N] |
| MixUp, CutMix: `coefficients`, `partners` | [N]; indices within the part |
| CutMix: `target_coefficients`, `boxes` | [N], [N, 4]: top, left, height, width |
| dropout: `kept_features`; stochastic depth: `kept_blocks` | bool [N, features]; bool [N, blocks] |

1. Split the rows into `execution.accumulation_steps` equal parts, in order. For each part:
   1. Normalise: x = (images - mean) / std in float32. MixUp: x = c x + (1 - c) x[partners];
      CutMix: c = 0 inside the box.
   2. Compute logits in the recipe's precision; cast the float32 weights for convolutions and
      products. Dropout: divide kept features by 1 - dropout, set others to 0. Stochastic depth:
      divide the output of a block's last batch norm by 1 - rate
      (`recipes.stochastic_depth.drop_rates`) for images that keep the block, set it to 0 for
      others, then add the shortcut. Batch norm uses the mean and biased variance of this part on
      this rank (of all ranks if `batch_norm` is "synchronised"); running statistics move with
      weight `bn_momentum`, with unbiased variance. Norms in `recipes.trained_tensors.frozen_norms`
      compute as in evaluation, and their statistics stay.
   3. Loss of an image: cross-entropy in float32 with target (1 - s) one-hot + s / logits. MixUp
      and CutMix: c times the loss of the label plus (1 - c) times that of the partner's, with
      CutMix's target coefficient as c. Class weights: the sum over k of -weight[k] target[k] log
      p[k]. "binary_cross_entropy": mean or sum over k of -(target[k] log s[k] + (1 - target[k])
      log(1 - s[k])), s the sigmoid; `target_threshold`: 1 where a mixed target is above
      `Recipe.binarised_above`, else 0.
   4. Go backward from scale / parts * (mean loss of the part), no further than the lowest trained
      tensor; add up gradients. Count hits against the image's own label.
2. Average gradients over ranks, divide by the loss scale, set masked ones to 0. `clip_norm`:
   multiply all by min(1, clip_norm / (norm + 1e-6)), norm over all trained tensors together.
3. Update the tensors in `recipes.trained_tensors.rate_factors`, with rate = learning_rates[step]
   times the factor, read on the device: v = momentum v + (g + decay w); w = w - rate v. Nesterov:
   w = w - rate (g + decay w + momentum v), with the new v. Decay only where
   `recipe.decays(tensor)`. Other optimizers: `Recipe.optimizer`, with corrections by
   `recipes.schedule.find_corrections` for the step's number, skipped steps included. With dynamic
   loss scaling, any gradient on any rank that is not finite skips the update.
4. Grow the scale after `loss_scale_growth_steps` good steps in a row, shrink it after
   `loss_scale_backoff_steps` bad ones. A count restarts after it changes the scale, and after a
   step of the other kind.
5. Average what a step changes (`changing_tensors`), statistics too: average = keep average + (1 -
   keep) tensor, keep from `recipes.schedule.ema_decays` (1 where `ema_every_steps` skips a step).
   Steps count from 0.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep.backends import Interval, World
from lockstep.backends.reference import functions as f
from lockstep.backends.reference import update
from lockstep.backends.reference.model import Network
from lockstep.backends.reference.update import LossScale, Pace, Values
from lockstep.backends.shared.device import build_memory_error
from lockstep.data import Batch
from lockstep.models.metrics import Counts, Scores
from lockstep.models.quantisation import check_scales, layers
from lockstep.models.state import State, check_fit, check_masks
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.class_weights import read_class_weights
from lockstep.recipes.initial_weights import initial_second_moments
from lockstep.recipes.mixing import weigh_pixels
from lockstep.recipes.schedule import ema_decays, find_corrections
from lockstep.recipes.trained_tensors import changing_tensors, rate_factors

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class ReferenceHandle:
    """Steps that are done: this engine does not enqueue."""

    first: int
    losses: np.ndarray
    """float64 [steps]: mean loss of each global batch."""
    counts: Counts
    loss_scale: float
    finished_at: float
    ready: bool = True

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.losses)


class ReferenceEngine:
    """Implements `lockstep.backends.Engine`."""

    def __init__(
        self, recipe: Recipe, learning_rates: np.ndarray, world: World, execution: Execution
    ) -> None:
        self._recipe = recipe
        self._learning_rates = learning_rates
        self._ema_decays = ema_decays(recipe, len(learning_rates))
        self._corrections = find_corrections(recipe, len(learning_rates))
        self._parts = execution.accumulation_steps
        self._dtype = np.dtype(execution.reference_dtype)
        table = list(recipe.list_tensors())
        self._decayed = {tensor.name for tensor in table if recipe.decays(tensor)}
        self._rate_factors = rate_factors(recipe)
        self._changing = changing_tensors(recipe)
        self._tensors = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in table}
        self._velocity = {
            tensor.name: np.zeros(tensor.shape, np.float32) for tensor in table if tensor.is_trained
        }
        self._second_moments = initial_second_moments(recipe)
        self._ema = (
            {name: value.copy() for name, value in self._tensors.items()}
            if recipe.ema_decay
            else {}
        )
        self._class_weights = read_class_weights(recipe.class_weights)
        self._masks: dict[str, np.ndarray] = {}
        self._scales: dict[str, float] | None = None
        self._scale = LossScale(recipe)
        self._done = 0

    def __enter__(self) -> "ReferenceEngine":
        return self

    def __exit__(self, *error: object) -> None:
        vars(self).clear()  # as in the PyTorch backend

    # Training

    def train(self, batches: Iterable[Batch], first: int) -> ReferenceHandle:
        """Execute one optimizer step for every batch, numbered from `first`."""
        losses = []
        counts = Counts()
        # NumPy's warnings are off, since overflow is expected: an infinite loss is reported, and an
        # infinite fp16 gradient skips a step.
        with np.errstate(over="ignore", invalid="ignore"):
            for step, batch in enumerate(batches, first):
                try:
                    done = self._step(batch, step)
                except MemoryError as error:
                    raise build_memory_error(
                        len(batch.labels), self._parts, str(error) or "none is left"
                    ) from None
                losses.append(done.loss_sum / done.images)
                counts += done
        return ReferenceHandle(
            first, np.array(losses, np.float64), counts, self._scale.value, time.perf_counter()
        )

    def _step(self, batch: Batch, step: int) -> Counts:
        """Add up the gradients of all parts, each of the mean loss of its images, and update the
        state."""
        gradients = {
            name: np.zeros(self._tensors[name].shape, self._dtype) for name in self._rate_factors
        }
        counts = Counts()
        for rows in np.split(np.arange(len(batch.labels)), self._parts):
            part, part_counts = self._gradients(batch, rows)
            for name in gradients:
                gradients[name] += part[name] / self._scale.value
            counts += part_counts
        # A masked weight and its decay are 0. Without a gradient they stay 0.
        for name, mask in self._masks.items():
            if name in gradients:
                gradients[name] = np.where(mask, gradients[name], 0)
        overflow = self._scale.is_dynamic and not all(
            np.isfinite(g).all() for g in gradients.values()
        )
        if not overflow:
            if self._recipe.clip_norm:
                gradients = update.clip(gradients, self._recipe.clip_norm)
            self._update(gradients, step)
        if self._scale.is_dynamic:
            self._scale.adapt(overflow)
        self._average(step)
        self._done = step + 1
        return counts

    def _gradients(self, batch: Batch, rows: np.ndarray) -> tuple[Arrays, Counts]:
        """Return the gradients of scale / parts * (mean loss of these rows), and the rows' sums.

        Running statistics are updated.
        """
        x, target = self._mix(batch, rows)
        network = Network(
            self._recipe, self._convert(self._tensors), training=True, scales=self._scales
        )
        kept = (
            None if column is None else column[rows]
            for column in (batch.kept_features, batch.kept_blocks)
        )
        logits, back = network.logits(x, *kept)
        if self._recipe.loss == "binary_cross_entropy":
            reduction = self._recipe.class_reduction
            losses, d_logits = f.binary_cross_entropy(logits, target, reduction)
        else:
            losses, d_logits = f.cross_entropy(logits, target)
        back(d_logits() * (self._scale.value / self._parts))
        for name, value in network.statistics.items():
            self._tensors[name] = value.astype(np.float32)
        ranks = f.rank_labels(logits, batch.labels[rows])
        sums = Counts(
            float(losses.astype(np.float64).sum()),
            int((ranks < 1).sum()),
            int((ranks < 5).sum()),
            len(rows),
        )
        return network.gradients, sums

    def _mix(self, batch: Batch, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return normalised images [n, H, W, 3] and targets [n, K] of some rows, mixed as the batch
        says."""
        x = self._normalise(batch.pixels[rows])
        target = self._targets(batch.labels[rows])
        if batch.coefficients is not None and batch.partners is not None:
            partners = batch.partners[rows]
            own = batch.coefficients[rows].astype(self._dtype)
            boxes = None if batch.boxes is None else batch.boxes[rows]
            x = f.mix(x, weigh_pixels(own, boxes, *x.shape[1:3]), partners)
            if batch.target_coefficients is not None:
                own = batch.target_coefficients[rows].astype(self._dtype)
            target = f.mix(target, own, partners)
        if self._class_weights is not None:
            target = target * self._class_weights.astype(self._dtype)
        above = self._recipe.binarised_above
        return x, target if above is None else f.binarise(target, above)

    def _update(self, gradients: Arrays, step: int) -> None:
        """Move trained weights by the optimizer's rule."""
        rate = float(self._learning_rates[step])
        corrections = {name: float(table[step]) for name, table in self._corrections.items()}
        for name, gradient in gradients.items():
            kept = (self._tensors, self._velocity, self._second_moments)
            values = Values(*(v[name].astype(self._dtype) for v in kept if v))
            decay = self._recipe.weight_decay if name in self._decayed else 0.0
            pace = Pace(rate * self._rate_factors[name], decay, corrections)
            moved = update.step(self._recipe, values, gradient, pace)
            for old, new in zip(kept, moved, strict=True):
                if new is not None:
                    old[name] = new.astype(np.float32)

    def _average(self, step: int) -> None:
        """Update averages of what changes: average = decay * average + (1 - decay) * tensor."""
        keep = float(self._ema_decays[step])
        for name in self._changing if self._ema else []:
            value = self._ema[name].astype(self._dtype)
            average = keep * value + (1 - keep) * self._tensors[name].astype(self._dtype)
            self._ema[name] = average.astype(np.float32)

    def _normalise(self, images: np.ndarray) -> np.ndarray:
        mean = np.array(self._recipe.mean, self._dtype)
        std = np.array(self._recipe.std, self._dtype)
        return f.normalise(images.astype(self._dtype), mean, std)

    def _targets(self, labels: np.ndarray) -> np.ndarray:
        return f.targets(
            labels, self._recipe.logits, smoothing=self._recipe.label_smoothing, dtype=self._dtype
        )

    def _convert(self, state: Mapping[str, np.ndarray]) -> Arrays:
        """Return float32 tensors in the dtype of the computation."""
        return {name: value.astype(self._dtype) for name, value in state.items()}

    def fetch(self, handle: ReferenceHandle) -> Interval:
        """Return the results of the steps."""
        return Interval(
            handle.first, handle.losses, handle.counts, handle.loss_scale, handle.finished_at
        )

    # Inference

    def evaluate(
        self, batches: Iterable[Batch], *, ema: bool = False, with_logits: bool = False
    ) -> Scores:
        """Return the scores of every image that is not padding."""
        recipe = self._recipe.evaluation_recipe()
        rows = [np.zeros((0, 5 + recipe.logits * with_logits))]
        for batch in batches:
            counted = batch.labels >= 0
            pixels = batch.pixels[counted]
            logits = self._logits(pixels, recipe, ema=ema)
            if recipe.eval_flips:
                logits = (logits + self._logits(pixels[:, :, ::-1], recipe, ema=ema)) / 2
            scores = f.score(logits, batch.labels[counted])
            rows.append(np.hstack([scores, logits]) if with_logits else scores)
        return Scores.unpack_table(np.concatenate(rows))

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        return self._logits(images, self._recipe).astype(np.float32)

    def _logits(self, images: np.ndarray, recipe: Recipe, *, ema: bool = False) -> np.ndarray:
        """Return logits in the recipe's precision."""
        with np.errstate(over="ignore", invalid="ignore"):
            weights = self._convert(self._ema if ema else self._tensors)
            network = Network(recipe, weights, training=False, scales=self._scales)
            return network.logits(self._normalise(images))[0]

    # Quantisation

    def calibrate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the largest magnitude of the input of every quantised layer, over all images."""
        largest = dict.fromkeys(layers(self._recipe.spec), 0.0)
        weights = self._convert(self._tensors)
        for batch in batches:
            with np.errstate(over="ignore", invalid="ignore"):
                network = Network(self._recipe, weights, training=False, largest=largest)
                network.logits(self._normalise(batch.pixels))
        return largest

    def quantise(self, scales: Mapping[str, float]) -> None:
        """Quantise the inputs of layers with these scales from here on."""
        check_scales(self._recipe.spec, scales)
        self._scales = dict(scales)

    # State

    def read(self) -> State:
        """Return a copy of the state."""
        tensors, velocity, average, second_moments = (
            {name: value.copy() for name, value in values.items()}
            for values in (self._tensors, self._velocity, self._ema, self._second_moments)
        )
        return State(self._done, tensors, velocity, average, self._scale.read(), second_moments)

    def write(self, state: State) -> None:
        """Replace the state. Raises `CheckpointError` if it does not fit."""
        for mine, values, what in (
            (self._tensors, state.tensors, "tensors"),
            (self._velocity, state.momentum, "momentum"),
            (self._ema, state.ema, "moving averages"),
            (self._second_moments, state.second_moments, "second moments"),
        ):
            check_fit({name: value.shape for name, value in mine.items()}, values, what)
            mine.update({name: np.array(values[name], np.float32) for name in mine})
        self._scale.write(state.scaler)
        self._done = state.step
        self._apply_masks()

    def mask(self, masks: Mapping[str, np.ndarray]) -> None:
        """Keep weights at 0 where a mask is False. The masks replace all masks set before."""
        check_masks({name: value.shape for name, value in self._velocity.items()}, masks)
        self._masks = {name: np.array(mask, bool) for name, mask in masks.items()}
        self._apply_masks()

    def _apply_masks(self) -> None:
        for name, mask in self._masks.items():
            for values in (self._tensors, self._velocity, self._ema, self._second_moments):
                if name in values:
                    values[name] = np.where(mask, values[name], np.float32(0))
