"""Fit the model of `benchmarks.scaling.model` to measured steps, and compare it with steps that
it was not fitted to.

The fit has three stages, each a linear least squares of relative errors, with coefficients of at
least 0:

1. Steps of one rank at several batches: fixed time and time of an image.
2. Steps of several ranks on one host: what sharing cores costs, and the cores' time for bytes and
   messages.
3. Steps over throttled links: the share of a link's rate that carries gradients, and the overlap
   with the backward pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scaling.model import (
    Cluster,
    Link,
    Step,
    measure_overlap,
    ring_sec,
    split_gradients,
    step_time,
)
from lockstep.benchmark.cells import SYNTHETIC, TRAIN, plain_name
from lockstep.benchmark.failures import OK
from lockstep.benchmark.report_file import BenchmarkReport, read_benchmark
from lockstep.models.architectures import MODELS
from lockstep.recipes import Execution
from lockstep.recipes.published_speeds import PUBLISHED_SIZE
from lockstep.system.errors import DataError
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import is_number, is_positive, parsed

KIND = "lockstep-scaling"
VERSION = 1
"""What the first fields of a file of measured steps say, which the campaign writes."""
LOGITS = 1000


@dataclass(frozen=True)
class Measured:
    """Measured steps of some ranks."""

    ranks: int
    batch: int
    """Images of one rank in a step."""
    step_sec: float
    """The median."""
    variation: float
    """Standard deviation of the times of steps over their mean."""
    hosts: int = 1
    bits_per_sec: float | None = None
    """Rate that each host's link to the others is throttled to; None on one host."""
    all_reduce_mb: int = 25
    model: str = "resnet50"
    fitted: bool = True
    """Whether the model may be fitted to these steps. The others check it."""
    on_gpu: bool = False
    """Whether each rank has a separate GPU. Otherwise the ranks share the cores of one processor.
    """

    @property
    def buckets(self) -> tuple[int, ...]:
        """Bytes of every exchange: gradients are float32 on the wire."""
        return split_gradients(MODELS[self.model], LOGITS, self.all_reduce_mb)


@dataclass(frozen=True)
class Fit:
    """The parameters that were fitted."""

    fixed_sec: float
    image_sec: float
    variation: float
    """Of one rank."""
    sharing: float | None = None
    """See `Cluster.sharing`. None if only one rank was measured."""
    handling: Link = field(default_factory=lambda: Link(math.inf))
    """What the cores of the machine need to handle the messages of one rank."""
    efficiency: float = 1.0
    """The share of a link's rate that carries gradients. The rest is headers, and pauses of the
    protocol."""
    overlap: float = 0.0
    """See `Step.overlap`."""

    def step(self, measured: Measured) -> Step:
        """Return a rank's step. On a GPU the overlap is that of the architecture, on a processor
        the fitted one."""
        overlap = self.overlap
        if measured.on_gpu:
            spec = MODELS[measured.model]
            overlap = measure_overlap(spec, LOGITS, PUBLISHED_SIZE, measured.all_reduce_mb)
        times = (self.fixed_sec, self.image_sec)
        return Step(*times, measured.buckets, overlap=overlap, variation=self.variation)

    def cluster(self, measured: Measured) -> Cluster:
        """Return the machine, whose cores all ranks share, with its throttled links."""
        rate = math.inf
        if measured.bits_per_sec is not None:
            rate = measured.bits_per_sec / 8 * self.efficiency
        per_host = -(-measured.ranks // measured.hosts)
        sharing = 1.0 if self.sharing is None else self.sharing
        return Cluster(per_host, self.handling, Link(rate), sharing=sharing)


@dataclass(frozen=True)
class Compared:
    """A measured step and its prediction."""

    measured: Measured
    predicted_sec: float

    @property
    def difference(self) -> float:
        """The prediction over the measurement, minus 1."""
        return self.predicted_sec / self.measured.step_sec - 1


def compare_steps(
    fit: Fit, rows: Sequence[Measured], gpus: Cluster | None = None
) -> list[Compared]:
    """Return each row with its prediction. `gpus` is the cluster of rows that were measured on
    GPUs."""
    compared = []
    for row in rows:
        cluster = gpus if row.on_gpu and gpus is not None else fit.cluster(row)
        time = step_time(fit.step(row), cluster, row.ranks, row.batch)
        compared.append(Compared(row, time.total))
    return compared


def fit_steps(rows: Sequence[Measured]) -> Fit:
    """Return the parameters that fit the rows of which `fitted` is true.

    Raises `DataError` if they do not determine the time of one rank: at least two batches of one
    rank are needed. Parameters of later stages stay at their defaults where nothing was measured.
    """
    used = [row for row in rows if row.fitted and (row.ranks == 1 or not row.on_gpu)]
    fit = _fit_one_rank([row for row in used if row.ranks == 1])
    fit = _fit_one_host(fit, [row for row in used if row.ranks > 1 and row.hosts == 1])
    return _fit_links(fit, [row for row in used if row.hosts > 1])


def _fit_one_rank(rows: Sequence[Measured]) -> Fit:
    if len({row.batch for row in rows}) < 2:
        raise DataError(
            "steps of one rank were measured at fewer than two batches, so the fixed time of a step"
            " is not known; measure two: lockstep benchmark train -n 1 -b 4,8 -o report.json"
        )
    times = [row.step_sec for row in rows]
    fixed, image = _solve_least_squares([[1.0, row.batch] for row in rows], times)
    return Fit(fixed, image, float(np.mean([row.variation for row in rows])))


def _fit_one_host(fit: Fit, rows: Sequence[Measured]) -> Fit:
    """Fit T = sharing n (fixed + image b) + n (bytes that a rank sends / bandwidth + its messages *
    latency)."""
    if not rows:
        return fit
    terms = []
    for row in rows:
        alone = fit.step(row).compute_sec(row.batch)
        messages = 2 * (row.ranks - 1) * len(row.buckets)
        terms.append([row.ranks * term for term in (alone, _count_bytes(row), messages)])
    sharing, byte, message = _solve_least_squares(terms, [row.step_sec for row in rows])
    return replace(fit, sharing=sharing, handling=Link(1 / byte if byte else math.inf, message))


def _fit_links(fit: Fit, rows: Sequence[Measured]) -> Fit:
    """Fit T = computing + wire time / efficiency - overlap * backward pass, where the wire is what
    a step waits for."""
    if not rows:
        return fit
    if fit.sharing is None:
        raise DataError(
            "measured steps over links, but none of several ranks on one host; measure those, too"
        )
    waiting = list(rows)
    result = fit
    while waiting:
        terms = []
        exposed = []
        for row in waiting:
            step = fit.step(row)
            cluster = fit.cluster(row)
            computing = step_time(step, cluster, row.ranks, row.batch).computing
            wire = _count_bytes(row) / cluster.network.bytes_per_sec
            terms.append([wire, -computing * step.backward_share])
            exposed.append(row.step_sec - computing)
        times = [row.step_sec for row in waiting]
        slowness, overlap = _solve_least_squares(terms, exposed, times)
        efficiency = min(1 / slowness, 1.0) if slowness else 1.0
        result = replace(fit, efficiency=efficiency, overlap=min(overlap, 1.0))
        still = [row for row in waiting if _waits_for_link(result, row)]
        if len(still) == len(waiting):
            break
        waiting = still  # what hides behind the work of the cores says nothing about links
    return result


def _count_bytes(row: Measured) -> float:
    """Return the bytes that a rank sends in a step."""
    return ring_sec(row.ranks, sum(row.buckets), Link(1.0))


def _waits_for_link(fit: Fit, row: Measured) -> bool:
    """Return whether a step waits for its link, and not only for the cores."""
    step = fit.step(row)
    over_link = step_time(step, fit.cluster(row), row.ranks, row.batch)
    on_one_host = step_time(step, fit.cluster(replace(row, hosts=1)), row.ranks, row.batch)
    return over_link.exchanging > on_one_host.exchanging


def _solve_least_squares(
    terms: Sequence[Sequence[float]], values: Sequence[float], scales: Sequence[float] | None = None
) -> list[float]:
    """Return coefficients of at least 0 of the terms whose sums are nearest to the values, in
    shares of `scales`.

    `scales` are the values unless given. A coefficient that would be negative is 0, the most
    negative one first. So is one that the rows do not determine: of terms that are proportional,
    the first counts.
    """
    scaled = np.asarray(scales or values, np.float64)
    table = np.asarray(terms, np.float64) / scaled[:, None]
    wanted = np.asarray(values, np.float64) / scaled
    columns: list[int] = []
    for column in range(table.shape[1]):
        chosen = table[:, [*columns, column]]
        sizes = np.linalg.norm(chosen, axis=0)
        if sizes[-1] and np.linalg.matrix_rank(chosen / sizes, tol=1e-6) > len(columns):
            columns.append(column)
    coefficients = np.zeros(table.shape[1])
    while columns:
        sizes = np.linalg.norm(table[:, columns], axis=0)
        solved = np.linalg.lstsq(table[:, columns] / sizes, wanted, rcond=None)[0] / sizes
        if min(solved) >= 0:
            coefficients[columns] = solved
            break
        del columns[int(np.argmin(solved * sizes))]
    return coefficients.tolist()


# Files of measured steps


def read_measured(path: Path) -> list[Measured]:
    """Return the steps in a file of the campaign, or in a report of `lockstep benchmark train`.

    Raises `DataError` if the file is neither, or holds something else than such a file.
    """
    try:
        file = parsed(read_regular(path, TEXT))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as JSON: {error}; give a report of lockstep benchmark train"
        ) from None
    try:
        if not isinstance(file, dict) or file.get("kind") != KIND:
            return _convert_report(read_benchmark(path))
        if file.get("version") != VERSION:
            raise DataError(
                f"{path} has version {file.get('version')}, expected {VERSION}; measure again"
            )
        model = file["settings"]["model"]
        rows = []
        for row in file["rows"]:
            fields = {name: row[name] for name in _FIELDS}
            rows.append(_check_row(row["times_sec"], model=model, **fields))
        return rows
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} has a row that is incomplete or wrong ({error}); measure again"
        ) from None


_FIELDS = ("ranks", "batch", "hosts", "bits_per_sec", "all_reduce_mb", "fitted")


def _convert_report(report: BenchmarkReport) -> list[Measured]:
    """Return the training steps of a benchmark report that were measured on one held batch."""
    megabytes = report["settings"]["execution"].get("all_reduce_mb", Execution().all_reduce_mb)
    rows = []
    for cell in report["cells"]:
        if cell["status"] == OK and cell["what"] == TRAIN and cell["data"] == SYNTHETIC:
            row = _check_row(
                cell["times_sec"],
                ranks=cell["ranks"],
                batch=cell["batch"],
                all_reduce_mb=megabytes,
                model=plain_name(cell["model"]),
                on_gpu=not str(cell["device"]).startswith("CPU"),
            )
            rows.append(row)
    return rows


def _check_row(times_sec: Any, **fields: Any) -> Measured:
    """Return a row. Raises `ValueError` for values that no measurement has."""
    hosts = fields.get("hosts", 1)
    counts = (fields["ranks"], fields["batch"], fields["all_reduce_mb"], hosts)
    rate = fields.get("bits_per_sec")
    if not all(map(is_positive, counts)) or fields["model"] not in MODELS:
        raise ValueError(f"unknown model, or a count below 1: {fields}")
    if hosts > 1 and not _is_above_0(rate):
        raise ValueError(f"several hosts, and a link of {rate} bits per second")
    if not isinstance(fields.get("fitted", True), bool):
        raise ValueError(f"fitted is {fields['fitted']}")
    if not isinstance(times_sec, list) or not times_sec or not all(map(_is_above_0, times_sec)):
        raise ValueError(f"times of steps are {times_sec}")
    times = np.asarray(times_sec, np.float64)
    variation = float(times.std() / times.mean())
    return Measured(step_sec=float(np.median(times)), variation=variation, **fields)


def _is_above_0(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf
