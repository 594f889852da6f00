"""What is measured: a grid of cells, and how long each cell is.

A cell is one model on one backend or runtime at one precision and batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

from lockstep.backends import FRAMEWORKS
from lockstep.inference.runtimes import NATIVE, find_row
from lockstep.models.architectures import MODELS, model_spec
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.recipes.image_sizes import fix_size
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import BackendError, RecipeError, UserError, nearest

SYNTHETIC = "synthetic"
"""Used in place of a folder: one batch of noise, which every step uses again."""
TRAIN = "train"
INFERENCE = "inference"
INT8 = "int8"
"""The `dtype` of a model that is quantised after training. Only runtimes that run ONNX models have
such cells."""
GIVEN_OTHERWISE = {
    "model": "--model",
    "precision": "--dtype",
    "global_batch_images": "-b and -n",
    "backend": "--backend",
    "compile": "--compile",
    "layout": "--layout",
}
"""Fields that are an axis of the grid, with the option that sets each."""


@dataclass(frozen=True)
class Cell:
    """One measurement. Its fields are those of a report's cell."""

    what: str
    """`TRAIN` or `INFERENCE`."""
    backend: str
    model: str
    """The model's name, with "-v1.5" if there is a v1 of the same name."""
    dtype: str
    """The recipe's `precision`, or `INT8`."""
    batch: int
    """Images of one rank in a step."""
    ranks: int
    compile: str
    """The execution's `compile`."""
    layout: str = "auto"
    """The execution's `layout`."""
    data: str = SYNTHETIC
    """A folder, or `SYNTHETIC`."""
    runtime: str = NATIVE
    """What infers: the backend (native), or a runtime of `lockstep.inference.runtimes`."""

    @property
    def computes(self) -> str:
        """The name of what computes: the backend, or the runtime that is not native."""
        return name_computer(self.fields())

    def fields(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """The settings that all cells of a report share."""

    iterations: int = 100
    """Iterations of an epoch: training steps, or batches of inference."""
    epochs: int = 1
    """Epochs that are measured."""
    warmup_epochs: int = 1
    """Warm-up epochs before the measured ones."""
    num_examples: int | None = None
    """Use this many images of the data, again and again; None: all."""
    recipe: str = "resnet50-paddle-90ep"
    changes: dict[str, Any] = field(default_factory=dict)
    """Changed fields of the recipe."""
    execution: dict[str, Any] = field(default_factory=dict)
    """Fields of the execution, except those that the grid sets."""

    def __post_init__(self) -> None:
        examples = 1 if self.num_examples is None else self.num_examples
        if min(self.iterations, self.epochs, examples) < 1 or self.warmup_epochs < 0:
            raise UserError(
                "iterations, epochs and num_examples must be at least 1, warmup_epochs at least 0"
            )
        if self.iterations * self.epochs < 2:
            raise UserError("one iteration has a time but no interval; measure at least two: -i 2")
        for name, option in GIVEN_OTHERWISE.items():
            if name in self.changes or name in self.execution:
                raise RecipeError(
                    f"{name} is an axis of the grid: give it as {option}, not with --set"
                )

    def fields(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def make_recipe(self, cell: Cell) -> Recipe:
        """Return the recipe that a cell is measured with: all images have its `image_size`, and an
        evaluation computes each once. Raises `RecipeError` if there is none."""
        recipe = load_recipe(self.recipe).replace(
            **self.changes,
            model=plain_name(cell.model),
            precision="fp32" if cell.dtype == INT8 else cell.dtype,
            global_batch_images=cell.batch * cell.ranks,
        )
        return fix_size(recipe, recipe.image_size).replace(eval_flips=False)

    def make_execution(self, cell: Cell) -> Execution:
        """Return the execution that a cell is measured with. Raises `RecipeError` for a wrong
        field."""
        fields = {name: getattr(cell, name) for name in ("backend", "compile", "layout")}
        if cell.data == SYNTHETIC:
            fields["loader"] = SYNTHETIC
        return Execution.of(self.execution | fields)


def name_computer(entry: Mapping[str, Any]) -> str:
    """Return the name of what computes a report's cell: its backend, or its runtime if that is not
    native."""
    return str(entry["backend"] if entry["runtime"] == NATIVE else entry["runtime"])


def full_name(model: str) -> str:
    """Return a model's name as in reports: with its version if two versions have the same layers.

    >>> full_name("resnet50"), full_name("resnet50-v1"), full_name("resnext101-32x4d")
    ('resnet50-v1.5', 'resnet50-v1', 'resnext101-32x4d')
    """
    model = plain_name(model)
    return f"{model}-v1.5" if f"{model}-v1" in MODELS else model


def plain_name(model: str) -> str:
    """Return a model's name as in recipes. Raises `RecipeError` if there is no such model.

    >>> plain_name("resnet50-v1.5")
    'resnet50'
    """
    name = model.removesuffix("-v1.5")
    model_spec(name if f"{name}-v1" in MODELS else model)
    return name


def grid(
    whats: Sequence[str],
    *,
    ranks: Sequence[int] = (1,),
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    dtypes: Sequence[str] = ("fp32",),
    backends: Sequence[str] = (DEFAULT_BACKEND,),
    models: Sequence[str] = ("resnet50",),
    compiles: Sequence[str] = ("auto",),
    layouts: Sequence[str] = ("auto",),
    data: str = SYNTHETIC,
    runtimes: Sequence[str] = (NATIVE,),
) -> list[Cell]:
    """Return a cell for every combination of values. The batch changes fastest.

    Of `runtimes`, those that are not native have only cells of inference on one rank, once for all
    backends, compilers and layouts. Only those of them that run ONNX models have cells in `INT8`.

    Raises `UserError` for an unknown backend, runtime or model, a number below 1, or if no cell is
    left.
    """
    for name in backends:
        if name not in FRAMEWORKS:
            raise BackendError(f"there is no backend {name!r}. {nearest(name, FRAMEWORKS)}")
    if min(*ranks, *batches) < 1:
        raise UserError("ranks (-n) and batches (-b) must be at least 1")
    foreign = [name for name in runtimes if name != NATIVE]
    run_onnx = {name: find_row(name).runs_onnx for name in foreign}
    names = list(map(full_name, models))
    cells = []
    if NATIVE in runtimes:
        axes = (whats, backends, names, compiles, layouts, ranks, dtypes, batches)
        for what, backend, model, compiler, layout, count, dtype, batch in product(*axes):
            if dtype != INT8:
                place = (compiler, layout, data)
                cells.append(Cell(what, backend, model, dtype, batch, count, *place))
    if INFERENCE in whats and 1 in ranks:
        for name, model, dtype, batch in product(foreign, names, dtypes, batches):
            if dtype != INT8 or run_onnx[name]:
                own = {"data": data, "runtime": name}
                cells.append(Cell(INFERENCE, backends[0], model, dtype, batch, 1, "auto", **own))
    if not cells:
        raise UserError(
            f"no cell is left: runtimes other than {NATIVE} only infer, on one rank (-n 1), and"
            f" {INT8} needs one that runs ONNX models, such as --runtime onnxruntime"
        )
    return cells
