"""Published speeds of others as data: the rows of `published.yaml`, and our speeds next to them.

There are no claims across hardware. Speeds are divided only if both ran on the same number of accelerators of one name.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lockstep.benchmark.report_file import BenchmarkReport, environment_of
from lockstep.recipes import load_recipe
from lockstep.system.errors import DataError, RecipeError
from lockstep.system.plain_yaml import read_yaml

PUBLISHED_SIZE = 224
"""Height and width of the images of all rows, in pixels."""
ROWS = Path(__file__).with_name("published.yaml")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Row(BaseModel):
    """One published measurement. A value that the document does not give is None."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    document: str
    """Where the measurement was published."""
    table: str
    """The title of the table in the document."""
    model: Literal["resnet50", "resnext101-32x4d"]
    """The name in `lockstep.models.architectures`; "resnet50" is v1.5."""
    framework: str | None = None
    kind: Literal["train", "inference"]
    system: str | None = None
    """The computer, or the organisation that measured."""
    accelerator: str
    """The GPU, or the processor if there is no GPU."""
    accelerators: Count | None = None
    """Number of accelerators; for processors, of sockets."""
    precision: Literal["fp32", "tf32", "fp16", "mixed", "int8"] | None = None
    variant: str | None = None
    """What distinguishes the row from others of its table, such as a compiler, a server or a round."""
    batch_images: Count | None = None
    """Images of one accelerator in a step."""
    images_per_sec: Positive | None = None
    """Rate of all accelerators together."""
    mean_ms: Positive | None = None
    """Mean latency of a batch. The percentiles are of the same latency."""
    p50_ms: Positive | None = None
    p90_ms: Positive | None = None
    p95_ms: Positive | None = None
    p99_ms: Positive | None = None
    p100_ms: Positive | None = None
    minutes_to_target: Positive | None = None
    """MLPerf: minutes until 75.9 % top-1."""
    printed_speedup: Positive | None = None
    """Speed-up over full precision on the same hardware, as printed."""
    printed_weak_scaling: Positive | None = None
    """Weak scaling over one accelerator, as printed."""
    method: str | None = None
    """How the row was measured."""
    remark: str | None = None
    """What disagrees with another published figure."""

    @model_validator(mode="after")
    def _measures(self) -> "Row":
        if self.images_per_sec is None and self.minutes_to_target is None and not self.percentiles_ms():
            raise ValueError("expected images_per_sec, minutes_to_target or a latency")
        if self.remark is None and list(self.percentiles_ms()) != sorted(self.percentiles_ms()):
            raise ValueError("percentiles of latency fall; check them, or explain them in a remark")
        return self

    def percentiles_ms(self) -> tuple[float, ...]:
        """Return the percentiles that the row has, lowest first."""
        given = (self.p50_ms, self.p90_ms, self.p95_ms, self.p99_ms, self.p100_ms)
        return tuple(each for each in given if each is not None)


@cache
def published_rows(path: Path = ROWS) -> tuple[Row, ...]:
    """Return all rows. Raises `DataError` for a wrong row; the message names the table and the row."""
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
    """A published row next to a cell of ours."""

    row: Row
    ratio: float | None
    """Our images per second divided by theirs; None unless hardware, batch and precision are the same."""


@dataclass(frozen=True)
class Comparison:
    """A cell of a benchmark report and the comparable published rows."""

    cell: dict[str, Any]
    hardware: str
    """The hardware of the cell."""
    image_size: int | None
    """Height and width of our images; None if the report does not give them. All published rows have 224."""
    published: tuple[Beside, ...]
    left_out: int
    """Number of rows of the same model and kind with other batches or other numbers of accelerators."""


def compare(report: BenchmarkReport, rows: tuple[Row, ...], *, everything: bool = False) -> list[Comparison]:
    """Return every measured cell with published rows of its model and kind.

    The rows have the same number of accelerators. If one of them has the cell's batch, only rows with that batch or an
    unknown batch are returned; otherwise rows of any batch. With `everything`, all rows are returned.
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
    """Return our images per second divided by theirs; None unless hardware, batch and precision are the same."""
    same = _plain(hardware) == _plain(row.accelerator) and row.accelerators == cell["ranks"]
    precisions = {"mixed": ("fp16", "bf16")}.get(row.precision or "", (row.precision,))
    if not same or row.batch_images != cell["batch"] or cell["dtype"] not in precisions or row.images_per_sec is None:
        return None
    return float(cell["images_per_sec"] / row.images_per_sec)


def _image_size(report: BenchmarkReport, cell: dict[str, Any]) -> int | None:
    """Return height and width of a cell's images, from the report's recipe and its changes; None if that is unknown."""
    settings = report.get("settings", {})
    try:
        recipe = load_recipe(settings["recipe"]).replace(**settings["changes"])
    except (KeyError, RecipeError):  # the report names no recipe, or its file is gone
        return None
    return recipe.image_size if cell["what"] == "train" else recipe.eval_crop


def _plain(name: str) -> str:
    """Return the name of an accelerator without its maker, because only some drivers include the maker."""
    return " ".join(word for word in name.lower().split() if word not in ("nvidia", "tesla", "amd", "intel"))


def hardware_of(environment: dict[str, Any], cell: dict[str, Any]) -> str:
    """Return what a cell was measured on: the GPU as its driver names it, else the processor.

    Some engines, such as MXNet, report a GPU only as a number. If all GPUs of the machine have the same name, that name is
    used. Otherwise it stays a number: CUDA orders GPUs by speed and visibility, the driver does not.
    """
    device, names = cell.get("device") or "", sorted({gpu["gpu"] for gpu in environment.get("gpus", [])})
    if device.startswith("CPU") or not (device or names):
        return str(environment.get("processor", "unknown hardware"))
    if device and not re.search(r"GPU[ :]\d+$", device):
        return str(device)
    return names[0] if len(names) == 1 else f"{device or 'a GPU'} of {', '.join(names) or 'unknown ones'}"
