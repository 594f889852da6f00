"""Two processes against one. `ranks` has the work of the ranks, this file the expected results."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.backends import FRAMEWORKS, LoadedBackend, World
from lockstep.models.state import State
from lockstep.recipes import Execution
from lockstep.recipes.order import order_evaluation_samples
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import native as natives
from tests.backends.cases import (
    RATES,
    Arrays,
    all_bits,
    bits,
    parameters,
    statistics,
    subtract_states,
)
from tests.backends.conftest import Start
from tests.backends.drawing import draw_state
from tests.backends.launchers import LAUNCHED, split_launcher
from tests.backends.ranks import (
    LABELS,
    RECIPE,
    SCENARIOS,
    TO_EVALUATE,
    UNCOMPILED,
    carry_out,
    images_to_evaluate,
)
from tests.processes import LOOPBACK
from tests.soak import SOAK

pytestmark = pytest.mark.slow

Results = dict[str, Any]


def run_ranks(name: str, root: Path, folder: Path, scenarios: tuple[str, ...]) -> list[Results]:
    """Run scenarios in two processes and return the results of each. A warning in either process is
    an error."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
    }
    how = split_launcher(name)
    modules = ["tests.backends.workers", *how, "tests.backends.ranks", *how]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", *modules, folder, *scenarios],
        cwd=root,
        env=environment | {"PYTHONWARNINGS": "error::FutureWarning,error::UserWarning"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.fixture(scope="session", params=LAUNCHED)
def launched(request: pytest.FixtureRequest) -> str:
    """Return one of `LAUNCHED`. All engines of this file use it."""
    return request.param


@pytest.fixture(scope="session")
def backend(launched: str) -> LoadedBackend:
    return backends.load(split_launcher(launched)[0])


@pytest.fixture(scope="session")
def world(backend: LoadedBackend) -> Iterator[World]:
    world = backend.world(Execution(device="cpu"))
    yield world
    world.close()


@pytest.fixture(scope="session")
def ranks(
    launched: str, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> list[Results]:
    possible = tuple(name for name in UNCOMPILED if not find_obstacle(launched, name))
    if compiles_quickly(launched):
        possible += ("compiled",)
    return run_ranks(launched, pytestconfig.rootpath, tmp_path_factory.mktemp("ranks"), possible)


def compiles_quickly(launched: str) -> bool:
    """Return whether an engine takes less than a minute to compile a tiny model, or has time."""
    return SOAK or natives.find(split_launcher(launched)[0]).FACTS.compiles_quickly


@pytest.fixture(scope="session")
def run_alone(backend: LoadedBackend, world: World) -> Callable[..., Results]:
    """A function that carries out a scenario in this process, each once."""

    @cache
    def run(name: str, **changes: Any) -> Results:
        return carry_out(SCENARIOS[name], backend, world, **changes)

    return run


@pytest.fixture(params=UNCOMPILED)
def name(request: pytest.FixtureRequest, launched: str) -> str:
    """Return each scenario that is not compiled."""
    if obstacle := find_obstacle(launched, request.param):
        pytest.skip(obstacle)
    return request.param


def find_obstacle(launched: str, name: str) -> str | None:
    """Return why an engine cannot carry out a scenario; None if it can."""
    backend = split_launcher(launched)[0]
    scenarios = natives.find(backend).FACTS.scenarios
    if not SOAK and scenarios is not None and name not in scenarios:
        return "runs under make soak"
    scenario = SCENARIOS[name]
    sent = scenario.execution.get("all_reduce_precision", "fp32")
    if sent not in FRAMEWORKS[backend].on_cpu.all_reduce_precision:
        return f"the engine does not add up gradients in {sent}"
    return natives.find(backend).find_obstacle(scenario.recipe.precision)


def way(results: Results) -> Arrays:
    """Return the change of the parameters."""
    return subtract_states(results["state"], draw_state(RECIPE))


def test_ranks_hold_the_same_weights_to_the_last_bit(ranks: list[Results], name: str) -> None:
    first, second = (rank[name]["state"] for rank in ranks)
    assert bits(parameters(first)) == bits(parameters(second))
    assert bits(first.momentum) == bits(second.momentum)


def test_ranks_that_resume_end_with_the_same_bits(ranks: list[Results], name: str) -> None:
    for rank in ranks:
        assert all_bits(rank[name]["resumed"]) == all_bits(rank[name]["state"])


def test_ranks_report_the_same(ranks: list[Results], name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    for a, b in zip(first["intervals"], second["intervals"], strict=True):
        assert a.losses.tobytes() == b.losses.tobytes()
        assert (a.counts.top1, a.counts.top5, a.counts.images) == (
            b.counts.top1,
            b.counts.top5,
            b.counts.images,
        )
    for of in ("scores", "ema scores"):
        if first[of] is not None:
            assert first[of].losses.tobytes() == second[of].losses.tobytes()


def test_synchronised_ranks_go_where_one_process_goes(
    ranks: list[Results], run_alone: Callable[..., Results]
) -> None:
    one = run_alone("synchronised")
    assert distance(way(ranks[0]["synchronised"]), way(one)) < BOUNDS["trajectory"].value
    for rank in ranks:
        off = distance(statistics(rank["synchronised"]["state"]), statistics(one["state"]))
        assert off < BOUNDS["ranks"].value


def test_gradients_sent_in_bf16_are_rounded_once(ranks: list[Results], launched: str) -> None:
    if obstacle := find_obstacle(launched, "sent in bf16"):
        pytest.skip(obstacle)
    rounded = distance(way(ranks[0]["sent in bf16"]), way(ranks[0]["local"]))
    # Half a unit of 8 bits for what is sent and for the sum, in each of a few steps.
    assert 1e-5 < rounded < 4 * 2**-8


@pytest.mark.parametrize(
    ("name", "parts"), [("local", 2), *([("local in parts", 4)] if SOAK else [])]
)
def test_ranks_are_as_many_parts_of_one_process(
    ranks: list[Results], run_alone: Callable[..., Results], name: str, parts: int
) -> None:
    # Except running statistics, which one process updates once for every part.
    one = run_alone(name, accumulation_steps=parts)
    assert distance(way(ranks[0][name]), way(one)) < BOUNDS["trajectory"].value


def test_intervals_sum_over_ranks(ranks: list[Results], run_alone: Callable[..., Results]) -> None:
    one = run_alone("local", accumulation_steps=2)
    for a, b in zip(ranks[0]["local"]["intervals"], one["intervals"], strict=True):
        assert a.losses == pytest.approx(b.losses, rel=BOUNDS["ranks"].value)
        assert a.counts.images == b.counts.images == 32
        assert (a.counts.top1, a.counts.top5) == (b.counts.top1, b.counts.top5)


def test_two_ranks_evaluate_every_image_once_rank_after_rank(ranks: list[Results]) -> None:
    scores = ranks[0]["local"]["scores"]
    assert scores.labels.tolist() == LABELS[order_evaluation_samples(TO_EVALUATE, 4, 2)].tolist()


@pytest.mark.parametrize("ema", [False, True])
def test_all_ranks_evaluate_with_the_statistics_of_the_first(
    ranks: list[Results], start: Start, world: World, ema: bool
) -> None:
    state: State = ranks[0]["local"]["state"]
    alone = start(SCENARIOS["local"].recipe, state).evaluate(
        images_to_evaluate(RECIPE, world), ema=ema, with_logits=True
    )
    both = ranks[0]["local"]["ema scores" if ema else "scores"].sort_by_sample(
        order_evaluation_samples(TO_EVALUATE, 4, 2)
    )
    assert both.labels.tolist() == alone.labels.tolist()
    assert both.losses == pytest.approx(alone.losses, rel=BOUNDS["ranks"].value)
    assert both.confidences == pytest.approx(alone.confidences, rel=BOUNDS["ranks"].value)
    assert distance(both.logits, alone.logits) < BOUNDS["ranks"].value


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: list[Results], launched: str) -> None:
    if obstacle := find_obstacle(launched, "overflow"):
        pytest.skip(obstacle)
    for rank in ranks:
        results = rank["overflow"]
        assert np.isfinite(results["intervals"][1].losses).all()
        assert results["state"].scaler == {"scale": 32.0, "good_steps": 2, "bad_steps": 0}
        assert all(np.isfinite(value).all() for value in parameters(results["state"]).values())


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("nobody says yes", False),
        ("the last says yes", True),
        ("all say yes", True),
        ("all say the same", True),
        ("each says its own", False),
    ],
)
def test_all_ranks_get_the_same_answer(ranks: list[Results], question: str, answer: bool) -> None:
    assert [rank["answers"][question] for rank in ranks] == [answer, answer]


def test_compiled_ranks_go_where_one_uncompiled_process_goes(
    ranks: list[Results], launched: str, run_alone: Callable[..., Results]
) -> None:
    if not compiles_quickly(launched):
        pytest.skip("compiling takes up to a minute, even for tiny models")
    first, second = (rank["compiled"] for rank in ranks)
    one = run_alone("compiled", compile="off", accumulation_steps=4)
    assert distance(way(first), way(one)) < BOUNDS["trajectory"].value
    assert bits(first["state"].momentum) == bits(second["state"].momentum)


def test_a_closed_world_leaves_no_thread_that_needs_the_interpreter(ranks: list[Results]) -> None:
    assert [rank["threads of gloo"] for rank in ranks] == [[], []]


def test_ranks_listen_on_the_loopback_interface_alone(ranks: list[Results]) -> None:
    addresses = ranks[0]["listening"] | ranks[1]["listening"]
    assert addresses, "ranks that train together listen somewhere"
    assert addresses <= LOOPBACK


def test_the_rates_suffice_to_see_a_difference(ranks: list[Results]) -> None:
    result = distance(way(ranks[0]["local"]), way(ranks[0]["synchronised"]))
    assert result > 10 * BOUNDS["trajectory"].value
    assert len(RATES) >= 4
