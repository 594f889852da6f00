"""Build the workload of every backend: arrays in files, so that a worker can be any Python."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data import Batch
from lockstep.data.index import open_index
from lockstep.data.loading.loaders import make_loader, plan_training
from lockstep.data.textures import draw_data_set
from lockstep.models.architectures import model_spec, narrow_model
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.recipes.order import BatchPlan, evaluation_plans
from lockstep.recipes.schedule import learning_rates

Arrays = dict[str, np.ndarray]

PEAK_LR = 1e-4
"""Peak learning rate of the free run. At rates useful for training, rounding soon leads to another
trajectory (docs/explanation/numerics.md)."""
DECAY = 0.5
"""Weight decay of the step that shows which weights are decayed. A gradient's rounding would hide a
recipe's own decay."""
FINE_TUNING: dict[str, Any] = {
    "frozen": ("conv1", "bn1", "layer1", "layer2.0.conv1.weight", "layer3.0.bn1", "fc.bias"),
    "lr_multipliers": {"backbone": 0.5, "layer4": 2, "fc": 3},
    "lr_depth_decay": 0.9,
}
"""The frozen tensors, and the rates by tensor, in the step that shows them. Every model has these
tensors: below the lowest trained one, and between trained ones."""
DRAWN: dict[str, Any] = {
    "sampling": "square_root",
    "repeated_augmentation": 2,
    "crop": "random",
    "vertical_flip_probability": 0.5,
    "training_interpolation": "random",
    "dropout": 0.25,
    "stochastic_depth": 0.5,
    "mixup_alpha": 0.2,
    "cutmix_alpha": 1.0,
    "mix_probability": 0.8,
    "mixup_coefficient": "sample",
    "mixup_pairing": "permutation",
}
"""Fields of plans in which everything is drawn that can be."""
SQUEEZED = 64
"""Divisor of the first kernels of squeeze-and-excitation, so that sigmoids get inputs of order
1."""
BINARY: dict[str, Any] = {
    "loss": "binary_cross_entropy",
    "target_threshold": 0.15,
    "class_reduction": "sum",  # whose gradient moves weights far enough
    "class_weights": "none",
}
"""The loss of the step that shows binary cross-entropy."""
CROSS_ENTROPY: dict[str, Any] = {
    "loss": "cross_entropy",
    "target_threshold": 0.0,
    "class_reduction": "mean",
}
"""The loss of the step that shows class weights."""
CLIP_NORM = 0.01
"""Limit of a gradient's norm in the steps that show it. Gradients of the workload are far above."""
SHOWN_OPTIMIZERS = [name for name in OPTIMIZERS if name != "sgd"]
"""The optimizers that have steps to show them: other quantities show SGD."""
OPTIMIZER_STEP = 4
"""Number of the step that shows them."""
OPTIMIZER_RATE = 0.1
BATCH = {False: 16, True: 8}
"""Images of a step, by whether the model is full."""


@dataclass(frozen=True)
class Workload:
    """A run with one step in each epoch, on a few drawn images."""

    recipe: Recipe
    data: Path
    initial: State
    """The recipe's own initial state."""
    state: State
    """Another state, in which nothing is 0 or 1 and no ReLU is near switching; see `vary_state`."""
    batches: list[Batch]
    """One batch for every step of the free run."""
    evaluation: list[Batch]
    """Batches of the evaluation; the last one is padded."""

    @property
    def plain_recipe(self) -> Recipe:
        """The recipe with plain SGD: after a step, its velocity is the gradient."""
        return self.recipe.replace(
            optimizer="sgd",
            clip_norm=0.0,
            weight_decay=0.0,
            momentum=self.recipe.momentum or 0.5,
            ema_decay=0.0,
        )

    def optimizer_recipe(self, optimizer: str) -> Recipe:
        """Return the recipe of the step that shows an optimizer."""
        return self.plain_recipe.replace(
            optimizer=optimizer,
            nesterov=False,
            optimizer_epsilon=1e-4,
            clip_norm=CLIP_NORM,
            weight_decay=DECAY,
            ema_decay=0.25,  # so that averages move further than their rounding
            ema_start="constant",
            ema_scaling="none",
            epochs=1,
            # so that some of these steps update averages and others do not
            ema_every_steps=2 + SHOWN_OPTIMIZERS.index(optimizer),
        )

    @property
    def optimizer_state(self) -> State:
        """The varied state with velocities and second moments, as after some steps."""
        random = np.random.default_rng(2)
        size = CLIP_NORM / 10
        momentum = {}
        second_moments = {}
        for name, value in self.state.momentum.items():
            momentum[name] = random.normal(0, size, value.shape).astype(np.float32)
            drawn = random.uniform(0.5, 1.5, value.shape) * size**2
            second_moments[name] = drawn.astype(np.float32)
        return replace(self.state, momentum=momentum, second_moments=second_moments)

    @property
    def rates(self) -> np.ndarray:
        """Learning rates of all steps, over warm-up and decay."""
        return learning_rates(self.recipe, steps_per_epoch=1)

    @property
    def telling_step(self) -> int:
        """The step whose rate differs most from the rates before and after it."""
        changes = np.abs(np.diff(self.rates))
        return int(np.minimum(changes[:-1], changes[1:]).argmax()) + 1

    @property
    def large_rates(self) -> np.ndarray:
        """The same rates with a peak that moves weights further than their rounding: 1 if gradients
        have the size of cross-entropy's."""
        return self.rates / self.rates.max() * _shrink_of_gradients(self.recipe)


def build(
    folder: Path, recipe: str | Recipe, model: str | None, steps: int, precision: str, full: bool
) -> Workload:
    """Draw images into `folder`; return a recipe's model, weights, batches and schedule, compressed
    to `steps` steps."""
    base = load_recipe(recipe)
    spec = model_spec(model or base.model)
    peak = PEAK_LR * _shrink_of_gradients(base)
    recipe = base.replace(
        model=(model or base.fields()["model"]) if full else narrow_model(spec),
        precision=precision,
        quantisation="none",
        frozen=(),  # a narrow model may not have these tensors
        lr_multipliers={},
        lr_depth_decay=1.0,
        epochs=steps,
        warmup_epochs=base.warmup_epochs and max(steps // 4, 1),
        warmup_from_batch_images=0,
        lr_step_epochs=[epoch * steps / base.epochs for epoch in base.lr_step_epochs],
        lr=peak,
        lr_scaling="none",
        lr_end=min(base.lr_end, peak),
        warmup_start_lr=min(base.warmup_start_lr, peak),
        global_batch_images=BATCH[full],
        optimizer="sgd",  # others divide by gradients, so that rounding moves weights far
        ema_decay=base.ema_decay or 0.99,
        **_choose_sizes(base, steps, full),
    )
    data = folder / "images"
    # More than a step takes: every epoch leaves out different images, and the last batch of an
    # evaluation is not full.
    images = 10 * (recipe.global_batch_images // 10 + 1)
    draw_data_set(data, train_images=images, val_images=images)
    recipe = recipe.settle_class_weights(open_index(data / "train").rows["label"])
    training, validation = load_batches(recipe, data)
    initial = initial_state(recipe.replace(ema_decay=0.0))
    batches = [batch for _, batch in training]
    evaluation = [batch for _, batch in validation]
    return Workload(recipe, data, initial, vary_state(recipe, initial), batches, evaluation)


def _shrink_of_gradients(recipe: Recipe) -> int:
    """Return how many times smaller the recipe's gradients are than those of a sum over classes."""
    is_mean = recipe.loss == "binary_cross_entropy" and recipe.class_reduction == "mean"
    return recipe.logits if is_mean else 1


def _choose_sizes(recipe: Recipe, steps: int, full: bool) -> dict[str, Any]:
    """Return the fields of a free run whose images become smaller after half of the steps."""
    size = recipe.image_size if full else 64
    smaller = max(size * 3 // 4, 32)
    resize, crop = (recipe.eval_resize, recipe.eval_crop) if full else (72, 64)
    return {
        "image_size": smaller,
        "image_sizes": [[0, size], [steps // 2, smaller]],
        "eval_resize": resize,
        "eval_crop": crop,
    }


def vary_state(recipe: Recipe, initial: State) -> State:
    """Return a state with the kernels of `initial`, random values elsewhere, and ReLUs that are far
    from switching.

    Random values show every tensor that is forgotten or mixed up. A gradient jumps where rounding
    decides the sign of a value before a ReLU, which happens somewhere in a whole model. Therefore
    batch norm biases are six deviations from 0. A ReLU then passes all values of a channel; in a
    third of the channels within a block it passes none.
    """
    random = np.random.default_rng(0)
    tensors = dict(initial.tensors)
    for tensor in recipe.list_tensors():
        if tensor.role in ("bn_scale", "bn_var"):
            tensors[tensor.name] = random.uniform(0.5, 1.5, tensor.shape).astype(np.float32)
        elif tensor.role in ("bn_mean", "se_bias", "fc_bias"):
            tensors[tensor.name] = random.normal(0, 0.3, tensor.shape).astype(np.float32)
    for conv in recipe.spec.list_convolutions():
        tensors[f"{conv.bn_name}.bias"] = 6 * tensors[f"{conv.bn_name}.weight"]
    for block in recipe.spec.list_blocks():
        tensors[f"{block.convs[-2].bn_name}.bias"][::3] *= -1
        if block.squeeze is not None:
            # Means are large here. The rounding of their sums would be that of the sigmoid's input.
            first = f"{block.squeeze.first}.weight"
            tensors[first] = tensors[first] / np.float32(SQUEEZED)
    return State(0, tensors, initial.momentum)


def load_batches(
    recipe: Recipe, data: Path
) -> tuple[list[tuple[BatchPlan, Batch]], list[tuple[BatchPlan, Batch]]]:
    """Return plans and batches of a whole training and of an evaluation, as this environment's host
    loader makes them."""
    training = open_index(data / "train")
    validation = open_index(data / "val")
    to_train = list(plan_training(training, recipe, 0))
    to_evaluate = list(
        evaluation_plans(recipe, validation.sizes_for(recipe), recipe.global_batch_images)
    )
    with make_loader(training, recipe, Execution()) as loader:
        trained = list(zip(to_train, loader.batches(to_train), strict=True))
    with make_loader(validation, recipe, Execution(), evaluation=True) as loader:
        return trained, list(zip(to_evaluate, loader.batches(to_evaluate), strict=True))


def save(workload: Workload, folder: Path) -> None:
    """Write a workload for `load`."""
    (folder / "recipe.yaml").write_text(workload.recipe.format_yaml(), encoding="utf-8")
    arrays = (
        add_prefix("initial", workload.initial.tensors)
        | add_prefix("varied", workload.state.tensors)
        | add_prefix("momentum", workload.initial.momentum)
    )
    for kind, batches in (("train", workload.batches), ("evaluate", workload.evaluation)):
        for i, batch in enumerate(batches):
            for field in fields(Batch):
                value = getattr(batch, field.name)
                if isinstance(value, np.ndarray):
                    arrays[f"{kind}/{i}/{field.name}"] = value
    save_arrays(folder / "workload.npz", arrays)


def load(folder: Path) -> Workload:
    """Return what `save` wrote."""
    arrays = load_arrays(folder / "workload.npz")
    recipe = load_recipe(str(folder / "recipe.yaml"))
    momentum = part(arrays, "momentum")
    return Workload(
        recipe,
        folder / "images",
        initial=State(0, part(arrays, "initial"), momentum),
        state=State(0, part(arrays, "varied"), momentum),
        batches=_load_kind(arrays, "train"),
        evaluation=_load_kind(arrays, "evaluate"),
    )


def _load_kind(arrays: Arrays, kind: str) -> list[Batch]:
    batches: list[Batch] = []
    while columns := part(arrays, f"{kind}/{len(batches)}"):
        values: dict[str, Any] = columns
        batches.append(Batch(**values))
    return batches


def part(arrays: Arrays, name: str) -> Arrays:
    """Return the arrays below a name; the name is removed from their keys."""
    prefix = f"{name}/"
    below = {}
    for key, value in arrays.items():
        if key.startswith(prefix):
            below[key.removeprefix(prefix)] = value
    return below


def add_prefix(name: str, arrays: Arrays) -> Arrays:
    """Return arrays with names that begin with `name` and a slash."""
    return {f"{name}/{key}": value for key, value in arrays.items()}


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays by name. No array has the name of an option of `np.savez`."""
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_arrays(path: Path) -> Arrays:
    """Return what `save_arrays` wrote."""
    with np.load(path) as file:
        return dict(file)
