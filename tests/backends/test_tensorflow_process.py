"""Tests for TensorFlow's ranks and processes: devices, launchers, output and imports."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import backends
from lockstep.backends import Backend

# First, because it suppresses TensorFlow's greetings.
from lockstep.backends import tensorflow as tensorflow_backend

# isort: split
import tensorflow as tf

from lockstep.backends.tensorflow.launching import workers
from lockstep.backends.tensorflow.world import TensorflowWorld
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError, LockstepError
from tests.backends.conftest import Start


@pytest.fixture(scope="session")
def backend() -> Backend:
    return backends.load("tensorflow")


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """Restore settings that an engine changes for the whole process."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


class _OfTwo(TensorflowWorld):
    """Rank 0 of two. The other rank never starts, so this world is only for building an engine."""

    rank, ranks = 0, 2

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.device = on_gpu, "made up"


# The process


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_tensorfloat_products_are_used_in_tf32_alone(start: Start, tiny_recipe: Recipe, precision: str) -> None:
    for before in (False, True):
        tf.config.experimental.enable_tensor_float_32_execution(before)
        start(tiny_recipe.replace(precision=precision), new=True)
        assert tf.config.experimental.tensor_float_32_execution_enabled() == (precision == "tf32")


@pytest.fixture
def without_gpu(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(tf.config, "list_physical_devices", lambda kind: [])
    alone.setattr(tf.config, "get_visible_devices", lambda kind: [])


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"finds no GPU.*device=cpu"):
        tensorflow_backend.world(Execution(backend="tensorflow", device="cuda"))


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_is_used(device: Any) -> None:
    world = tensorflow_backend.world(Execution(backend="tensorflow", device=device))
    assert (world.rank, world.ranks, world.on_gpu) == (0, 1, False)
    assert [world.device] == tensorflow_backend.devices()


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("given", "named"), [("3", "CPU, 3 threads"), (None, f"CPU, {len(os.sched_getaffinity(0))} threads")]
)
def test_a_cpu_is_named_with_the_threads_that_tensorflow_takes(
    given: str | None, named: str, alone: pytest.MonkeyPatch
) -> None:
    alone.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    if given is not None:
        alone.setenv("TF_NUM_INTRAOP_THREADS", given)
    assert tensorflow_backend.devices() == [named]
    assert tensorflow_backend.world(Execution(backend="tensorflow")).device == named


def test_a_local_rank_without_a_gpu_of_its_own_is_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(tf.config, "list_physical_devices", lambda kind: ["one GPU", "another"])
    alone.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendError, match="local rank 2 has no GPU: there are 2; launch fewer processes"):
        tensorflow_backend.world(Execution(backend="tensorflow"))


def test_several_ranks_that_do_not_know_each_other_are_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match=r"no TF_CONFIG .*; start them with `lockstep launch`"):
        tensorflow_backend.world(Execution(backend="tensorflow", device="cpu"))


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


def test_horovod_that_is_missing_is_told_with_how_to_get_it(alone: pytest.MonkeyPatch) -> None:
    alone.setitem(sys.modules, "horovod", None)
    alone.delitem(sys.modules, "lockstep.backends.tensorflow.horovod_world", raising=False)
    with pytest.raises(BackendError, match=r"`make tensorflow-horovod` makes \.venv-tensorflow-horovod"):
        tensorflow_backend.world(Execution(backend="tensorflow", distributed="horovod"))


def test_workers_of_one_machine_have_one_cluster_and_an_index_each(alone: pytest.MonkeyPatch) -> None:
    environment = workers(3)
    configs = [json.loads(environment(rank)["TF_CONFIG"]) for rank in range(3)]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(3)]
    assert configs[0]["cluster"] == configs[1]["cluster"] == configs[2]["cluster"]
    assert configs[0]["cluster"].keys() == {"worker"}
    assert len(set(configs[0]["cluster"]["worker"])) == 3


def test_threads_that_the_user_has_set_stay(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("TF_NUM_INTRAOP_THREADS", "5")
    assert "TF_NUM_INTRAOP_THREADS" not in workers(2)(0)


@pytest.mark.parametrize(("count", "threads"), [(1, "6"), (2, "3"), (4, "1"), (8, "1")])
def test_workers_divide_the_cores_among_them(count: int, threads: str, alone: pytest.MonkeyPatch) -> None:
    alone.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    assert {workers(count)(rank)["TF_NUM_INTRAOP_THREADS"] for rank in range(count)} == {threads}


FAILED = tf.errors.UnavailableError(None, None, "Socket closed\nand where")


def test_an_operation_that_fails_among_several_ranks_is_laid_to_a_peer() -> None:
    with pytest.raises(LockstepError, match=r"^another rank has ended; .* \(Socket closed\)$"), _OfTwo(False).watched():
        raise FAILED


def test_an_operation_that_fails_alone_is_told_as_it_is(alone: pytest.MonkeyPatch) -> None:
    world = tensorflow_backend.world(Execution(backend="tensorflow", device="cpu"))
    with pytest.raises(tf.errors.UnavailableError), world.watched():
        raise FAILED


def test_memory_that_is_short_is_not_laid_to_a_peer() -> None:
    with pytest.raises(tf.errors.ResourceExhaustedError), _OfTwo(False).watched():
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")


def test_the_tensorflow_backend_is_found_by_name() -> None:
    assert backends.load("tensorflow") is tensorflow_backend


# Importing


def python(program: str, *arguments: str, **more: Any) -> tuple[int, str, str]:
    """Run a program; return its exit code, output and errors."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **more)
    return done.returncode, done.stdout, done.stderr


LOAD = "import sys\nfrom lockstep import backends\nbackends.load('tensorflow')\n"


def test_the_backend_is_imported_without_a_word(alone: pytest.MonkeyPatch) -> None:
    alone.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    alone.setenv("PYTHONWARNINGS", "error::FutureWarning,error::UserWarning")
    assert python(f"{LOAD}print(backends.load('tensorflow').devices())")[::2] == (0, "")


def test_after_the_import_errors_are_heard_again(alone: pytest.MonkeyPatch) -> None:
    program = f"print('before', file=sys.stderr)\n{LOAD}import os\nprint('after', file=sys.stderr)\nos.write(2, b'below')"
    assert python(f"import sys\n{program}") == (0, "", "before\nafter\nbelow")


def test_a_tensorflow_that_cannot_be_imported_tells_why(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    # Output of its libraries, and output of Python.
    broken = "import os\nos.write(2, b'libcudart.so: undefined symbol\\n')\nraise ImportError('it cannot be loaded')"
    (tmp_path / "tensorflow.py").write_text(broken)
    alone.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, output, errors = python(LOAD)
    assert (code, output) == (1, "")
    assert errors.startswith("libcudart.so: undefined symbol\n")
    assert errors.endswith("ImportError: it cannot be loaded\n")


def test_how_much_tensorflow_says_is_left_to_who_has_chosen(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert python(f"{LOAD}import os\nprint(os.environ['TF_CPP_MIN_LOG_LEVEL'])")[1] == "0\n"
