"""What changes from step to step, computed before a run starts: the learning rate, the decay of the
moving average, and what the optimizer's formula is corrected by.

u is the index of the unit (step or epoch), W the length of the warm-up and E the length of the run,
in the same unit:

    warm-up      start + (peak - start) * (u + counts_from) / W, for u < W
    cosine       end + (peak - end) * (1 + cos(pi * x)) / 2
    linear       end + (peak - end) * (1 - x)
    polynomial   end + (peak - end) * (1 - x) ^ power
    exponential  peak * (end / peak) ^ x
    step         peak * factor ^ (number of step epochs that have begun)

where x is (u - W) / (E - W), or u / E for a decay from the start.

Sources: NVIDIA's PyTorch code (image_classification/optimizers.py) has cosine, linear, step and
exponential; its main.py offers the first three, and its exponential decay ends at peak / 1000.
NVIDIA's PaddlePaddle and TensorFlow code have cosine, the latter from the start and also step; its
MXNet code of 2019 has step and polynomial (`--lr-step-epochs pow2`).
"""

import numpy as np

from lockstep.models.optimizers import OPTIMIZERS
from lockstep.recipes.limits import MOST_STEPS
from lockstep.recipes.recipe import Recipe
from lockstep.system.errors import RecipeError


def peak_lr(recipe: Recipe) -> float:
    """Return the learning rate at the end of the warm-up."""
    if recipe.lr_scaling == "none":
        return recipe.lr
    return recipe.lr * recipe.global_batch_images / recipe.lr_batch_images


def learning_rates(recipe: Recipe, steps_per_epoch: int) -> np.ndarray:
    """Return the learning rate of every step of a run: float64 [epochs * steps_per_epoch].

    Args:
        recipe: The recipe of the run. A warm-up longer than the run is cut to its length.
        steps_per_epoch: The number of steps of an epoch.

    Raises:
        RecipeError: The run has more than `limits.MOST_STEPS` steps.

    >>> import lockstep
    >>> lockstep.learning_rates(lockstep.load_recipe("tiny.yaml"), steps_per_epoch=3).shape
    (6,)
    """
    count = recipe.epochs * steps_per_epoch
    if count > MOST_STEPS:
        raise RecipeError(
            f"{recipe.epochs} epochs of {steps_per_epoch} steps are {count:,} steps; expected at"
            f" most {MOST_STEPS:,}, because the learning rates of all steps are held in memory. Use"
            " fewer epochs or more images in a step (global_batch_images)"
        )
    steps = np.arange(count)
    if recipe.lr_unit == "epoch":
        units = steps // steps_per_epoch
        per_epoch = 1
    else:
        units = steps
        per_epoch = steps_per_epoch
    length = recipe.epochs * per_epoch
    warmup = min(round(warmup_epochs(recipe) * per_epoch), length)
    peak = peak_lr(recipe)
    rates = _decay(recipe, units, warmup, length, per_epoch, peak)
    rising = units < warmup
    fraction = (units[rising] + recipe.warmup_counts_from) / max(warmup, 1)
    rates[rising] = recipe.warmup_start_lr + (peak - recipe.warmup_start_lr) * fraction
    return rates


def ema_decays(recipe: Recipe, steps: int) -> np.ndarray:
    """Return the decay of the moving average at every step: float64 [steps]. It is 1 where the
    average stays as it is.

    The average becomes `decay * average + (1 - decay) * weights`, by the rules of `ema_decay` and
    the fields after it. NVIDIA's PyTorch code has the low decays of "ramp" in the first steps, so
    that the initial weights are soon forgotten. "copy" and the scaling are those of torchvision's
    references/classification/train.py.
    """
    steps_per_epoch = max(steps // recipe.epochs, 1)
    epoch, place = np.divmod(np.arange(steps), steps_per_epoch)
    updated = place % recipe.ema_every_steps == 0
    decay = recipe.ema_decay
    if recipe.ema_scaling == "torchvision":
        share = recipe.global_batch_images * recipe.ema_every_steps / recipe.epochs
        decay = 1 - min(1.0, (1 - decay) * share)
    decays = np.full(steps, decay)
    if recipe.ema_start == "ramp":
        before = np.cumsum(updated) - updated
        decays = np.minimum(decay, (1 + before) / (10 + before))
    elif recipe.ema_start == "copy":
        after_warmup = np.cumsum(updated & (epoch >= warmup_epochs(recipe)))
        decays[after_warmup <= 1] = 0
    decays[~updated] = 1
    return decays


def find_corrections(recipe: Recipe, steps: int) -> dict[str, np.ndarray]:
    """Return the factors that the optimizer's formula needs (`Optimizer.corrections`) at every
    step: name -> float64 [steps].

    "mean" is that of means of gradients, 1 / (1 - beta1^t), and "root" that of the roots of means
    of squared gradients, 1 / sqrt(1 - beta2^t). t is the number of the step, from 1. Steps that an
    overflow skips count. "nesterov_mean" and "nesterov_gradient" are those of NAdam: of the mean
    with the momentum of the next step, and of the gradient.
    """
    numbers = np.arange(1, steps + 1)
    momenta = recipe.beta1 * (1 - 0.5 * 0.96 ** (np.arange(1, steps + 2) / 250))
    products = np.cumprod(momenta)
    factors = {
        "nesterov_mean": momenta[1:] / (1 - products[1:]),
        "nesterov_gradient": (1 - momenta[:-1]) / (1 - products[:-1]),
        "mean": 1 / (1 - recipe.beta1**numbers),
        "root": 1 / np.sqrt(1 - recipe.beta2**numbers),
    }
    return {name: factors[name] for name in OPTIMIZERS[recipe.optimizer].corrections}


def warmup_epochs(recipe: Recipe) -> float:
    """Return the length of the warm-up in epochs; 0 if a step has too few images for a warm-up."""
    if recipe.global_batch_images < recipe.warmup_from_batch_images:
        return 0.0
    return recipe.warmup_epochs


def _decay(
    recipe: Recipe, units: np.ndarray, warmup: int, length: int, per_epoch: int, peak: float
) -> np.ndarray:
    if recipe.lr_decay == "step":
        boundaries = np.sort(np.array(recipe.lr_step_epochs)) * per_epoch
        return peak * recipe.lr_step_factor ** np.searchsorted(boundaries, units, side="right")
    origin = warmup if recipe.lr_decay_from == "warmup_end" else 0
    progress = np.maximum(units - origin, 0) / max(length - origin, 1)
    if recipe.lr_decay == "exponential":
        return np.asarray(peak * (recipe.lr_end / peak) ** progress)
    if recipe.lr_decay == "cosine":
        shape = (1 + np.cos(np.pi * progress)) / 2
    elif recipe.lr_decay == "polynomial":
        shape = (1 - progress) ** recipe.lr_power
    else:
        shape = 1 - progress
    return np.asarray(recipe.lr_end + (peak - recipe.lr_end) * shape)
