"""A model of the step time of data-parallel training: computing, adding up gradients over links,
waiting, and loading.

All functions are pure. Times are in seconds, sizes in bytes. docs/explanation/scaling.md explains
the model, how it is fitted and checked, and what it leaves out.

Sources: ring and tree all-reduce, Thakur, Rabenseifner and Gropp 2005
(doi:10.1177/1094342005051521); latencies over several hosts as NCCL adds them up (NVIDIA/nccl,
src/graph/tuning.cc); what an exchange holds, PyTorch's DistributedDataParallel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from lockstep.models.architectures import ModelSpec
from lockstep.models.operations import layers

WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a gradient value on the wire."""
_BACKWARD_SHARE = 2 / 3
"""A convolution is computed once forward and twice backward: for the gradients of its inputs and of
its kernel."""


@dataclass(frozen=True)
class Link:
    """A connection that carries data both ways at the same time, each way at this speed."""

    bytes_per_sec: float
    latency_sec: float = 0.0
    """Time of a message that holds next to nothing."""


@dataclass(frozen=True)
class Cluster:
    """The machines that train."""

    ranks_per_host: int
    local: Link
    """Between the ranks of a host. If ranks share cores, this is what the cores need to handle a
    rank's messages."""
    network: Link
    """Between hosts: all network adapters of a host together."""
    loader_images_per_sec: float = math.inf
    """Images that a host loads."""
    sharing: float | None = None
    """None: every rank has a separate processor or GPU. Otherwise all ranks share the cores of
    one processor, and n ranks compute this times n times as long as one rank, but not less. If a
    rank has as many threads as the processor has cores, it is about 1; with one thread in a rank,
    about 1 over the number of cores."""
    algorithms: tuple[str, ...] = ("ring", "tree", "hierarchical")
    """What the library can choose from. It takes the fastest."""


@dataclass(frozen=True)
class Step:
    """A training step of one rank that has its processor for itself."""

    fixed_sec: float
    """What a step takes in addition to its images: starting kernels, reading weights, the update.
    """
    image_sec: float
    buckets: tuple[int, ...]
    """Bytes of every exchange, in the order in which they become ready."""
    backward_share: float = _BACKWARD_SHARE
    """The backward pass as a share of the step."""
    overlap: float = 0.0
    """The share of the backward pass in which gradients are exchanged; 0 if the exchange begins
    after it."""
    variation: float = 0.0
    """Standard deviation of the computing time over its mean, on one rank."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(self.buckets)

    @property
    def messages(self) -> int:
        """Number of exchanges."""
        return len(self.buckets)

    def compute_sec(self, batch: float) -> float:
        """Return the computing time of a step of `batch` images."""
        return self.fixed_sec + self.image_sec * batch


@dataclass(frozen=True)
class StepTime:
    """What a step's time consists of."""

    fixed: float
    """The part of the computing time that does not depend on the batch."""
    images: float
    """The part of the computing time that does."""
    waiting: float
    """Waiting for the slowest rank."""
    exchanging: float
    """The part of the exchange of gradients that no computing hides."""
    loading: float
    """What loading the images takes. It happens at the same time as everything else."""

    @property
    def computing(self) -> float:
        """Seconds of computing."""
        return self.fixed + self.images

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return max(self.computing + self.waiting + self.exchanging, self.loading)

    @property
    def bound_by(self) -> str:
        """The name of the largest part."""
        if self.loading >= self.computing + self.waiting + self.exchanging:
            return "loading"
        parts = {
            "images": self.images,
            "fixed time": self.fixed,
            "waiting": self.waiting,
            "exchange": self.exchanging,
        }
        return max(parts, key=lambda name: parts[name])


# All-reduce


def ring_sec(ranks: int, size: float, link: Link, messages: int = 1) -> float:
    """Return the time in which a ring adds up `size` bytes in this many exchanges.

    Every rank sends 2 (n - 1) times an n-th of an exchange.

    >>> ring_sec(4, 100.0, Link(10.0, 0.5), messages=2)  # 1.5 * 10 s, and 2 * 6 latencies
    21.0
    """
    return (
        2 * (ranks - 1) / ranks * size / link.bytes_per_sec
        + 2 * (ranks - 1) * link.latency_sec * messages
    )


def tree_sec(ranks: int, size: float, link: Link, messages: int = 1) -> float:
    """Return the time in which a tree adds up `size` bytes: once up and once down, pipelined.

    >>> tree_sec(4, 100.0, Link(10.0, 0.5), messages=2)  # 20 s, and 2 * 4 latencies
    24.0
    """
    if ranks == 1:
        return 0.0
    return 2 * size / link.bytes_per_sec + 2 * _count_levels(ranks) * link.latency_sec * messages


def _count_levels(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _time_flat_ring(cluster: Cluster, ranks: int, size: float, messages: int) -> float:
    """A ring through all hosts. It enters and leaves every host once, so the slowest link limits
    it."""
    hosts = count_hosts(cluster, ranks)
    if hosts == 1:
        return ring_sec(ranks, size, cluster.local, messages)
    slowest = _find_slowest(cluster, ranks, hosts)
    local = (ranks - hosts) * cluster.local.latency_sec
    latencies = 2 * local + 2 * (hosts - 1) * cluster.network.latency_sec
    return 2 * (ranks - 1) / ranks * size / slowest + latencies * messages


def _time_flat_tree(cluster: Cluster, ranks: int, size: float, messages: int) -> float:
    """A tree within each host, and one over the hosts, as one pipeline."""
    hosts = count_hosts(cluster, ranks)
    if hosts == 1:
        return tree_sec(ranks, size, cluster.local, messages)
    local = 2 * _count_levels(min(ranks, cluster.ranks_per_host)) * cluster.local.latency_sec
    latencies = local + 2 * _count_levels(hosts) * cluster.network.latency_sec
    return 2 * size / _find_slowest(cluster, ranks, hosts) + latencies * messages


def _find_slowest(cluster: Cluster, ranks: int, hosts: int) -> float:
    """Return the bandwidth of the slowest link that is used. Ranks that are alone on their hosts
    use only the network."""
    local = cluster.local.bytes_per_sec if ranks > hosts else math.inf
    return min(local, cluster.network.bytes_per_sec)


def _time_hierarchical(cluster: Cluster, ranks: int, size: float, messages: int) -> float:
    """Each host adds up by a ring, each of its ranks a share; shares are added up over hosts; hosts
    gather them by a ring.

    The two rings within a host are the two halves of one all-reduce.
    """
    hosts = count_hosts(cluster, ranks)
    within = ring_sec(min(ranks, cluster.ranks_per_host), size, cluster.local, messages)
    ring = ring_sec(hosts, size, cluster.network, messages)
    tree = tree_sec(hosts, size, cluster.network, messages)
    return within + min(ring, tree)


_ALGORITHMS = {"ring": _time_flat_ring, "tree": _time_flat_tree, "hierarchical": _time_hierarchical}


def count_hosts(cluster: Cluster, ranks: int) -> int:
    """Return the number of hosts that this many ranks need."""
    return -(-ranks // cluster.ranks_per_host)


def all_reduce_sec(cluster: Cluster, ranks: int, size: float, messages: int = 1) -> float:
    """Return the time in which the fastest algorithm adds up `size` bytes over all ranks, in this
    many exchanges."""
    if ranks == 1:
        return 0.0
    return min(_ALGORITHMS[name](cluster, ranks, size, messages) for name in cluster.algorithms)


# A step


def step_time(step: Step, cluster: Cluster, ranks: int, batch: float) -> StepTime:
    """Return the time of a step in which each of `ranks` ranks trains `batch` images."""
    loading = batch * min(ranks, cluster.ranks_per_host) / cluster.loader_images_per_sec
    alone = step.compute_sec(batch)
    images = step.image_sec * batch
    if cluster.sharing is not None and ranks > 1:
        # Cores that all ranks share do the work of all ranks, and then wait for the network. No
        # rank waits for a slow one: it leaves the cores to it. What the cores do is done in
        # sequence: computing does not hide handling messages.
        times = max(cluster.sharing * ranks, 1.0)
        computing = times * alone
        handling = ranks * ring_sec(ranks, step.gradient_bytes, cluster.local, step.messages)
        wire = last = 0.0
        if count_hosts(cluster, ranks) > 1:
            wire = ring_sec(ranks, step.gradient_bytes, cluster.network, step.messages)
            last = ring_sec(ranks, step.buckets[-1], cluster.network)
        exposed = max(wire - _hide(step, computing), last, handling)
        return StepTime(times * step.fixed_sec, times * images, 0.0, exposed, loading)
    waiting = alone * step.variation * expect_maximum(ranks)
    wire = all_reduce_sec(cluster, ranks, step.gradient_bytes, step.messages)
    last = all_reduce_sec(cluster, ranks, step.buckets[-1])
    exposed = max(wire - _hide(step, alone), last)
    return StepTime(step.fixed_sec, images, waiting, exposed, loading)


def _hide(step: Step, computing: float) -> float:
    """Return the seconds of an exchange that happen during the backward pass."""
    return step.overlap * step.backward_share * computing


def images_per_sec(step: Step, cluster: Cluster, ranks: int, batch: float) -> float:
    """Return the images per second of all ranks together."""
    return ranks * batch / step_time(step, cluster, ranks, batch).total


@cache
def expect_maximum(ranks: int) -> float:
    """Return the expected maximum of this many independent standard normal values, by integrating x
    n f(x) F(x)^(n - 1).

    >>> round(expect_maximum(2), 6)  # 1 / sqrt(pi)
    0.56419
    >>> expect_maximum(1), round(expect_maximum(1000), 3)
    (0.0, 3.241)
    """
    if ranks == 1:
        return 0.0
    x = np.linspace(-9.0, 9.0, 3601)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in x])
    return float(np.sum(x * ranks * density * below ** (ranks - 1)) * (x[1] - x[0]))


# Scaling


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a number of ranks."""

    ranks: int
    batch: int
    """Images of one rank in a step."""
    images_per_sec: float
    speedup: float
    """Over one rank with its own batch."""
    bound_by: str


def predict_weak_scaling(
    step: Step, cluster: Cluster, counts: Sequence[int], batch: int
) -> list[Prediction]:
    """Return the speeds of these numbers of ranks. Each trains `batch` images in a step."""
    return [_predict(step, cluster, ranks, batch, batch) for ranks in counts]


def predict_strong_scaling(
    step: Step, cluster: Cluster, counts: Sequence[int], batch: int, global_batch: int
) -> list[Prediction]:
    """Return the speeds of these numbers of ranks, which together train `global_batch` images in a
    step.

    Numbers of ranks that do not divide it are left out. Speed-ups are over one rank with `batch`
    images.
    """
    divisors = [ranks for ranks in counts if global_batch % ranks == 0]
    return [_predict(step, cluster, ranks, global_batch // ranks, batch) for ranks in divisors]


def _predict(step: Step, cluster: Cluster, ranks: int, batch: int, batch_of_one: int) -> Prediction:
    one = images_per_sec(step, cluster, 1, batch_of_one)
    rate = images_per_sec(step, cluster, ranks, batch)
    bound_by = step_time(step, cluster, ranks, batch).bound_by
    return Prediction(ranks, batch, rate, rate / one, bound_by)


# What a model exchanges


def split_gradients(
    spec: ModelSpec, logits: int, megabytes: int | None, value_bytes: int = 4
) -> tuple[int, ...]:
    """Return the bytes of every exchange of a model's gradients, in the order in which they become
    ready.

    Gradients are ready from the last layer to the first. An exchange is closed as soon as it holds
    `megabytes` MB of float32; None: all gradients in one exchange. `value_bytes` is the size of a
    value on the wire.

    >>> from lockstep.models.architectures import MODELS
    >>> split_gradients(MODELS["resnet50"], 1000, None)
    (102228128,)
    """
    buckets = []
    count = 0
    for tensor in reversed(list(spec.list_tensors(logits))):
        if tensor.is_trained:
            count += math.prod(tensor.shape)
            if megabytes is not None and 4 * count >= megabytes * 2**20:
                buckets.append(count * value_bytes)
                count = 0
    if count:
        buckets.append(count * value_bytes)
    return tuple(buckets)


def measure_overlap(spec: ModelSpec, logits: int, image_size: int, megabytes: int) -> float:
    """Return the share of the backward pass that is left when the first exchange can begin.

    The backward pass goes from the last layer to the first, and takes as long as its multiply-adds
    say. The first exchange begins when the layers that are done hold `megabytes` MB of gradients.
    """
    backwards = list(reversed(list(layers(spec, image_size, logits))))
    done = 0
    weights = 0
    for layer in backwards:
        done += layer.macs
        weights += 4 * layer.weights
        if weights >= megabytes * 2**20:
            break
    return 1 - done / sum(layer.macs for layer in backwards)
