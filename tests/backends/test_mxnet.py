"""Tests for MXNet alone: modules, graphs (static or not) and several processes."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# First, because it sets the number of threads.
from lockstep.backends import mxnet as mxnet_backend

# isort: split
import mxnet as mx

from lockstep.backends.mxnet.model import Pass, variables
from lockstep.backends.mxnet.rank_setup import worker
from lockstep.backends.mxnet.world import MxnetWorld
from lockstep.launch.nodes import one_machine
from lockstep.recipes import Execution, Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import RATES, all_bits, compare_changes, normalise, statistics
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import (
    draw_batch,
    draw_batches,
    draw_images,
    draw_state,
    draw_steady_state,
)
from tests.backends.native import mxnet as native
from tests.soak import SOAK

backend = make_backend_fixture("mxnet")

HAS_HOROVOD = find_spec("horovod") is not None
"""Whether `make mxnet-horovod` has installed Horovod."""


# MXNet's own warning about the input of every graph that it reads.
@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_a_loaded_module_is_an_ordinary_block(tiny_recipe: Recipe, tmp_path: Path) -> None:
    values = draw_state(tiny_recipe).tensors
    images = native.images(normalise(draw_images(2), tiny_recipe))
    block = mxnet_backend.load_module(tiny_recipe, values)
    assert isinstance(block, mx.gluon.Block)
    logits = block(images).asnumpy()
    block.export(str(tmp_path / "model"))
    read = mx.gluon.SymbolBlock.imports(
        str(tmp_path / "model-symbol.json"), ["data"], str(tmp_path / "model-0000.params")
    )
    assert read(images).asnumpy().tobytes() == logits.tobytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_rounded_tensor_gets_the_gradients_of_all_parts(
    precision: str, tiny_recipe: Recipe
) -> None:
    # A cast alone, since products in bf16 need AVX-512.
    recipe = tiny_recipe.replace(precision=precision)
    a_pass = Pass(recipe, variables(recipe), (32, 32), training=True, on_gpu=False)
    rounded = mx.sym.cast(a_pass._round_tensor("fc.bias"), dtype="float32")
    graph = mx.nd.CachedOp(rounded, [("data_indices", []), ("param_indices", [0])])
    bias = mx.nd.ones((10,))
    gradient = mx.nd.ones((10,))
    mx.autograd.mark_variables([bias], [gradient], "add")
    for _ in range(2):
        with mx.autograd.record():
            result = graph(bias)
        mx.autograd.backward([result], [2 * mx.nd.ones((10,))])
    assert gradient.asnumpy().tolist() == [5.0] * 10


@pytest.mark.parametrize("compile", ["on", "off"])
@pytest.mark.parametrize("parts", [1, 2])
def test_steps_with_and_without_a_static_graph_lead_where_float64_goes(
    start: Start, tiny_recipe: Recipe, compile: str, parts: int
) -> None:
    begin = draw_steady_state(tiny_recipe)
    batches = draw_batches(tiny_recipe, 8, mixup="sample")
    engine = start(tiny_recipe, begin, compile=compile, accumulation_steps=parts)
    engine.train(batches, 0)
    end = engine.read()
    expected = oracle.train(tiny_recipe, begin, batches, RATES, parts).state
    assert compare_changes(end, expected, begin) < BOUNDS["trajectory"].value
    assert distance(statistics(end), statistics(expected)) < BOUNDS["statistics"].value


def test_statistics_wait_for_the_backward_pass(start: Start, tiny_recipe: Recipe) -> None:
    # With all weight on the newest batch, statistics that are read too early would be those of the
    # previous batch.
    recipe = tiny_recipe.replace(bn_momentum=1.0)
    begin = draw_steady_state(recipe)
    batches = draw_batches(recipe, 6)
    engine = start(recipe, begin)
    engine.train(batches, 0)
    assert (
        distance(
            statistics(engine.read()), statistics(oracle.train(recipe, begin, batches, RATES).state)
        )
        < 1e-4
    )


def test_the_graph_of_the_size_before_is_not_kept(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe, new=True)
    engine.train([draw_batch(tiny_recipe, 2)], 0)
    engine.predict(draw_images(2))
    engine.train([draw_batch(tiny_recipe, 2, size=48)], 1)
    assert list(engine._graphs) == [(32, 32, False, "fp32"), (48, 48, True, "fp32")]


def test_inference_between_steps_leaves_the_weights_where_they_are(
    start: Start, tiny_recipe: Recipe
) -> None:
    # Outside of training mode, MXNet's convolutions change the layout of weights, which share a
    # vector with other tensors.
    engine = start(tiny_recipe)
    other = start(tiny_recipe)
    batches = draw_batches(tiny_recipe, 4)
    for one in (engine, other):
        one.train(batches[:2], 0)
        before = all_bits(one.read())
        if one is engine:
            engine.predict(draw_images(3))
            engine.predict(draw_images(3, 64))
            assert all_bits(engine.read()) == before
        one.train(batches[2:], 2)
    assert all_bits(engine.read()) == all_bits(other.read())


def test_training_waits_for_nothing(
    start: Start, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(tiny_recipe)
    waits = []
    main = threading.main_thread()
    read = mx.nd.NDArray.asnumpy

    def note(array: Any) -> np.ndarray:
        if threading.current_thread() is main:
            waits.append(array.shape)
        return read(array)

    monkeypatch.setattr(mx.nd.NDArray, "asnumpy", note)
    handle = engine.train(draw_batches(tiny_recipe, 3, mixup="sample"), 0)
    assert waits == []
    assert len(engine.fetch(handle).losses) == 3


# Several processes


@pytest.mark.usefixtures("alone")
def test_where_horovod_is_missing_it_is_told_how_to_get_it(tmp_path: Path) -> None:
    # Found before a horovod that may be installed.
    (tmp_path / "horovod.py").write_text("raise ModuleNotFoundError(\"No module named 'horovod'\")")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }
    how = shlex.split("launch -n 2 --distributed horovod --backend mxnet")
    command = [sys.executable, "-m", "lockstep", *how]
    done = subprocess.run(
        [*command, "--", "train", "--data", "x", "--out", "x"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "lockstep: distributed is horovod, which is not installed here: No module named"
        " 'horovod'. "
        "`make mxnet-horovod` builds it in .venv-mxnet\n"
    )


LAUNCH = """
import os, sys, time
from lockstep.backends.mxnet.rank_setup import prepare_ranks
from lockstep.launch.nodes import one_machine
with prepare_ranks(one_machine(2), "native"):
    rank = os.fork()
    if rank == 0:
        sys.stdin.read()  # as long as somebody listens
        os._exit(0)
    print("there", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_scheduler_and_server_stay_as_long_as_a_rank_and_no_longer() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "there\n"
        helpers = [entry for entry in Path("/proc").iterdir() if is_helper(entry, launcher.pid)]
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        assert len(helpers) == 2
        assert all(map(is_running, helpers))
        launcher.stdin.close()  # now the rank ends
        deadline = time.monotonic() + 300
        while any(map(is_running, helpers)):
            assert time.monotonic() < deadline, "they are still there"
            time.sleep(0.01)


def is_helper(process: Path, parent: int) -> bool:
    try:
        of_parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent
        return of_parent and b"DMLC_ROLE=" in (process / "environ").read_bytes()
    except (OSError, IndexError):
        return False


def is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_is_told_where_everybody_is() -> None:
    environment = worker(one_machine(2), 1)
    assert environment["DMLC_ROLE"] == "worker"
    assert environment["DMLC_NUM_WORKER"] == "2"
    assert environment["DMLC_NODE_HOST"] == environment["DMLC_PS_ROOT_URI"] == "127.0.0.1"


GONE = """
import os, signal, sys
import numpy as np
from lockstep import backends
from lockstep.system.errors import LockstepError
from lockstep.recipes import Execution
from tests.backends.cases import RATES
from tests.backends.drawing import draw_batches, draw_state
from tests.conftest import TINY

# A run notes the signal, and looks at it before the next batch.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
backend = backends.load("mxnet")
world = backend.world(Execution.of({"distributed": sys.argv[1]}))
recipe = TINY.replace(global_batch_images=24)
with backend.engine(recipe, np.asarray(RATES), world, Execution()) as engine:
    engine.write(draw_state(recipe))
    engine.fetch(engine.train(draw_batches(recipe, 2), 0))
    world.any(False)  # no rank is gone before all have done these steps
    if world.rank == world.ranks - 1:
        os._exit(9)
    try:
        if sys.argv[2] == "training":
            engine.fetch(engine.train(draw_batches(recipe, 1), 2))
        else:
            engine.evaluate(draw_batches(recipe, 1))
    except LockstepError as error:
        print(error, flush=True)
        raise
"""


@pytest.mark.slow
# Evaluation waits for other ranks as training does: `_wait_for`.
@pytest.mark.parametrize("doing", ["training", *(["evaluating"] if SOAK else [])])
@pytest.mark.parametrize(
    ("distributed", "ranks"),
    [("native", 2), *([("horovod", 2), ("horovod", 3)] if HAS_HOROVOD else [])],
)
def test_work_that_waits_for_a_rank_that_has_gone_ends_with_the_reason(
    pytestconfig: pytest.Config, distributed: str, ranks: int, doing: str
) -> None:
    program = (
        "import sys; from lockstep import backends\n"
        "from lockstep.launch import launcher, nodes, watch; watch.GRACE_SEC = 300\n"
    )
    program += (
        f"starting = lambda: backends.load('mxnet').prepare_ranks(nodes.one_machine({ranks}),"
        f" {distributed!r})\n"
    )
    program += (
        f"sys.exit(launcher.launch_ranks(['-c', {GONE!r}, {distributed!r}, {doing!r}], starting))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=300, check=False
    )
    # Of rank 0; the output of the others is in their logs.
    assert done.stdout == "another rank has ended; its message says why\n", done.stderr
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod is not installed: `make mxnet-horovod`")
def test_horovods_launcher_starts_them(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    run = tmp_path / "run"
    recipe.write_text(tiny_recipe.replace(epochs=1).format_yaml())
    launcher = [
        Path(sys.executable).with_name("horovodrun"),
        "-np",
        "2",
        "--gloo",
        sys.executable,
        "-m",
        "lockstep",
    ]
    how = ["train", "--backend", "mxnet", "--distributed", "horovod"]
    command = [*how, "--recipe", recipe, "--data", textures, "--out", run]
    done = subprocess.run(
        [*launcher, *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "report.json").read_text())["ranks"] == 2


def test_several_ranks_evaluate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MxnetWorld(Execution())
    monkeypatch.setattr(world, "ranks", 2)
    assert world.gather(np.zeros((0, 4))).shape == (0, 4)
