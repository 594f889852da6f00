"""Published accuracies as data: the rows of `published_accuracies.yaml`, and a run's top-1 next to
those of its recipe.

A run is compared only on data like ImageNet's validation images: 1,000 classes and 50,000 images.
The interval of a run is Wilson's, of 95 %. It covers only the choice of validation images; another
seed of training also changes accuracy.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from lockstep.models.accuracy_interval import wilson
from lockstep.recipes.published import OWN_RECIPES, RECIPES
from lockstep.recipes.recipe import Recipe, difference
from lockstep.system import schema
from lockstep.system.errors import DataError
from lockstep.system.plain_yaml import read_yaml

CLASSES = 1000
"""Number of classes of the images that all rows were measured on."""
IMAGES = 50_000
"""Number of validation images that all rows were measured on."""
ROWS = Path(__file__).with_suffix(".yaml")
_OWN = ("seed", "precision")
"""Fields in which a run may differ from its recipe and still be a run of it. Precision selects the
rows."""
_PRECISION_FIELDS = {"precision", "loss_scaling", "global_batch_images", "stem_channels"}
"""Fields in which NVIDIA's variants in TF32 and FP32 differ from the recipe in mixed precision."""
_HALF = {"fp16": True, "bf16": True, "mixed": True, "fp32": False, "tf32": False}
"""Whether a precision computes in 16 bits."""
_WORDS = {"mixed": "mixed precision", "fp16": "FP16", "fp32": "FP32", "tf32": "TF32"}

Percent = Annotated[float, Field(gt=0, le=100)]


class Accuracy(BaseModel):
    """One published accuracy. A value that the document does not give is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str
    """The name in `published.RECIPES`."""
    document: str
    """Where the accuracy was published."""
    table: str
    """The title of the table or section in the document."""
    line: str
    """The line of the document that prints the accuracy."""
    framework: str
    container: str | None = None
    """NVIDIA's container in which the training ran."""
    accelerator: str | None = None
    """The GPU."""
    accelerators: Annotated[int, Field(ge=1)] | None = None
    """Number of GPUs."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    precision: Literal["fp32", "tf32", "fp16", "mixed"]
    variant: str | None = None
    """What distinguishes the row from others of its recipe."""
    top1_percent: Percent
    spread_percent: Percent | None = None
    """The number after ±, in percent. The documents do not say what it is."""
    hours: Annotated[float, Field(gt=0)] | None = None
    """Hours of the whole training."""

    def figure(self) -> str:
        """Return top-1 in percent with its spread, with two digits or three, or as few as the
        document prints, such as "76.93 ± 0.14"."""
        top1 = f"{self.top1_percent:.3f}".removesuffix("0")
        if top1 not in self.line:
            top1 = f"{self.top1_percent:g}"
        return top1 if self.spread_percent is None else f"{top1} ± {self.spread_percent:.2f}"

    def conditions(self) -> str:
        """Return how the accuracy was reached, such as "PaddlePaddle, 8 x A100 80GB, 90 epochs,
        mixed precision"."""
        gpus = f"{self.accelerators} x {self.accelerator}" if self.accelerator else None
        epochs = f"{self.epochs} epochs" if self.epochs else None
        parts = (self.framework, gpus, epochs, _WORDS[self.precision], self.variant)
        return ", ".join(filter(None, parts))


class ShownAccuracy(TypedDict):
    """How an `Accuracy` is shown, with the fields of the row."""

    figure: str
    conditions: str
    position: str
    """ "below", "within" or "above" the interval."""


class Comparison(TypedDict):
    """The top-1 of a run next to the published ones of its recipe, as JSON files and outputs hold
    it."""

    recipe: str
    """The name in `published.RECIPES`."""
    changed: list[str]
    """The fields in which the run's recipe differs from the published one, other than seed and
    precision."""
    interval_percent: list[schema.Percent]
    """The ends of Wilson's 95 % interval of the run's top-1, in percent; empty if it is not
    compared."""
    accuracies: list[ShownAccuracy]
    """Empty if the run is not compared."""
    not_compared: str
    """Why the run is not compared; "" if it is."""


@cache
def read_accuracies(path: Path = ROWS) -> tuple[Accuracy, ...]:
    """Return all rows. Raises `DataError` for a wrong row, with the table and the row."""
    accuracies = []
    for table in read_yaml(path.read_text(encoding="utf-8")):
        shared = {name: value for name, value in table.items() if name not in ("columns", "rows")}
        for cells in table["rows"]:
            try:
                fields = shared | dict(zip(table["columns"], cells, strict=True))
                accuracies.append(Accuracy(**fields))
            except (ValueError, ValidationError) as error:
                raise DataError(
                    f"published accuracies, table {table.get('table')!r}, row {cells}: {error}"
                ) from None
    return tuple(accuracies)


@cache
def find_accuracies(name: str) -> tuple[Accuracy, ...]:
    """Return the published accuracies of a recipe, in the order of the data; empty if there are
    none.

    A document has one table for all precisions of a training, and its rows have the name of the
    recipe in mixed precision. A variant in another precision, such as `resnet50-paddle-tf32-90ep`,
    has those of these rows that are in its precision.
    """
    rows = tuple(row for row in read_accuracies() if row.recipe == name)
    if rows or name not in RECIPES or name in OWN_RECIPES:
        return rows
    recipe = RECIPES[name]()
    return tuple(
        row
        for row in read_accuracies()
        if row.precision == recipe.precision
        and difference(RECIPES[row.recipe](), recipe).keys() <= _PRECISION_FIELDS
    )


def compare_top1(
    recipe: Recipe,
    *,
    top1_percent: float,
    images: int,
    classes: int,
    precision: str | None = None,
    epochs: int | None = None,
) -> Comparison | None:
    """Return a top-1 next to the published ones of its recipe; None if nobody published an accuracy
    of the recipe.

    `images` and `classes` are those of the evaluation. `precision` is the one of training: 16-bit
    precisions are put next to mixed precision and FP16, others next to TF32 and FP32; None, or a
    precision without rows, selects all rows. `epochs` are the whole epochs that the weights were
    trained for, if known.
    """
    name = _find_published_name(recipe)
    if name is None:
        return None
    comparison: Comparison = {
        "recipe": name,
        "changed": [field for field in difference(RECIPES[name](), recipe) if field not in _OWN],
        "interval_percent": [],
        "accuracies": [],
        "not_compared": "",
    }
    if (classes, images) != (CLASSES, IMAGES):
        comparison["not_compared"] = (
            f"published accuracies are of ImageNet's {CLASSES:,} classes and {IMAGES:,} validation"
            f" images; these are {classes:,} and {images:,}"
        )
        return comparison
    if epochs is not None and epochs < recipe.epochs:
        comparison["not_compared"] = (
            f"these weights were trained for {epochs} of {recipe.epochs} epochs"
        )
        return comparison
    low, high = (100 * bound for bound in wilson(round(top1_percent * images / 100), images))
    comparison["interval_percent"] = [low, high]
    for row in _select_precision(find_accuracies(name), precision):
        texts = {
            "figure": row.figure(),
            "conditions": row.conditions(),
            "position": _position(row.top1_percent, low, high),
        }
        shown = cast(ShownAccuracy, row.model_dump(exclude_none=True) | texts)
        comparison["accuracies"].append(shown)
    return comparison


def _find_published_name(recipe: Recipe) -> str | None:
    """Return the recipe with published accuracies that a recipe is based on, or else equals in all
    fields but `_OWN`."""
    if find_accuracies(recipe.based_on):
        return recipe.based_on
    for name in filter(find_accuracies, RECIPES):
        if difference(RECIPES[name](), recipe).keys() <= set(_OWN):
            return name
    return None


def _select_precision(rows: tuple[Accuracy, ...], precision: str | None) -> tuple[Accuracy, ...]:
    if precision is None:
        return rows
    return tuple(row for row in rows if _HALF[row.precision] == _HALF[precision]) or rows


def _position(value: float, low: float, high: float) -> str:
    if value < low:
        return "below"
    return "above" if value > high else "within"


def describe_comparison(comparison: Comparison | None) -> list[tuple[str, str]]:
    """Return a comparison as short names with texts for a person to read; empty for None.

    >>> describe_comparison({"recipe": "demo", "not_compared": "one class"})  # and other keys
    [('published', 'not compared: one class')]
    """
    if comparison is None:
        return []
    if comparison["not_compared"]:
        return [("published", f"not compared: {comparison['not_compared']}")]
    low, high = comparison["interval_percent"]
    rows = [("95 % interval", f"{low:.2f} to {high:.2f} % (Wilson, of top-1)")]
    rows += [
        ("published", f"{row['figure']} ({row['conditions']}): {row['position']} the interval")
        for row in comparison["accuracies"]
    ]
    if comparison["changed"]:
        rows.append(
            ("recipe", f"differs from {comparison['recipe']} in {', '.join(comparison['changed'])}")
        )
    return rows


def is_comparison(value: Any) -> bool:
    """Return whether a value of a JSON file is a `Comparison`."""
    return schema.matches(value, Comparison) and (
        bool(value["not_compared"]) or len(value["interval_percent"]) == 2
    )
