"""The model of a step: closed forms by hand, published constants, a simulated ring, and what must
always hold."""

import dataclasses
import doctest
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scaling import model
from benchmarks.scaling.model import (
    Cluster,
    Link,
    Step,
    all_reduce_sec,
    expect_maximum,
    images_per_sec,
    measure_overlap,
    predict_strong_scaling,
    predict_weak_scaling,
    ring_sec,
    split_gradients,
    step_time,
    tree_sec,
)
from lockstep.models.architectures import MODELS

FAST = Link(100.0, 0.25)
SLOW = Link(10.0, 2.0)
"""Bytes and seconds of hand-computed cases."""


def simulate_ring(ranks: int, size: float, link: Link) -> float:
    """Pass pieces around: a rank sends its next piece when it has sent the last one and received
    the piece to send."""
    sent = [0.0] * ranks
    has = [0.0] * ranks
    for _ in range(2 * (ranks - 1)):
        starts = [max(sent[rank], has[rank]) for rank in range(ranks)]
        sent = [start + size / ranks / link.bytes_per_sec + link.latency_sec for start in starts]
        has = [sent[rank - 1] for rank in range(ranks)]
    return max(has)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_ring_takes_as_long_as_a_simulated_one(ranks: int) -> None:
    assert ring_sec(ranks, 1000.0, FAST) == pytest.approx(simulate_ring(ranks, 1000.0, FAST))


def test_closed_forms_by_hand() -> None:
    # 4 ranks, 1000 bytes in 3 exchanges: 2 * 3/4 * 1000 / 100, and 2 * 3 * 0.25 * 3
    assert ring_sec(4, 1000.0, FAST, 3) == 15.0 + 4.5
    # 2 * 1000 / 100, and 2 levels: 2 * 2 * 0.25 * 3
    assert tree_sec(4, 1000.0, FAST, 3) == 20.0 + 3.0
    assert tree_sec(5, 1000.0, FAST) == 20.0 + 2 * 3 * 0.25
    assert ring_sec(1, 1000.0, FAST) == tree_sec(1, 1000.0, FAST) == 0.0


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # 8 ranks on 2 hosts of 4. The slow link limits the ring: 2 * 7/8 * 1000 / 10. Of 14 steps,
        # 2 cross hosts.
        ("ring", 175.0 + 12 * 0.25 + 2 * 2.0),
        # The slow link limits the tree, too: 2 * 1000 / 10. Two levels are in a host, one is over
        # hosts.
        ("tree", 200.0 + 2 * 2 * 0.25 + 2 * 2.0),
        # A ring in each host: 2 * 3/4 * 1000 / 100 and 6 messages. A ring of 2 hosts: 2 * 1/2 *
        # 1000 / 10 and 2 messages.
        ("hierarchical", 15.0 + 6 * 0.25 + 100.0 + 2 * 2.0),
    ],
)
def test_several_hosts_by_hand(algorithm: str, expected: float) -> None:
    cluster = Cluster(4, FAST, SLOW, algorithms=(algorithm,))
    assert all_reduce_sec(cluster, 8, 1000.0) == pytest.approx(expected)
    assert all_reduce_sec(Cluster(4, FAST, SLOW), 8, 1000.0) <= all_reduce_sec(cluster, 8, 1000.0)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical"])
def test_one_rank_on_each_host_uses_no_local_link(algorithm: str) -> None:
    def time(local: Link) -> float:
        return all_reduce_sec(Cluster(1, local, SLOW, algorithms=(algorithm,)), 4, 1000.0)

    assert time(Link(0.001, 99.0)) == time(FAST)


# Expected values of the largest of n standard normal values: Harter, Biometrika 48 (1961), table 1.
@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, 0.56419), (3, 0.84628), (5, 1.16296), (10, 1.53875), (100, 2.50759)]
)
def test_the_slowest_of_ranks_is_that_of_published_tables(ranks: int, expected: float) -> None:
    assert expect_maximum(ranks) == pytest.approx(expected, abs=1e-5)


STEP = Step(fixed_sec=1.0, image_sec=0.5, buckets=(600, 400), backward_share=0.5, overlap=0.5)


def test_what_no_backward_pass_hides_is_exposed_and_at_least_the_last_exchange() -> None:
    slow = Cluster(4, Link(100.0), SLOW, algorithms=("ring",))
    # Computing: 1 + 4 * 0.5 = 3 s. Wire: 2 * 3/4 * 1000 / 100 = 15 s. Hidden: half of half of 3 s.
    time = step_time(STEP, slow, 4, 4)
    assert (time.computing, time.exchanging, time.total) == (3.0, 15.0 - 0.75, 17.25)
    assert time.bound_by == "exchange"
    # Wire: 1.5 s; 0.75 s of it are hidden; the last exchange takes 0.6 s. With more overlap it is
    # what remains.
    fast = dataclasses.replace(slow, local=Link(1000.0))
    assert step_time(STEP, fast, 4, 4).exchanging == 0.75
    result = step_time(dataclasses.replace(STEP, overlap=1.0), fast, 4, 4).exchanging
    assert result == pytest.approx(0.6)
    assert step_time(dataclasses.replace(STEP, overlap=0.0), fast, 4, 4).exchanging == 1.5
    assert step_time(STEP, fast, 1, 4).total == 3.0


def test_ranks_wait_for_the_slowest_and_for_the_loader() -> None:
    step = dataclasses.replace(STEP, variation=0.1)
    cluster = Cluster(4, Link(math.inf), SLOW, algorithms=("ring",))
    result = step_time(step, cluster, 2, 4).total
    assert result == pytest.approx(3.0 + 3.0 * 0.1 * 0.56419, abs=1e-5)
    # 4 ranks of a host take 16 images in a step; 8 ranks are on two hosts, each with its own
    # loader.
    loading = dataclasses.replace(cluster, loader_images_per_sec=2.0)
    assert [step_time(step, loading, ranks, 4).total for ranks in (1, 4)] == [3.0, 8.0]
    assert step_time(step, dataclasses.replace(loading, network=Link(math.inf)), 8, 4).total == 8.0
    assert step_time(step, loading, 4, 4).bound_by == "loading"


def test_ranks_that_share_cores_do_the_work_of_all() -> None:
    # Handling: 4 ranks, each 2 * 3/4 * 1000 / 1000 s. Wire: 1.5 * 1000 / 100 = 15 s; it hides the
    # handling.
    shared = Cluster(4, Link(1000.0), Link(100.0), sharing=0.9)
    assert step_time(STEP, shared, 4, 4).computing == pytest.approx(0.9 * 4 * 3.0)
    assert step_time(STEP, shared, 4, 4).exchanging == 4 * 1.5
    result = step_time(STEP, dataclasses.replace(shared, ranks_per_host=1), 4, 4).exchanging
    assert result == pytest.approx(15 - 0.25 * 10.8)
    assert step_time(STEP, shared, 1, 4).total == 3.0
    # Ranks with one thread each take as long as one alone, as long as there are cores for them.
    threads = dataclasses.replace(shared, sharing=1 / 8)
    assert [step_time(STEP, threads, ranks, 4).computing for ranks in (2, 8, 12)] == [3.0, 3.0, 4.5]
    # All but the last exchange is hidden: 2 * 3/4 * 400 / 1000 s.
    hidden = dataclasses.replace(shared, ranks_per_host=1, local=Link(1e9), network=Link(1000.0))
    assert step_time(STEP, hidden, 4, 4).exchanging == 0.6


def test_weak_and_strong_scaling() -> None:
    cluster = Cluster(8, Link(math.inf), Link(math.inf))
    weak = predict_weak_scaling(STEP, cluster, [1, 8], batch=4)
    assert [
        (prediction.ranks, prediction.batch, prediction.images_per_sec, prediction.speedup)
        for prediction in weak
    ] == [(1, 4, 4 / 3, 1.0), (8, 4, 32 / 3, 8.0)]
    # 16 images on 8 ranks: 2 each, in 2 s. 3 ranks do not divide 16.
    strong = predict_strong_scaling(STEP, cluster, [3, 8, 32], batch=4, global_batch=16)
    assert [
        (prediction.ranks, prediction.batch, prediction.images_per_sec, prediction.speedup)
        for prediction in strong
    ] == [(8, 2, 8.0, 6.0)]


links = st.builds(Link, st.floats(1.0, 1e12), st.floats(0.0, 1.0))
clusters = st.builds(
    Cluster, st.integers(1, 16), links, links, st.floats(0.1, 1e6), st.none() | st.floats(0.5, 2.0)
)
steps = st.builds(
    Step,
    st.floats(0.0, 1.0),
    st.floats(1e-6, 1.0),
    st.lists(st.integers(1, 10**9), min_size=1, max_size=8).map(tuple),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.2),
)


@given(steps, clusters, st.integers(1, 64), st.integers(1, 512), st.floats(1.0, 10.0))
def test_what_is_faster_never_slows_a_step(
    step: Step, cluster: Cluster, ranks: int, batch: int, factor: float
) -> None:
    def total(step: Step, cluster: Cluster) -> float:
        return step_time(step, cluster, ranks, batch).total

    now = total(step, cluster)
    slack = 1 + 1e-9
    for name in ("local", "network"):
        link = getattr(cluster, name)
        faster = Link(link.bytes_per_sec * factor, link.latency_sec / factor)
        assert total(step, dataclasses.replace(cluster, **{name: faster})) <= now * slack
    loading = dataclasses.replace(
        cluster, loader_images_per_sec=cluster.loader_images_per_sec * factor
    )
    assert total(step, loading) <= now * slack
    result = total(dataclasses.replace(step, overlap=min(step.overlap * factor, 1.0)), cluster)
    assert result <= now * slack
    assert (
        total(dataclasses.replace(step, variation=step.variation * factor), cluster) >= now / slack
    )
    assert total(
        dataclasses.replace(step, image_sec=step.image_sec / factor, overlap=0.0), cluster
    ) <= (total(dataclasses.replace(step, overlap=0.0), cluster) * slack)


@given(steps, clusters, st.integers(1, 64), st.integers(1, 512))
def test_speedups_never_exceed_ranks(step: Step, cluster: Cluster, ranks: int, batch: int) -> None:
    cluster = dataclasses.replace(cluster, sharing=None)
    time = step_time(step, cluster, ranks, batch)
    assert time.total >= step.compute_sec(batch)
    result = images_per_sec(step, cluster, ranks, batch)
    assert result <= ranks * images_per_sec(step, cluster, 1, batch) * (1 + 1e-9)
    alone = dataclasses.replace(cluster, ranks_per_host=1, algorithms=("ring",))
    times = [step_time(step, alone, count, batch).total for count in range(1, 9)]
    assert all(later >= earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("model", ["resnet50", "resnext101-32x4d"])
@pytest.mark.parametrize("megabytes", [1, 5, 25])
def test_exchanges_are_those_of_pytorch(model: str, megabytes: int) -> None:
    import torch
    import torch.distributed as dist

    from lockstep.backends.torch.model import Model
    from lockstep.recipes.published import RECIPES

    with torch.device("meta"):
        built = Model(MODELS[model], RECIPES["resnet50-paddle-90ep"]().replace(model=model))
    parameters = list(reversed(list(built.parameters())))
    assigned, _ = dist._compute_bucket_assignment_by_size(parameters, [megabytes * 2**20])
    sizes = tuple(sum(4 * parameters[i].numel() for i in bucket) for bucket in assigned)
    assert split_gradients(MODELS[model], 1000, megabytes) == sizes
    result = split_gradients(MODELS[model], 1000, megabytes, value_bytes=2)
    assert result == tuple(size // 2 for size in sizes)
    assert split_gradients(MODELS[model], 1000, None) == (sum(sizes),)


def test_the_first_exchange_begins_when_the_last_layers_are_done() -> None:
    spec = MODELS["resnet50"]
    # 8 MB of gradients are in the classifier, 2 of 4,089 million multiply-adds.
    assert measure_overlap(spec, 1000, 224, 5) == pytest.approx(1 - 2.048 / 4089, abs=1e-5)
    # All gradients are ready with the first layer.
    assert measure_overlap(spec, 1000, 224, 1000) == 0.0
    assert 0.9 < measure_overlap(spec, 1000, 224, 25) < 0.95


def test_examples_in_docstrings_do_what_they_say() -> None:
    result = doctest.testmod(model)
    assert (result.attempted > 3, result.failed) == (True, 0)
