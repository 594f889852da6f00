"""What every engine is given to do: arrays in files, so that a worker may be any Python."""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from lockstep.backends import State
from lockstep.data import Batch
from lockstep.data.host import loader_of
from lockstep.data.index import open_index
from lockstep.data.textures import draw_data_set
from lockstep.models import blocks, convolutions, model_spec, narrowed
from lockstep.order import BatchPlan, evaluation_plans, training_plans
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.schedule import learning_rates
from lockstep.training import initial_state

Arrays = dict[str, np.ndarray]

PEAK_LR = 1e-4
"""Of the free run. At rates that teach something, rounding soon grows into another trajectory (docs/numerics.md)."""
DECAY = 0.5
"""Weight decay of a step that shows which weights are decayed; a recipe's own is lost behind a gradient's rounding."""
BATCH = {False: 16, True: 8}
"""Images of a step: of a narrow model, of a full one."""


@dataclass(frozen=True)
class Workload:
    """A run of one step an epoch on a few drawn images."""

    recipe: Recipe
    data: Path
    state: State
    """The recipe's initial one."""
    steady: State
    """Another, in which no rounding switches a ReLU; see `steadied`."""
    batches: list[Batch]
    """One for every step; `batches[0]` is also what single steps and logits are computed on."""
    evaluation: list[Batch]
    """The last one is padded."""

    @property
    def rates(self) -> np.ndarray:
        """Learning rates of all steps, over warm-up and decay."""
        return learning_rates(self.recipe, steps_per_epoch=1)

    @property
    def telling_step(self) -> int:
        """The step whose rate differs most from those before and behind it."""
        changes = np.abs(np.diff(self.rates))
        return int(np.minimum(changes[:-1], changes[1:]).argmax()) + 1

    @property
    def large_rates(self) -> np.ndarray:
        """The same rates with a peak of 1, which moves weights far enough to be seen behind their rounding."""
        return self.rates / self.rates.max()


def build(folder: Path, recipe: str | Recipe, model: str | None, steps: int, precision: str, full: bool) -> Workload:
    """Draw images into `folder` and return a recipe's model, weights, batches and schedule, compressed to so many steps."""
    base = load_recipe(recipe)
    spec = model_spec(model or base.model)
    recipe = base.replace(
        model=(model or base.fields()["model"]) if full else narrowed(spec),
        precision=precision,
        epochs=steps,
        warmup_epochs=base.warmup_epochs and max(steps // 4, 1),
        warmup_from_batch_images=0,
        lr_step_epochs=[epoch * steps / base.epochs for epoch in base.lr_step_epochs],
        lr=PEAK_LR,
        lr_scaling="none",
        lr_end=min(base.lr_end, PEAK_LR),
        warmup_start_lr=min(base.warmup_start_lr, PEAK_LR),
        global_batch_images=BATCH[full],
        **({} if full else {"image_size": 64, "eval_resize": 72, "eval_crop": 64}),
    )
    data = folder / "images"
    # More than a step takes, so that every epoch leaves others out and the last batch of an evaluation is not full.
    images = 10 * (recipe.global_batch_images // 10 + 1)
    draw_data_set(data, train_images=images, val_images=images)
    training, validation = loaded(recipe, data)
    state = initial_state(recipe)
    return Workload(recipe, data, state, steadied(recipe, state), [b for _, b in training], [b for _, b in validation])


def steadied(recipe: Recipe, state: State) -> State:
    """Return a state whose ReLUs are far from switching: each passes all values of a channel or, of a third of the channels
    within a block, none.

    Where rounding decides the sign of a value before a ReLU, a gradient jumps; in a whole model it does so somewhere. Batch
    norm biases four deviations from 0 leave few values there.
    """
    biases = {
        f"{conv.bn_name}.bias": np.full(conv.outputs, 4, np.float32) for conv in convolutions(model_spec(recipe.model))
    }
    for block in blocks(model_spec(recipe.model)):
        biases[f"{block.convs[-2].bn_name}.bias"][::3] = -4
    tensors = state.tensors | {name: bias * state.tensors[name.replace("bias", "weight")] for name, bias in biases.items()}
    return State(state.step, tensors, state.momentum, dict(tensors) if state.ema else {})


def loaded(recipe: Recipe, data: Path) -> tuple[list[tuple[BatchPlan, Batch]], list[tuple[BatchPlan, Batch]]]:
    """Return plans and batches of a whole training and of an evaluation, as this environment's host loader makes them."""
    training, validation = open_index(data / "train"), open_index(data / "val")
    to_train = list(training_plans(recipe, training.sizes, 0))
    to_evaluate = list(evaluation_plans(recipe, validation.sizes, recipe.global_batch_images))
    with loader_of(training, recipe, Execution(), size=recipe.image_size) as loader:
        trained = list(zip(to_train, loader.batches(to_train), strict=True))
    with loader_of(validation, recipe, Execution(), size=recipe.eval_crop) as loader:
        return trained, list(zip(to_evaluate, loader.batches(to_evaluate), strict=True))


def save(workload: Workload, folder: Path) -> None:
    """Write a workload for `load`."""
    (folder / "recipe.yaml").write_text(workload.recipe.to_yaml(), encoding="utf-8")
    arrays = _joined("tensors", workload.state.tensors) | _joined("momentum", workload.state.momentum)
    arrays |= _joined("ema", workload.state.ema) | _joined("steady", workload.steady.tensors)
    for kind, batches in (("train", workload.batches), ("evaluate", workload.evaluation)):
        for i, batch in enumerate(batches):
            present = {field.name: getattr(batch, field.name) for field in fields(Batch)}
            arrays |= _joined(f"{kind}/{i}", {name: value for name, value in present.items() if value is not None})
    save_arrays(folder / "workload.npz", arrays)


def load(folder: Path) -> Workload:
    """Return what `save` wrote."""
    arrays = load_arrays(folder / "workload.npz")
    state = State(0, part(arrays, "tensors"), part(arrays, "momentum"), part(arrays, "ema"))
    steady = part(arrays, "steady")
    steady_state = State(0, steady, state.momentum, dict(steady) if state.ema else {})
    found: dict[str, list[Batch]] = {"train": [], "evaluate": []}
    for kind, batches in found.items():
        while batch := part(arrays, f"{kind}/{len(batches)}"):
            batches.append(Batch(**batch))
    recipe = load_recipe(str(folder / "recipe.yaml"))
    return Workload(recipe, folder / "images", state, steady_state, found["train"], found["evaluate"])


def part(arrays: Arrays, name: str) -> Arrays:
    """Return the arrays below a name, without it."""
    return {key.removeprefix(f"{name}/"): value for key, value in arrays.items() if key.startswith(f"{name}/")}


def _joined(name: str, arrays: Arrays) -> Arrays:
    return {f"{name}/{key}": value for key, value in arrays.items()}


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays by name."""
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its options are named like no array of ours


def load_arrays(path: Path) -> Arrays:
    """Return what `save_arrays` wrote."""
    with np.load(path) as file:
        return dict(file)
