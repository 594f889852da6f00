"""Published systems as data for `benchmarks.scaling.model`, and predictions next to published
speeds.

Every number has its source. Bandwidths are those that NCCL reaches, not those of data sheets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scaling.model import (
    WIRE_BYTES,
    Cluster,
    Link,
    Step,
    all_reduce_sec,
    images_per_sec,
    measure_overlap,
    split_gradients,
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


def _describe_system(
    name: str,
    gpus: int,
    accelerators: tuple[str, ...],
    nvlink_gb: float,
    adapter_gb: float,
    adapters: int,
    sources: tuple[str, ...],
) -> System:
    """Return a system, given GB/s of all NVLinks of a GPU and of an adapter."""
    nvlink = Link(nvlink_gb * 1e9, _NVLINK_SEC)
    adapter = Link(adapter_gb * 1e9, _NETWORK_SEC)
    return System(name, gpus, nvlink, adapter, adapters, accelerators, sources)


_DGX_1 = (
    "6 NVLinks, 300 GB/s in both directions: NVIDIA/systems/dgx1_ngc20.06_mxnet.json in"
    " mlcommons/training_results_v0.7",
    _SPEEDS,
    "48 GB/s through 4 adapters of 100 Gbit/s: NVIDIA/nccl-tests issue 29",
)
_DGX_2 = (
    "6 NVLinks, 300 GB/s in both directions, and 8 adapters of 100 Gbit/s:"
    " NVIDIA/systems/dgx2h_n32_ngc20.06_mxnet.json in mlcommons/training_results_v0.7",
    _SPEEDS,
    "12 GB/s through an adapter of 100 Gbit/s: NVIDIA/nccl-tests issue 29",
)
_DGX_A100 = (
    "12 NVLinks, 600 GB/s in both directions, and 8 adapters of 200 Gbit/s:"
    " NVIDIA/systems/dgxa100_n128_ngc20.06_mxnet.json in mlcommons/training_results_v0.7",
    f"{_SPEEDS}; 232.5 GB/s were measured: NVIDIA/nccl issue 1048",
    "192 GB/s through 8 adapters: NVIDIA/nccl issue 812",
)
_DGX_H100 = (
    "18 NVLinks, 900 GB/s in both directions, and 8 adapters of 400 Gbit/s:"
    " NVIDIA/systems/eos_n8_ngc24.04_mxnet.json in mlcommons/training_results_v4.0",
    f"{_SPEEDS}; 370 GB/s are what NCCL reaches: NVIDIA/nccl-tests issue 212",
    "48 to 49 GB/s through an adapter: NVIDIA/nccl-tests issue 267",
)
_V100 = ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB")
_A100 = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")
SYSTEMS: dict[str, System] = {
    "dgx-1": _describe_system("DGX-1 with V100", 8, _V100, 6 * 20, 12, 4, _DGX_1),
    "dgx-2": _describe_system(
        "DGX-2 with V100", 16, ("Tesla V100-SXM3-32GB",), 6 * 20, 12, 8, _DGX_2
    ),
    "dgx-a100": _describe_system("DGX A100", 8, _A100, 12 * 20, 24, 8, _DGX_A100),
    "dgx-h100": _describe_system(
        "DGX H100", 8, ("NVIDIA H100 80GB HBM3",), 18 * 20.6, 48.5, 8, _DGX_H100
    ),
}


def build_clusters(name: str = "", loader_images_per_sec: float = 0.0) -> dict[str, Cluster]:
    """Return the clusters of all systems by short name, or that of one. Each computer loads this
    many images per second.

    0: no limit. Raises `UserError` if there is no such system.
    """
    if name and name not in SYSTEMS:
        raise UserError(f"there is no system {name!r}. {nearest(name, SYSTEMS)}")
    systems = {name: SYSTEMS[name]} if name else SYSTEMS
    limit = loader_images_per_sec or math.inf
    return {key: system.cluster(limit) for key, system in systems.items()}


def build_step(model: str, rate: float, batch: int, fixed_sec: float = 0.0) -> Step:
    """Return the step of a GPU that trains `rate` images per second alone, as the PyTorch backend
    exchanges gradients."""
    spec = MODELS[model]
    megabytes = Execution().all_reduce_mb
    return Step(
        fixed_sec,
        1 / rate - fixed_sec / batch,
        split_gradients(spec, LOGITS, megabytes, WIRE_BYTES["fp32"]),
        overlap=measure_overlap(spec, LOGITS, PUBLISHED_SIZE, megabytes),
        variation=VARIATION,
    )


# Speeds of several GPUs over one, next to published ones


@dataclass(frozen=True)
class Scaled:
    """A published speed of several GPUs, that of one GPU in the same table, and the prediction."""

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


def predict_speedups(rows: Sequence[Row], clusters: dict[str, Cluster]) -> list[Scaled]:
    """Return every published training speed of several GPUs of a known system whose table has one
    GPU, too. `clusters` are those of the systems, by short name."""
    scaled = []
    for row in rows:
        cluster = _find_cluster(row, clusters)
        one = _find_one(row, rows)
        if cluster is not None and one is not None:
            batch = row.batch_images or DEFAULT_BATCH
            step = build_step(row.model, _rate(one), batch)
            rate = images_per_sec(step, cluster, row.accelerators or 1, batch)
            scaled.append(Scaled(row, one, rate))
    return scaled


def _find_cluster(row: Row, clusters: dict[str, Cluster]) -> Cluster | None:
    for name, system in SYSTEMS.items():
        if row.accelerator in system.accelerators:
            return clusters.get(name)
    return None


def _find_one(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row of one GPU that differs from a row in nothing else."""
    if row.kind != "train" or row.images_per_sec is None or (row.accelerators or 1) == 1:
        return None
    same = ("document", "table", "model", "accelerator", "precision", "variant", "batch_images")
    for other in rows:
        is_same = all(getattr(other, name) == getattr(row, name) for name in same)
        if is_same and other.accelerators == 1 and other.images_per_sec is not None:
            return other
    return None


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


def fit_mlperf() -> Step:
    """Return the step that fits the first two submissions: their exchange is predicted, the rest is
    linear in the batch."""
    buckets = split_gradients(MODELS["resnet50"], LOGITS, None, WIRE_BYTES["fp16"])
    cluster = SYSTEMS["dgx-h100"].cluster()
    large, small = SUBMISSIONS[:2]
    large_sec = large.step_sec - all_reduce_sec(cluster, large.gpus, sum(buckets))
    small_sec = small.step_sec - all_reduce_sec(cluster, small.gpus, sum(buckets))
    image_sec = (large_sec - small_sec) / (large.batch - small.batch)
    return Step(small_sec - image_sec * small.batch, image_sec, buckets)


def predict_mlperf() -> list[tuple[Submission, float]]:
    """Return every submission with its predicted images per second. The first two are fitted, the
    third is a check."""
    step = fit_mlperf()
    cluster = SYSTEMS["dgx-h100"].cluster()
    return [(row, images_per_sec(step, cluster, row.gpus, row.batch)) for row in SUBMISSIONS]


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


def build_base_step(base: Base) -> Step:
    """Return the step of a base. Its fixed time is that of `fit_mlperf`, because no page gives one
    GPU at two batches."""
    return build_step(base.model, base.images_per_sec, base.batch, fit_mlperf().fixed_sec)
