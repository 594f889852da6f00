"""Tests for TensorFlow's ranks and processes: threads, launchers, exchanges and output."""

import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.backends import World

# First, because it suppresses TensorFlow's greetings.
from lockstep.backends import tensorflow as tensorflow_backend

# isort: split
import tensorflow as tf

from lockstep.backends.tensorflow.rank_setup import worker
from lockstep.launch.nodes import one_machine
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import LockstepError
from tests.backends.conftest import make_backend_fixture
from tests.backends.drawing import draw_batch, draw_state
from tests.backends.native.tensorflow import OfTwo
from tests.processes import python

backend = make_backend_fixture("tensorflow")


# The process


@pytest.fixture
def without_gpu(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(tf.config, "list_physical_devices", lambda kind: [])
    alone.setattr(tf.config, "get_visible_devices", lambda kind: [])


CORES = len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("chosen", "named"),
    [("3", "CPU, 3 threads"), (None, f"CPU, {CORES} thread{'s' * (CORES > 1)}")],
)
def test_a_cpu_has_its_threads(chosen: str | None, named: str, alone: pytest.MonkeyPatch) -> None:
    alone.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    if chosen is not None:
        alone.setenv("TF_NUM_INTRAOP_THREADS", chosen)
    assert tensorflow_backend.devices() == [named]
    assert tensorflow_backend.world(Execution(backend="tensorflow")).device == named


class _Replica:
    """Replaces the exchange between ranks, and records the size of each exchange."""

    def __init__(self) -> None:
        self.packs: list[int | None] = []

    def all_reduce(self, _: Any, tensors: list[Any], options: Any) -> list[Any]:
        self.packs.append(options and options.bytes_per_pack)
        return tensors


def test_workers_add_up_so_many_megabytes_at_a_time(alone: pytest.MonkeyPatch) -> None:
    replica = _Replica()
    alone.setattr(tf.distribute, "MultiWorkerMirroredStrategy", lambda **_: None)
    alone.setattr(tf.distribute, "get_replica_context", lambda: replica)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TF_CONFIG": "{}"}.items():
        alone.setenv(name, value)
    world = tensorflow_backend.world(Execution(backend="tensorflow", device="cpu", all_reduce_mb=7))
    world.sum([tf.zeros([3])])
    tf.function(world.sum, input_signature=[[tf.TensorSpec([None, 4])]])([tf.zeros([2, 4])])
    assert replica.packs == [7 * 2**20, None]


def test_the_thread_that_waits_for_a_gpu_ends_with_its_engine(
    world: World, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    execution = Execution(backend="tensorflow", compile="off", deterministic=False)
    before = set(threading.enumerate())
    monkeypatch.setattr(world, "on_gpu", True)
    engine = tensorflow_backend.engine(tiny_recipe, np.zeros(1), world, execution)
    with engine:
        engine.write(draw_state(tiny_recipe))
        engine.fetch(engine.train([draw_batch(tiny_recipe)], 0))
        (thread,) = set(threading.enumerate()) - before
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_workers_have_one_cluster_and_an_index_each(alone: pytest.MonkeyPatch) -> None:
    environment = partial(worker, one_machine(3))
    configs = [json.loads(environment(rank)["TF_CONFIG"]) for rank in range(3)]
    result = [config["task"] for config in configs]
    assert result == [{"type": "worker", "index": rank} for rank in range(3)]
    assert configs[0]["cluster"] == configs[1]["cluster"] == configs[2]["cluster"]
    assert configs[0]["cluster"].keys() == {"worker"}
    assert len(set(configs[0]["cluster"]["worker"])) == 3


def test_threads_that_the_user_has_set_stay(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("TF_NUM_INTRAOP_THREADS", "5")
    assert worker(one_machine(2), 0)["TF_NUM_INTRAOP_THREADS"] == "5"


@pytest.mark.parametrize(("count", "threads"), [(1, "6"), (2, "3"), (4, "1"), (8, "1")])
def test_workers_divide_the_cores(count: int, threads: str, alone: pytest.MonkeyPatch) -> None:
    alone.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    result = {worker(one_machine(count), rank)["TF_NUM_INTRAOP_THREADS"] for rank in range(count)}
    assert result == {threads}


FAILED = tf.errors.UnavailableError(None, None, "Socket closed\nand where")


def test_an_operation_that_fails_among_several_ranks_is_laid_to_a_peer() -> None:
    with (
        pytest.raises(LockstepError, match=r"^another rank has ended; .* \(Socket closed\)$"),
        OfTwo(False).explain_errors(),
    ):
        raise FAILED


def test_an_operation_that_fails_alone_is_told_as_it_is(alone: pytest.MonkeyPatch) -> None:
    world = tensorflow_backend.world(Execution(backend="tensorflow", device="cpu"))
    with pytest.raises(tf.errors.UnavailableError), world.explain_errors():
        raise FAILED


# Importing


LOAD = """
import os
from lockstep import backends
try:
    backends.load("tensorflow")
except ImportError:
    print(os.environ["TF_CPP_MIN_LOG_LEVEL"])
"""


def test_how_much_tensorflow_says_is_left_to_who_has_chosen(
    tmp_path: Path, alone: pytest.MonkeyPatch
) -> None:
    # TensorFlow reads the level when it is imported. A module that cannot be imported takes its
    # place, which is faster.
    (tmp_path / "tensorflow.py").write_text("raise ImportError")
    alone.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    alone.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert python(LOAD)[1] == "0\n"
