"""Published speeds of others as data: the rows of `published_speeds.yaml`, and when a measured
speed is divided by one of them.

There are no claims across hardware. By default, a speed is shown next to rows of the same chip.
Speeds are divided only if both ran on the same number of accelerators of one name.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lockstep.system.errors import DataError
from lockstep.system.plain_yaml import read_yaml

PUBLISHED_SIZE = 224
"""Height and width of the images of all rows, in pixels."""
ROWS = Path(__file__).with_suffix(".yaml")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Row(BaseModel):
    """One published measurement. A value that the document does not give is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """What distinguishes the row from others of its table, such as a compiler, a server or a round.
    """
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
        if (
            self.images_per_sec is None
            and self.minutes_to_target is None
            and not self.percentiles_ms()
        ):
            raise ValueError("expected images_per_sec, minutes_to_target or a latency")
        if self.remark is None and list(self.percentiles_ms()) != sorted(self.percentiles_ms()):
            raise ValueError(
                "percentiles of latency must rise; correct them, or explain them in a remark"
            )
        return self

    def percentiles_ms(self) -> tuple[float, ...]:
        """Return the percentiles that the row has, lowest first."""
        percentiles = (self.p50_ms, self.p90_ms, self.p95_ms, self.p99_ms, self.p100_ms)
        return tuple(latency for latency in percentiles if latency is not None)


@cache
def read_speeds(path: Path = ROWS) -> tuple[Row, ...]:
    """Return all rows. Raises `DataError` for a wrong row, with the table and the row."""
    rows: list[Row] = []
    for table in read_yaml(path.read_text(encoding="utf-8")):
        rows += _read_table(dict(table))
    return tuple(rows)


def _read_table(table: dict[str, Any]) -> list[Row]:
    columns = table.pop("columns")
    values = table.pop("rows")
    remarks = table.pop("remarks", [])
    used = set()
    rows = []
    for cells in values:
        try:
            fields = table | dict(zip(columns, cells, strict=True))
            for number, remark in enumerate(remarks):
                if remark["where"].items() <= fields.items():
                    used.add(number)
                    fields = fields | {"remark": remark["remark"]}
            rows.append(Row(**fields))
        except (ValueError, ValidationError) as error:
            raise DataError(
                f"published rows, table {table.get('table')!r}, row {cells}: {error}"
            ) from None
    if len(used) < len(remarks):
        raise DataError(f"published rows, table {table.get('table')!r}: a remark fits no row")
    return rows


@dataclass(frozen=True)
class Measured:
    """A measured speed, to be shown next to published ones."""

    model: str
    """The name in `lockstep.models.architectures`."""
    kind: Literal["train", "inference"]
    hardware: str
    """The GPU as its driver names it, else the processor."""
    accelerators: int
    precision: str
    """The recipe's `precision`."""
    batch_images: int | None
    """Images of one accelerator in a step; None if accelerators have different numbers."""
    image_size: int | None
    """Height and width in pixels; None if unknown."""
    images_per_sec: float
    """Rate of all accelerators together."""

    def is_of_same_model(self, row: Row) -> bool:
        """Return whether a published row is of the same model and kind."""
        return row.kind == self.kind and row.model == self.model.removesuffix("-v1.5")

    def is_on_same_hardware(self, row: Row) -> bool:
        """Return whether a published row is of the same number of the same accelerators."""
        return (
            _plain(self.hardware) == _plain(row.accelerator)
            and row.accelerators == self.accelerators
        )

    def is_on_like_hardware(self, row: Row) -> bool:
        """Return whether a published row is of the same number of accelerators of the same chip,
        whatever their memory."""
        return (
            _chip(self.hardware) == _chip(row.accelerator) and row.accelerators == self.accelerators
        )

    def is_in_same_precision(self, row: Row) -> bool:
        """Return whether a published row is of the same precision. Mixed is fp16 or bf16."""
        if row.precision == "mixed":
            return self.precision in ("fp16", "bf16")
        return self.precision == row.precision

    def ratio(self, row: Row) -> float | None:
        """Return the measured images per second divided by the published ones.

        None unless hardware, batch, precision and image size are the same.
        """
        is_same = (
            self.is_on_same_hardware(row)
            and self.is_in_same_precision(row)
            and self.image_size == PUBLISHED_SIZE
            and row.batch_images is not None
            and row.batch_images == self.batch_images
        )
        if not is_same or row.images_per_sec is None:
            return None
        return self.images_per_sec / row.images_per_sec


def _plain(name: str) -> str:
    """Return the name of an accelerator without its maker, because only some drivers include the
    maker."""
    makers = ("nvidia", "tesla", "amd", "intel")
    return " ".join(word for word in name.lower().split() if word not in makers)


def _chip(name: str) -> str:
    """Return what variants of an accelerator have in common; the whole name of a processor.

    >>> _chip("Tesla V100-SXM2-16GB"), _chip("NVIDIA H100 80GB HBM3"), _chip("AMD EPYC 9R14")
    ('v100', 'h100', 'epyc 9r14')
    """
    plain = _plain(name)
    model = re.match(r"[a-z]+\d+\b", plain)
    return model[0] if model else plain
