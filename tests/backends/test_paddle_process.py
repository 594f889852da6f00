"""Tests for Paddle's ranks and processes: launchers, exchanges, output and imports."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

# First, because it suppresses Paddle's greetings.
from lockstep.backends import paddle as paddle_backend

# isort: split
import paddle

from lockstep.backends.paddle.rank_setup import trainer
from lockstep.launch.nodes import one_machine
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import LockstepError
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import draw_batch
from tests.backends.native.paddle import OfTwo
from tests.processes import python
from tests.soak import SOAK, in_a_soak

backend = make_backend_fixture("paddle")


# The world


@pytest.mark.parametrize(
    "text", ["", "Connection reset by peer", "where\nConnection reset by peer\n"]
)
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, ConnectionResetError])
def test_a_failed_exchange_of_ranks_is_laid_to_a_peer(kind: type[Exception], text: str) -> None:
    reason = "Connection reset by peer" if text else kind.__name__
    with (
        pytest.raises(LockstepError, match=rf"^another rank has ended; .* \({reason}\)$"),
        OfTwo().explain_errors(),
    ):
        raise kind(text)


def test_an_exchange_that_fails_alone_is_told_as_it_is(alone: pytest.MonkeyPatch) -> None:
    world = paddle_backend.world(Execution(backend="paddle", device="cpu"))
    with pytest.raises(RuntimeError, match=r"^it fails$"), world.explain_errors():
        raise RuntimeError("it fails")


def test_an_exchange_without_memory_is_not_laid_to_a_peer() -> None:
    with pytest.raises(MemoryError), OfTwo().explain_errors():
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

    def double(tensor: Any) -> None:
        exchanged.append(len(tensor))
        tensor.scale_(2.0)

    monkeypatch.setattr(paddle.distributed, "all_reduce", double)
    total = OfTwo().sum(paddle.ones([length]), megabytes)
    assert exchanged == sizes
    assert (total.numpy() == 2).all()


def test_gradients_are_added_up_in_pieces(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe, all_reduce_mb=7)
    sums: list[tuple[int, ...]] = []

    class Noting(OfTwo):
        def sum(self, tensor: Any, *megabytes: int) -> Any:
            sums.append((len(tensor), *megabytes))
            return tensor

    engine._world = Noting()
    engine.train([draw_batch(tiny_recipe)], 0)
    assert sums[0] == (sum(value.size for value in engine.read().momentum.values()), 7)


def test_trainers_of_one_machine_know_each_other() -> None:
    table = one_machine(3)
    variables = [trainer(table, rank) for rank in range(3)]
    addresses = variables[0]["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert len({*addresses, variables[0]["PADDLE_MASTER"]}) == 4
    assert [rank_variables["PADDLE_CURRENT_ENDPOINT"] for rank_variables in variables] == addresses
    assert [rank_variables["PADDLE_TRAINER_ID"] for rank_variables in variables] == ["0", "1", "2"]
    for name in ("PADDLE_TRAINER_ENDPOINTS", "PADDLE_MASTER", "PADDLE_TRAINERS_NUM"):
        assert len({rank_variables[name] for rank_variables in variables}) == 1
    assert variables[0]["PADDLE_TRAINERS_NUM"] == "3"


@pytest.mark.parametrize(("count", "threads"), [(1, "6"), (2, "3"), (4, "1"), (8, "1")])
def test_trainers_divide_cores(count: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    result = {trainer(one_machine(count), rank)["OMP_NUM_THREADS"] for rank in range(count)}
    assert result == {threads}


# Processes


SHARE = """
import os
from lockstep.backends.paddle.rank_setup import trainer
from lockstep.launch.nodes import one_machine
print(trainer(one_machine(int(os.environ["RANKS"])), 0)["OMP_NUM_THREADS"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "expected"), [(None, "1"), ("5", "5")])
def test_trainers_have_their_share_of_cores_though_the_launcher_has_all(
    chosen: str | None, expected: str, alone: pytest.MonkeyPatch
) -> None:
    alone.setenv("RANKS", str(len(os.sched_getaffinity(0))))
    alone.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        alone.setenv("OMP_NUM_THREADS", chosen)
    assert python(SHARE) == (0, f"{expected}\n", "")


STEP = """
import os
import numpy as np
from lockstep import backends
from lockstep.recipes import Execution
from tests.backends.cases import NARROWED
from tests.backends.drawing import draw_batch, draw_state
from tests.conftest import TINY

recipe = TINY.replace(precision=os.environ["PRECISION"], **NARROWED["narrow resnet50"])
backend = backends.load("paddle")
execution = Execution(backend="paddle", device="cpu", compile=os.environ["COMPILE"])
with backend.engine(recipe, np.zeros(1), backend.world(execution), execution) as engine:
    engine.write(draw_state(recipe))
    batch = draw_batch(recipe, mixup="sample")
    engine.fetch(engine.train([batch], 0))
    engine.evaluate([batch])
    engine.predict(batch.images)
"""

StepAlone = Callable[[str, str], tuple[int, str, str]]


@pytest.fixture
def step_alone(alone: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> StepAlone:
    """Return a function that trains, evaluates and predicts in a separate process, where a warning
    is an error."""

    def run(compile: str, precision: str) -> tuple[int, str, str]:
        own = {"COMPILE": compile, "PRECISION": precision, "OMP_NUM_THREADS": "1"}
        environment = (
            os.environ | own | {"PYTHONWARNINGS": "error::FutureWarning,error::UserWarning"}
        )
        return python(STEP, cwd=pytestconfig.rootpath, env=environment)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_process_trains_without_a_word(
    step_alone: StepAlone, compile: str, alone: pytest.MonkeyPatch
) -> None:
    alone.delenv("GLOG_minloglevel", raising=False)
    assert step_alone(compile, "fp32") == (0, "", "")


SLOW_IF_NOT_FAST = {"batch_normalization", "binary", "convolution", "eltwise", "matmul"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", *(["fp16"] if SOAK else [])])
def test_programs_are_computed_by_fast_kernels_of_onednn(
    step_alone: StepAlone, precision: str, alone: pytest.MonkeyPatch
) -> None:
    # If batch norm or ReLU get two orders of channels in memory, they use reference kernels.
    alone.setenv("DNNL_VERBOSE", "1")
    code, output, errors = step_alone("on", precision)
    assert code == 0, errors
    executed = [
        line.split(",")
        for line in output.splitlines()
        if line.startswith("onednn_verbose") and ",exec," in line
    ]
    kernels = {tuple(fields[fields.index("exec") + 2 :][:2]) for fields in executed}
    assert {operation for operation, _ in kernels} >= SLOW_IF_NOT_FAST
    assert {
        (of, name) for of, name in kernels if of in SLOW_IF_NOT_FAST and name.startswith("ref:")
    } == set()


@pytest.mark.slow
def test_onednn_is_for_programs_alone(step_alone: StepAlone, alone: pytest.MonkeyPatch) -> None:
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


@in_a_soak
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_paddle_is_not_imported_after_tensorflow() -> None:
    code, output, _ = python(AFTER_TENSORFLOW)
    assert code == 0
    assert "import paddle first, or use a process for each" in output


SUMS = """
import sys
from lockstep.backends.paddle.rank_setup import prepare_ranks
from lockstep.launch.launcher import launch_ranks
from lockstep.launch.nodes import one_machine

program = '''
import numpy as np
from lockstep import backends
from lockstep.recipes import Execution

backend = backends.load("paddle")
import paddle

world = backend.world(Execution(backend="paddle", device="cpu"))
own = np.random.default_rng(world.rank).normal(size=700_001).astype(np.float32)
other = np.random.default_rng(1 - world.rank).normal(size=700_001).astype(np.float32)
for megabytes in (0, 1, 2, 100):
    total = world.sum(paddle.to_tensor(own), megabytes)
    assert total.numpy().tobytes() == (own + other).tobytes(), megabytes
world.close()
'''
sys.exit(launch_ranks(["-c", program], lambda: prepare_ranks(one_machine(2), "native")))
"""


@in_a_soak
def test_sums_of_two_ranks_are_the_same_in_several_exchanges(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("OMP_NUM_THREADS", "1")
    code, _, errors = python(SUMS)
    assert code == 0, errors
