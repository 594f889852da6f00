"""What others have published of speed, as data: the rows of `published.yaml`, and ours beside them.

Nothing is claimed across hardware: speeds are divided where both ran on as many accelerators of one name, and only there.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lockstep.benchmark.report_file import environment_of
from lockstep.recipes import load_recipe
from lockstep.system.errors import DataError, RecipeError
from lockstep.system.plain_yaml import read_yaml

PUBLISHED_SIZE = 224
"""Pixels of a side of the images of all rows."""
ROWS = Path(__file__).with_name("published.yaml")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Row(BaseModel):
    """One published measurement. What a document does not say is None."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    document: str
    """Where it was published."""
    table: str
    """The table's title in it."""
    model: Literal["resnet50", "resnext101-32x4d"]
    """As `lockstep.models.architectures` names it; "resnet50" is v1.5."""
    framework: str | None = None
    kind: Literal["train", "inference"]
    system: str | None = None
    """The computer, or who measured."""
    accelerator: str
    """GPU, or processor where there is no other."""
    accelerators: Count | None = None
    """How many; of processors, sockets."""
    precision: Literal["fp32", "tf32", "fp16", "mixed", "int8"] | None = None
    variant: str | None = None
    """What sets it apart from others of its table, such as a compiler, a server or a round."""
    batch_images: Count | None = None
    """Of one accelerator in a step."""
    images_per_sec: Positive | None = None
    """Of all accelerators."""
    mean_ms: Positive | None = None
    """Latency of a batch; so are the percentiles."""
    p50_ms: Positive | None = None
    p90_ms: Positive | None = None
    p95_ms: Positive | None = None
    p99_ms: Positive | None = None
    p100_ms: Positive | None = None
    minutes_to_target: Positive | None = None
    """Of MLPerf: until 75.9 % top-1."""
    printed_speedup: Positive | None = None
    """Over full precision on the same hardware, as printed."""
    printed_weak_scaling: Positive | None = None
    """Over one accelerator, as printed."""
    method: str | None = None
    """How it was measured."""
    remark: str | None = None
    """What does not agree with something else that was published."""

    @model_validator(mode="after")
    def _measures(self) -> "Row":
        if self.images_per_sec is None and self.minutes_to_target is None and not self.percentiles_ms():
            raise ValueError("expected images_per_sec, minutes_to_target or a latency")
        if self.remark is None and list(self.percentiles_ms()) != sorted(self.percentiles_ms()):
            raise ValueError("percentiles of latency fall; check them, or say so in a remark")
        return self

    def percentiles_ms(self) -> tuple[float, ...]:
        """Return the percentiles that are given, the lowest first."""
        given = (self.p50_ms, self.p90_ms, self.p95_ms, self.p99_ms, self.p100_ms)
        return tuple(each for each in given if each is not None)


@cache
def published_rows(path: Path = ROWS) -> tuple[Row, ...]:
    """Return all rows. Raises `DataError` that names the table and the row for what is wrong."""
    return tuple(row for table in read_yaml(path.read_text(encoding="utf-8")) for row in _rows_of(dict(table)))


def _rows_of(table: dict[str, Any]) -> list[Row]:
    columns, values, remarks = table.pop("columns"), table.pop("rows"), table.pop("remarks", [])
    used, rows = set(), []
    for cells in values:
        try:
            fields = table | dict(zip(columns, cells, strict=True))
            for number, each in enumerate(remarks):
                if each["where"].items() <= fields.items():
                    used.add(number)
                    fields = fields | {"remark": each["remark"]}
            rows.append(Row(**fields))
        except (ValueError, ValidationError) as error:
            raise DataError(f"published rows, table {table.get('table')!r}, row {cells}: {error}") from None
    if len(used) < len(remarks):
        raise DataError(f"published rows, table {table.get('table')!r}: a remark fits no row")
    return rows


@dataclass(frozen=True)
class Beside:
    """A published row beside a cell of ours."""

    row: Row
    ratio: float | None
    """Our images a second by theirs; None unless the hardware is the same."""


@dataclass(frozen=True)
class Comparison:
    """A cell of a benchmark report and what was published of the like."""

    cell: dict[str, Any]
    hardware: str
    """Ours."""
    image_size: int | None
    """Pixels of a side of our images; None if the report does not tell. All that was published is of 224."""
    published: tuple[Beside, ...]
    left_out: int
    """Rows of the same model and kind with other batches or other numbers of accelerators."""


def compare(report: dict[str, Any], rows: tuple[Row, ...], *, everything: bool = False) -> list[Comparison]:
    """Return every cell that was measured beside published rows of its model and kind.

    They are those of as many accelerators, of the same batch where one of them is known to have it, else of any batch;
    with `everything` all.
    """
    found = []
    for cell in report["cells"]:
        if cell["status"] != "ok":
            continue
        alike = [row for row in rows if row.kind == cell["what"] and row.model == cell["model"].removesuffix("-v1.5")]
        shown = [row for row in alike if everything or row.accelerators == cell["ranks"]]
        if not everything and any(row.batch_images == cell["batch"] for row in shown):
            shown = [row for row in shown if row.batch_images in (None, cell["batch"])]
        hardware, size = hardware_of(environment_of(report, cell["backend"]), cell), _image_size(report, cell)
        beside = tuple(Beside(row, _ratio(cell, hardware, row) if size == PUBLISHED_SIZE else None) for row in shown)
        found.append(Comparison(cell, hardware, size, beside, len(alike) - len(shown)))
    return found


def _ratio(cell: dict[str, Any], hardware: str, row: Row) -> float | None:
    """Return our images a second by theirs if hardware, batch and precision are the same."""
    same = _plain(hardware) == _plain(row.accelerator) and row.accelerators == cell["ranks"]
    precisions = {"mixed": ("fp16", "bf16")}.get(row.precision or "", (row.precision,))
    if not same or row.batch_images != cell["batch"] or cell["dtype"] not in precisions or row.images_per_sec is None:
        return None
    return float(cell["images_per_sec"] / row.images_per_sec)


def _image_size(report: dict[str, Any], cell: dict[str, Any]) -> int | None:
    """Return the pixels of a side of a cell's images, from the recipe that the report names and its changes."""
    settings = report.get("settings", {})
    try:
        recipe = load_recipe(settings["recipe"]).replace(**settings["changes"])
    except (KeyError, RecipeError):  # a file that has gone since
        return None
    return recipe.image_size if cell["what"] == "train" else recipe.eval_crop


def _plain(name: str) -> str:
    """Return the name of an accelerator without its maker, which some drivers name and others do not."""
    return " ".join(word for word in name.lower().split() if word not in ("nvidia", "tesla", "amd", "intel"))


def hardware_of(environment: dict[str, Any], cell: dict[str, Any]) -> str:
    """Return what a cell was measured on: the GPU as its driver names it, else the processor.

    A GPU that an engine numbers, as MXNet does, has the name that all GPUs of the machine have. Where they have several it
    stays a number: CUDA counts by speed and by what is visible, the driver does not.
    """
    device, names = cell.get("device") or "", sorted({gpu["gpu"] for gpu in environment.get("gpus", [])})
    if device.startswith("CPU") or not (device or names):
        return str(environment.get("processor", "unknown hardware"))
    if device and not re.search(r"GPU[ :]\d+$", device):
        return str(device)
    return names[0] if len(names) == 1 else f"{device or 'a GPU'} of {', '.join(names) or 'unknown ones'}"
