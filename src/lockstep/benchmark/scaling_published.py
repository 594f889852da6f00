"""Published systems as data for `lockstep.benchmark.scaling`, and predictions next to published
speeds.

Every number has its source. Bandwidths are those that NCCL reaches, not those of data sheets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.benchmark.scaling import (
    WIRE_BYTES,
    Cluster,
    Link,
    Step,
    all_reduce_sec,
    buckets_of,
    images_per_sec,
    overlap_of,
)
from lockstep.models.architectures import MODELS
from lockstep.recipes import Execution
from lockstep.recipes.published_speeds import PUBLISHED_SIZE, Row
from lockstep.system.errors import UserError, nearest

LOGITS = 1000
VARIATION = 0.006
"""Standard deviation of a GPU's step over its mean. Assumed. Source: TensorFlow's inference on one
V100 in fp32 at batch 256, where computing dominates: a mean of 189.85 ms and a p99 of 192.47 ms,
2.33 standard deviations above it."""


@dataclass(frozen=True)
class System:
    """A computer with GPUs."""

    name: str
    gpus: int
    nvlink: Link
    """What NCCL reaches between the GPUs of the computer."""
    adapter: Link
    """What NCCL reaches through a network adapter."""
    adapters: int
    accelerators: tuple[str, ...]
    """The GPUs, as published speeds name them."""
    sources: tuple[str, ...]

    def cluster(self, loader_images_per_sec: float = math.inf) -> Cluster:
        """Return as many of these computers as needed, each of which loads this many images per
        second."""
        network = Link(self.adapters * self.adapter.bytes_per_sec, self.adapter.latency_sec)
        return Cluster(self.gpus, self.nvlink, network, loader_images_per_sec)


_NVLINK_SEC = 3.4e-6
_NETWORK_SEC = 9.6e-6
"""Latency of a message in a ring of NCCL, protocol Simple. Source: hwLat in NVIDIA/nccl,
src/graph/tuning.cc."""
_SPEEDS = (
    "GB/s of an NVLink as NCCL counts it: SM70, SM80 and SM90_NVLINK_BW in NVIDIA/nccl,"
    " src/graph/topo.h"
)

SYSTEMS: dict[str, System] = {
    "dgx-1": System(
        "DGX-1 with V100",
        gpus=8,
        nvlink=Link(6 * 20e9, _NVLINK_SEC),
        adapter=Link(12e9, _NETWORK_SEC),
        adapters=4,
        accelerators=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        sources=(
            (
                "6 NVLinks, 300 GB/s in both directions: NVIDIA/systems/dgx1_ngc20.06_mxnet.json in"
                " mlcommons/training_results_v0.7"
            ),
            _SPEEDS,
            "48 GB/s through 4 adapters of 100 Gbit/s: NVIDIA/nccl-tests issue 29",
        ),
    ),
    "dgx-2": System(
        "DGX-2 with V100",
        gpus=16,
        nvlink=Link(6 * 20e9, _NVLINK_SEC),
        adapter=Link(12e9, _NETWORK_SEC),
        adapters=8,
        accelerators=("Tesla V100-SXM3-32GB",),
        sources=(
            (
                "6 NVLinks, 300 GB/s in both directions, and 8 adapters of 100 Gbit/s:"
                " NVIDIA/systems/dgx2h_n32_ngc20.06_mxnet.json in mlcommons/training_results_v0.7"
            ),
            _SPEEDS,
            "12 GB/s through an adapter of 100 Gbit/s: NVIDIA/nccl-tests issue 29",
        ),
    ),
    "dgx-a100": System(
        "DGX A100",
        gpus=8,
        nvlink=Link(12 * 20e9, _NVLINK_SEC),
        adapter=Link(24e9, _NETWORK_SEC),
        adapters=8,
        accelerators=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"),
        sources=(
            (
                "12 NVLinks, 600 GB/s in both directions, and 8 adapters of 200 Gbit/s:"
                " NVIDIA/systems/dgxa100_n128_ngc20.06_mxnet.json in"
                " mlcommons/training_results_v0.7"
            ),
            f"{_SPEEDS}; 232.5 GB/s were measured: NVIDIA/nccl issue 1048",
            "192 GB/s through 8 adapters: NVIDIA/nccl issue 812",
        ),
    ),
    "dgx-h100": System(
        "DGX H100",
        gpus=8,
        nvlink=Link(18 * 20.6e9, _NVLINK_SEC),
        adapter=Link(48.5e9, _NETWORK_SEC),
        adapters=8,
        accelerators=("NVIDIA H100 80GB HBM3",),
        sources=(
            (
                "18 NVLinks, 900 GB/s in both directions, and 8 adapters of 400 Gbit/s:"
                " NVIDIA/systems/eos_n8_ngc24.04_mxnet.json in mlcommons/training_results_v4.0"
            ),
            f"{_SPEEDS}; 370 GB/s are what NCCL reaches: NVIDIA/nccl-tests issue 212",
            "48 to 49 GB/s through an adapter: NVIDIA/nccl-tests issue 267",
        ),
    ),
}


def clusters(name: str = "", loader_images_per_sec: float = 0.0) -> dict[str, Cluster]:
    """Return the clusters of all systems by short name, or that of one. Each computer loads this
    many images per second.

    0: no limit. Raises `UserError` if there is no such system.
    """
    if name and name not in SYSTEMS:
        raise UserError(f"there is no system {name!r}. {nearest(name, SYSTEMS)}")
    chosen = {name: SYSTEMS[name]} if name else SYSTEMS
    return {
        each: system.cluster(loader_images_per_sec or math.inf) for each, system in chosen.items()
    }


def step_of(
    model: str, rate: float, batch: int, fixed_sec: float = 0.0, wire: str = "fp32"
) -> Step:
    """Return the step of a GPU that trains `rate` images per second alone, as PyTorch's engine
    exchanges gradients."""
    spec = MODELS[model]
    megabytes = Execution().all_reduce_mb
    return Step(
        fixed_sec,
        1 / rate - fixed_sec / batch,
        buckets_of(spec, LOGITS, megabytes, WIRE_BYTES[wire]),
        overlap=overlap_of(spec, LOGITS, PUBLISHED_SIZE, megabytes),
        variation=VARIATION,
    )


# Speeds of several GPUs over one, next to published ones


@dataclass(frozen=True)
class Scaled:
    """A published speed of several GPUs, the speed of one GPU in the same table, and the
    prediction."""

    row: Row
    one: Row
    predicted_images_per_sec: float

    @property
    def published_speedup(self) -> float:
        """Published speed of several GPUs over that of one."""
        return _rate(self.row) / _rate(self.one)

    @property
    def predicted_speedup(self) -> float:
        """Predicted speed of several GPUs over the published one of one."""
        return self.predicted_images_per_sec / _rate(self.one)


DEFAULT_BATCH = 256
"""Images of a GPU in a step where a published table does not give them."""


def published_speedups(rows: Sequence[Row], cluster_of: dict[str, Cluster]) -> list[Scaled]:
    """Return every published training speed of several GPUs of a known system whose table has one
    GPU, too.

    `cluster_of` holds the clusters by short name of the system.
    """
    found = []
    for row in rows:
        system = next(
            (name for name, each in SYSTEMS.items() if row.accelerator in each.accelerators), None
        )
        one = None if system is None else _one(row, rows)
        if system is None or one is None or system not in cluster_of:
            continue
        batch = row.batch_images or DEFAULT_BATCH
        step = step_of(row.model, _rate(one), batch)
        found.append(
            Scaled(row, one, images_per_sec(step, cluster_of[system], row.accelerators or 1, batch))
        )
    return found


def _one(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row of one GPU that differs from a row in nothing else."""
    if row.kind != "train" or row.images_per_sec is None or (row.accelerators or 1) == 1:
        return None
    same = ("document", "table", "model", "accelerator", "precision", "variant", "batch_images")
    return next(
        (
            each
            for each in rows
            if each.accelerators == 1
            and each.images_per_sec is not None
            and all(getattr(each, name) == getattr(row, name) for name in same)
        ),
        None,
    )


def _rate(row: Row) -> float:
    assert row.images_per_sec is not None
    return row.images_per_sec


# MLPerf: one model, three sizes


@dataclass(frozen=True)
class Submission:
    """A row of MLPerf's results with the batch of its configuration."""

    gpus: int
    batch: int
    """Images of one GPU in a step."""
    images_per_sec: float
    source: str

    @property
    def step_sec(self) -> float:
        """Seconds of a step."""
        return self.batch * self.gpus / self.images_per_sec


_CONFIG = "NVIDIA/benchmarks/resnet/implementations"
SUBMISSIONS = (
    Submission(8, 400, 56744, f"v4.0, NVIDIA Eos; {_CONFIG}/mxnet/config_DGXH100.sh of v3.1"),
    Submission(
        64, 50, 308886, f"v4.0, 8 nodes; {_CONFIG}/mxnet/config_DGXH100_multi_8x8x50.sh of v3.1"
    ),
    Submission(
        3584, 16, 9940000, f"v3.0; {_CONFIG}/mxnet/config_DGXH100_multi_448x8x16.sh of v3.1"
    ),
)
"""ResNet-50 on H100 by MXNet, in rising number of GPUs. The exchange has fp16 values and does not
overlap ("Default is no NCCL and BWD overlap" in the configurations). Speeds are those of
`published_speeds.yaml`."""


def mlperf_step() -> Step:
    """Return the step that fits the first two submissions: their exchange is predicted, the rest is
    linear in the batch."""
    buckets = buckets_of(MODELS["resnet50"], LOGITS, None, WIRE_BYTES["fp16"])
    cluster = SYSTEMS["dgx-h100"].cluster()
    first, second = (
        (each.batch, each.step_sec - all_reduce_sec(cluster, each.gpus, sum(buckets)))
        for each in SUBMISSIONS[:2]
    )
    image_sec = (first[1] - second[1]) / (first[0] - second[0])
    return Step(second[1] - image_sec * second[0], image_sec, buckets)


def mlperf_predictions() -> list[tuple[Submission, float]]:
    """Return every submission with its predicted images per second. The first two are fitted, the
    third is a check."""
    step = mlperf_step()
    cluster = SYSTEMS["dgx-h100"].cluster()
    return [(each, images_per_sec(step, cluster, each.gpus, each.batch)) for each in SUBMISSIONS]


# Predictions


@dataclass(frozen=True)
class Base:
    """A published speed of one GPU from which larger numbers are predicted."""

    model: str
    system: str
    """The short name in `SYSTEMS`."""
    batch: int
    images_per_sec: float
    source: str


BASES = (
    Base("resnet50", "dgx-a100", 256, 2470, "PyTorch in mixed precision (21.03)"),
    Base("resnext101-32x4d", "dgx-a100", 128, 1211, "PyTorch in mixed precision (21.03.1)"),
    Base("resnet50", "dgx-1", 256, 1200, "PyTorch in mixed precision (21.03), V100 with 16 GB"),
    Base(
        "resnext101-32x4d",
        "dgx-1",
        128,
        587,
        "PyTorch in mixed precision (21.03.1), V100 with 16 GB",
    ),
    Base("resnet50", "dgx-h100", 400, 56744 / 8, "MLPerf v4.0, NVIDIA Eos: an eighth of 8 GPUs"),
)
"""Speeds of one GPU in `published_speeds.yaml`, from which larger numbers are predicted."""


def base_step(base: Base) -> Step:
    """Return the step of a base. Its fixed time is that of `mlperf_step`, because no page gives one
    GPU at two batches."""
    return step_of(base.model, base.images_per_sec, base.batch, mlperf_step().fixed_sec)


def without_overlap(step: Step, model: str, wire: str = "fp32") -> Step:
    """Return a step whose gradients are exchanged at once, after the backward pass."""
    return replace(
        step, overlap=0.0, buckets=buckets_of(MODELS[model], LOGITS, None, WIRE_BYTES[wire])
    )
