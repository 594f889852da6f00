"""Tests for Paddle's ranks and processes: devices, launchers, sockets, output and signals."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends import Backend

# First, because it suppresses Paddle's greetings.
from lockstep.backends import paddle as paddle_backend

# isort: split
import paddle

from lockstep.backends.paddle import loading
from lockstep.backends.paddle.launching import trainers
from lockstep.backends.paddle.world import PaddleWorld
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError, LockstepError
from tests.backends.cases import (
    random_batch,
)
from tests.backends.conftest import Start


@pytest.fixture(scope="session")
def backend() -> Backend:
    return backends.load("paddle")


def values(*shape: int, seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


class _OfTwo(PaddleWorld):
    """Rank 0 of two. The other rank never starts, so this world is only for building an engine."""

    def __init__(self) -> None:
        self.rank, self.ranks, self.on_gpu, self.device = 0, 2, False, "made up"


def made(recipe: Recipe, compile: Any) -> Any:
    """Return the engine of one of two ranks."""
    execution = Execution(backend="paddle", device="cpu", compile=compile)
    return paddle_backend.engine(recipe, np.zeros(1), _OfTwo(), execution)


# The world


@pytest.fixture
def without_gpu(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(paddle, "is_compiled_with_cuda", lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"finds no GPU.*device=cpu.*paddlepaddle-gpu"):
        paddle_backend.world(Execution(backend="paddle", device="cuda"))


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_is_used(device: Any) -> None:
    world = paddle_backend.world(Execution(backend="paddle", device=device))
    assert (world.rank, world.ranks, world.on_gpu) == (0, 1, False)
    assert world.device == f"CPU, {loading.threads} threads"
    assert paddle_backend.devices() == [world.device]


def test_a_local_rank_without_a_gpu_of_its_own_is_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    alone.setattr(paddle.device.cuda, "device_count", lambda: 2)
    alone.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendError, match="local rank 2 has no GPU: there are 2; launch fewer processes"):
        paddle_backend.world(Execution(backend="paddle"))


def test_several_ranks_that_do_not_know_each_other_are_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RANK", "0")
    alone.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match=r"no PADDLE_TRAINER_ENDPOINTS .*start them with `lockstep launch`"):
        paddle_backend.world(Execution(backend="paddle", device="cpu"))


def test_horovod_is_refused(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="Horovod works only with TensorFlow's and MXNet's engines"):
        paddle_backend.world(Execution(backend="paddle", distributed="horovod"))
    with pytest.raises(BackendError, match="Horovod works only with TensorFlow's and MXNet's engines"):
        paddle_backend.launch(2, ["doctor"], "horovod")


@pytest.mark.parametrize("said", ["", "Connection reset by peer", "where\nConnection reset by peer\n"])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, ConnectionResetError])
def test_an_exchange_that_fails_among_several_ranks_is_laid_to_a_peer(kind: type[Exception], said: str) -> None:
    reason = "Connection reset by peer" if said else kind.__name__
    with pytest.raises(LockstepError, match=rf"^another rank has ended; .* \({reason}\)$"), _OfTwo().watched():
        raise kind(said)


def test_an_exchange_that_fails_alone_is_told_as_it_is(alone: pytest.MonkeyPatch) -> None:
    world = paddle_backend.world(Execution(backend="paddle", device="cpu"))
    with pytest.raises(RuntimeError, match=r"^it fails$"), world.watched():
        raise RuntimeError("it fails")


def test_memory_that_is_short_is_not_laid_to_a_peer() -> None:
    with pytest.raises(MemoryError), _OfTwo().watched():
        raise MemoryError


@pytest.mark.parametrize(
    ("length", "megabytes", "sizes"),
    [
        (700_000, 1, [262_144, 262_144, 175_712]),
        (700_000, 2, [524_288, 175_712]),
        (524_288, 1, [262_144, 262_144]),
        (700_000, 3, [700_000]),
        (700_000, 0, [700_000]),
    ],
)
def test_a_sum_over_ranks_is_taken_so_many_megabytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, length: int, megabytes: int, sizes: list[int]
) -> None:
    exchanged: list[int] = []

    def doubled(tensor: Any) -> None:
        exchanged.append(len(tensor))
        tensor.scale_(2.0)

    monkeypatch.setattr(paddle.distributed, "all_reduce", doubled)
    found = _OfTwo().sum(paddle.ones([length]), megabytes)
    assert exchanged == sizes
    assert (found.numpy() == 2).all()


def test_gradients_are_added_up_so_many_megabytes_at_a_time(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe, all_reduce_mb=7)
    asked: list[tuple[int, ...]] = []

    class Noting(_OfTwo):
        def sum(self, tensor: Any, *megabytes: int) -> Any:
            asked.append((len(tensor), *megabytes))
            return tensor

    engine._world = Noting()
    engine.train([random_batch(tiny_recipe)], 0)
    assert asked[0] == (sum(value.size for value in engine.read().momentum.values()), 7)


def test_trainers_of_one_machine_know_each_other() -> None:
    environment = trainers(3)
    told = [environment(rank) for rank in range(3)]
    addresses = told[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert len({*addresses, told[0]["PADDLE_MASTER"]}) == 4
    assert [each["PADDLE_CURRENT_ENDPOINT"] for each in told] == addresses
    assert [each["PADDLE_TRAINER_ID"] for each in told] == ["0", "1", "2"]
    for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_MASTER", "PADDLE_TRAINERS_NUM"):
        assert len({each[name] for each in told}) == 1
    assert told[0]["PADDLE_TRAINERS_NUM"] == "3"


@pytest.mark.parametrize(("count", "threads"), [(1, "6"), (2, "3"), (4, "1"), (8, "1")])
def test_trainers_divide_the_cores_among_them(count: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    assert {trainers(count)(rank)["OMP_NUM_THREADS"] for rank in range(count)} == {threads}


def test_the_paddle_backend_is_found_by_name() -> None:
    assert backends.load("paddle") is paddle_backend


# Processes


def python(program: str, **more: Any) -> tuple[int, str, str]:
    """Run a program; return its exit code, output and errors."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, **more)
    return done.returncode, done.stdout, done.stderr


SHARE = """
import os
from lockstep.backends.paddle.launching import trainers
print(trainers(int(os.environ["RANKS"]))(0)["OMP_NUM_THREADS"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("5", "5")])
def test_trainers_have_their_share_of_cores_though_the_launcher_has_all(
    given: str | None, expected: str, alone: pytest.MonkeyPatch
) -> None:
    alone.setenv("RANKS", str(len(os.sched_getaffinity(0))))
    alone.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        alone.setenv("OMP_NUM_THREADS", given)
    assert python(SHARE) == (0, f"{expected}\n", "")


STEP = """
import os
import numpy as np
from lockstep import backends
from lockstep.recipes import Execution
from tests.backends.cases import NARROWED, random_batch, random_state
from tests.conftest import TINY

recipe = TINY.replace(precision=os.environ["PRECISION"], **NARROWED["narrow resnet50"])
backend, execution = backends.load("paddle"), Execution(backend="paddle", device="cpu", compile=os.environ["COMPILE"])
with backend.engine(recipe, np.zeros(1), backend.world(execution), execution) as engine:
    engine.write(random_state(recipe))
    batch = random_batch(recipe, mixup="sample")
    engine.fetch(engine.train([batch], 0))
    engine.evaluate([batch])
    engine.predict(batch.images)
"""

StepAlone = Callable[[str, str], tuple[int, str, str]]


@pytest.fixture
def step_alone(alone: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> StepAlone:
    """Return a function that trains, evaluates and predicts in a separate process, where a warning is an error."""

    def run(compile: str, precision: str) -> tuple[int, str, str]:
        own = {"COMPILE": compile, "PRECISION": precision, "OMP_NUM_THREADS": "1"}
        environment = os.environ | own | {"PYTHONWARNINGS": "error::FutureWarning,error::UserWarning"}
        return python(STEP, cwd=pytestconfig.rootpath, env=environment)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_process_trains_without_a_word(step_alone: StepAlone, compile: str, alone: pytest.MonkeyPatch) -> None:
    alone.delenv("GLOG_minloglevel", raising=False)
    assert step_alone(compile, "fp32") == (0, "", "")


SLOW_IF_NOT_FAST = {"batch_normalization", "binary", "convolution", "eltwise", "matmul"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_programs_are_computed_by_fast_kernels_of_onednn(
    step_alone: StepAlone, precision: str, alone: pytest.MonkeyPatch
) -> None:
    # If batch norm or ReLU get two orders of channels in memory, they use reference kernels.
    alone.setenv("DNNL_VERBOSE", "1")
    code, output, errors = step_alone("on", precision)
    assert code == 0, errors
    executed = [line.split(",") for line in output.splitlines() if line.startswith("onednn_verbose") and ",exec," in line]
    kernels = {tuple(fields[fields.index("exec") + 2 :][:2]) for fields in executed}
    assert {operation for operation, _ in kernels} >= SLOW_IF_NOT_FAST
    assert {(of, name) for of, name in kernels if of in SLOW_IF_NOT_FAST and name.startswith("ref:")} == set()


@pytest.mark.slow
def test_without_programs_nothing_is_computed_by_onednn(step_alone: StepAlone, alone: pytest.MonkeyPatch) -> None:
    alone.setenv("DNNL_VERBOSE", "1")
    assert step_alone("off", "fp32") == (0, "", "")


AFTER_TENSORFLOW = """
import tensorflow
from lockstep import backends
from lockstep.system.errors import BackendError
try:
    backends.load("paddle")
except BackendError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_paddle_is_not_imported_after_tensorflow() -> None:
    code, output, _ = python(AFTER_TENSORFLOW)
    assert code == 0
    assert "import paddle first, or use a process for each" in output


LOAD = "import sys\nfrom lockstep import backends\nbackends.load('paddle')\n"


@pytest.mark.slow
def test_after_the_import_errors_are_heard_again() -> None:
    program = f"print('before', file=sys.stderr)\n{LOAD}import os\nprint('after', file=sys.stderr)\nos.write(2, b'below')"
    assert python(f"import sys\n{program}") == (0, "", "before\nafter\nbelow")


def test_a_paddle_that_cannot_be_imported_tells_why(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    # Output of its libraries, and output of Python.
    broken = "import os\nos.write(2, b'libcudart.so: undefined symbol\\n')\nraise ImportError('it cannot be loaded')"
    (tmp_path / "paddle.py").write_text(broken)
    alone.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code, output, errors = python(LOAD)
    assert (code, output) == (1, "")
    assert errors.startswith("libcudart.so: undefined symbol\n")
    assert errors.endswith("ImportError: it cannot be loaded\n")


SUMS = """
import sys
from lockstep.backends.paddle.launching import launch

program = '''
import numpy as np
from lockstep import backends
from lockstep.recipes import Execution

backend = backends.load("paddle")
import paddle

world = backend.world(Execution(backend="paddle", device="cpu"))
own, other = (np.random.default_rng(rank).normal(size=700_001).astype(np.float32) for rank in (world.rank, 1 - world.rank))
for megabytes in (0, 1, 2, 100):
    found = world.sum(paddle.to_tensor(own), megabytes)
    assert found.numpy().tobytes() == (own + other).tobytes(), megabytes
world.close()
'''
sys.exit(launch(2, ["-c", program], "native"))
"""


@pytest.mark.slow
def test_sums_of_two_ranks_are_the_same_in_several_exchanges(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("OMP_NUM_THREADS", "1")
    code, _, errors = python(SUMS)
    assert code == 0, errors
