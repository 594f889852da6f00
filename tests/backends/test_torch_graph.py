"""Tests for captured steps: the bits of plain steps, and what is captured when.

On a CPU steps are captured on a tape, on a GPU (LOCKSTEP_TEST_DEVICE=cuda) as CUDA graphs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.backends.torch import step_graph
from lockstep.backends.torch.engine import TorchEngine
from lockstep.backends.torch.step_graph import WARM_UP, StepGraph, make_capturer
from lockstep.data import Batch
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from tests.backends.capturer import TapeCapturer, capturer_on
from tests.backends.cases import BINARY, FP16, WEIGHTED, all_bits
from tests.backends.conftest import DEVICE, make_backend_fixture
from tests.backends.drawing import draw_batch, draw_batches, draw_images, draw_state

RATES = np.linspace(1e-4, 2e-3, 40)
OVERFLOWING: dict[str, Any] = FP16 | {
    "loss_scaling": "dynamic",
    "loss_scale": 2.0**20,
    "loss_scale_growth_steps": 3,
}
"""Gradients overflow in fp16 at this scale. It shrinks until they do not, and grows until they do.
"""


backend = make_backend_fixture("torch")


Built = Callable[..., tuple[Any, Any]]


@pytest.fixture
def both(world: Any) -> Iterator[Built]:
    """Return a function that returns a plain engine, and one that captures, whose capturer has
    `events`."""
    with ExitStack() as stack:

        def build(recipe: Recipe, **fields: Any) -> tuple[Any, Any]:
            execution = Execution.of(
                {"compile": "off", "device": DEVICE, "cuda_graph": "off"} | fields
            )
            capturer = capturer_on(world)
            engines = [
                TorchEngine(recipe, RATES, world, execution, one) for one in (None, capturer)
            ]
            for engine in engines:
                stack.enter_context(engine).write(draw_state(recipe))
            engines[1].events = capturer.events
            return engines[0], engines[1]

        yield build


def train(engine: Any, batches: Sequence[Batch], first: int) -> tuple[bytes, float]:
    """Take steps and return the bytes of their losses, and the loss scale."""
    interval = engine.fetch(engine.train(batches, first))
    return interval.losses.tobytes(), interval.loss_scale


@pytest.mark.parametrize(
    ("changes", "parts", "mixup"),
    [
        ({"nesterov": True, "stochastic_depth": 0.6}, 1, "none"),
        ({"ema_decay": 0.9, "precision": "bf16", "dropout": 0.4} | WEIGHTED, 1, "cut"),
        (
            OVERFLOWING
            | BINARY
            | {"class_reduction": "sum", "ema_decay": 0.9, "optimizer": "lamb", "clip_norm": 0.1},
            2,
            "batch",
        ),
    ],
    ids=["fp32", "moving average", "overflows, LAMB, two parts"],
)
def test_twenty_steps_have_the_bits_of_plain_steps(
    both: Built, tiny_recipe: Recipe, changes: dict[str, Any], parts: int, mixup: str
) -> None:
    recipe = tiny_recipe.replace(**changes)
    plain, captured = both(recipe, accumulation_steps=parts)
    scales = set()
    for first in range(0, 20, 5):
        batches = [draw_batch(recipe, count=8, seed=first + i, mixup=mixup) for i in range(5)]
        (losses, scale), expected = train(captured, batches, first), train(plain, batches, first)
        assert (losses, scale) == expected
        assert all_bits(captured.read()) == all_bits(plain.read())
        scales.add(scale)
    assert captured.events == ["warm-up"] * WARM_UP + ["capture"] + ["replay"] * (20 - WARM_UP)
    assert len(scales) > 2 or "loss_scaling" not in changes


def test_a_captured_step_takes_what_changes_between_steps(both: Built, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(ema_decay=0.9, quantisation="int8")
    engines = both(recipe)
    masks = {"layer1.0.conv2.weight": np.arange(8 * 4 * 9).reshape(8, 4, 3, 3) % 3 > 0}
    batches = draw_batches(recipe, 5)
    scales = dict.fromkeys(calibrate(engines[0], batches), 0.1)

    def both_do(act: Callable[[Any], object]) -> None:
        plain, captured = (act(engine) for engine in engines)
        assert plain == captured
        assert all_bits(engines[0].read()) == all_bits(engines[1].read())

    both_do(lambda engine: train(engine, batches, 0))
    both_do(lambda engine: engine.quantise(scales))  # its scales are written in place
    both_do(lambda engine: train(engine, batches, 5))
    both_do(lambda engine: engine.evaluate(batches[:1], ema=True).losses.tobytes())
    both_do(lambda engine: engine.predict(draw_images(3)).tobytes())
    both_do(lambda engine: train(engine, batches, 17))  # the number of another step
    both_do(lambda engine: engine.write(draw_state(recipe, seed=1, step=30)))
    both_do(lambda engine: train(engine, batches, 30))
    assert engines[1].events == ["warm-up"] * WARM_UP + ["capture"] + ["replay"] * (20 - WARM_UP)
    engines[1].events.clear()
    both_do(lambda engine: engine.mask(masks))
    both_do(lambda engine: train(engine, batches, 30))
    assert (
        not engines[1]
        .read()
        .tensors["layer1.0.conv2.weight"][~masks["layer1.0.conv2.weight"]]
        .any()
    )
    result = engines[1].events
    assert result == ["wait"] + ["warm-up"] * WARM_UP + ["capture"] + ["replay"] * (5 - WARM_UP)


def calibrate(engine: Any, batches: Sequence[Batch]) -> dict[str, float]:
    largest: dict[str, float] = engine.calibrate(batches[:1])
    return largest


def test_other_shapes_and_columns_are_captured_again(both: Built, tiny_recipe: Recipe) -> None:
    plain, captured = both(tiny_recipe)
    kinds: list[dict[str, Any]] = [
        {"count": 8},
        {"count": 4},
        {"count": 4, "mixup": "sample"},
        {"count": 4, "size": 40},
    ]
    for number, kind in enumerate(kinds):
        batches = draw_batches(tiny_recipe, 5, **kind)
        assert train(captured, batches, 5 * number) == train(plain, batches, 5 * number)
    assert all_bits(captured.read()) == all_bits(plain.read())
    events = ["warm-up"] * WARM_UP + ["capture"] + ["replay"] * (5 - WARM_UP)
    assert captured.events == [*events, *(["wait", *events] * 3)]


def test_shapes_that_alternate_are_never_captured(both: Built, tiny_recipe: Recipe) -> None:
    plain, captured = both(tiny_recipe)
    batches = [draw_batch(tiny_recipe, count=4 + 4 * (i % 2), seed=i) for i in range(8)]
    assert train(captured, batches, 0) == train(plain, batches, 0)
    assert captured.events == ["warm-up"] * 8


def test_later_steps_leave_the_sums_of_earlier_ones(both: Built, tiny_recipe: Recipe) -> None:
    plain, captured = both(tiny_recipe)
    batches = draw_batches(tiny_recipe, 9)
    spans = [(first, batches[first : first + 3]) for first in (0, 3, 6)]
    handles = [captured.train(span, first) for first, span in spans]
    losses = [captured.fetch(handle).losses.tobytes() for handle in handles]
    assert losses == [train(plain, span, first)[0] for first, span in spans]
    assert len(set(losses)) == 3


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_the_host_calls_few_operators_for_a_captured_step(both: Built, tiny_recipe: Recipe) -> None:
    _, captured = both(tiny_recipe.replace(**FP16, ema_decay=0.9))
    held = Batch(draw_images(8), np.arange(8) % tiny_recipe.logits, is_held=True)
    train(captured, [held] * 5, 0)
    with _Calls() as of_three:
        handle = captured.train([held] * 3, 5)
    with _Calls() as of_four:
        captured.train([held] * 4, 8)
    captured.fetch(handle)
    of_one = of_four.counts - of_three.counts
    assert of_one["clone"] == 1  # its sums
    assert 2 <= of_one.total() <= 12  # columns into their buffers


def test_a_tape_repeats_what_was_captured_and_nothing_else() -> None:
    # Like a CUDA graph: the same numbers of the host, on the same memory; and nothing is computed
    # while it captures.
    state = {"host": 1.0, "kept": torch.zeros(2), "rebound": torch.zeros(2)}

    def work(columns: Sequence[Tensor]) -> Tensor:
        state["host"] *= 2
        state["kept"].add_(columns[0] * state["host"])
        state["rebound"] = state["rebound"] + 1
        return state["kept"] + state["rebound"]

    column = torch.ones(2, requires_grad=True)
    replay, sums = TapeCapturer().capture(lambda: work([column]))
    assert state["kept"].tolist() == [0, 0]
    with torch.no_grad():
        column.mul_(10)
    for expected in (20, 40):
        replay()
        assert state["kept"].tolist() == [expected] * 2
        assert sums.tolist() == [expected + 1] * 2
    assert state["host"] == 2


class Failing:
    """Fails after it has captured a step, as a driver does that refuses an operation."""

    def __init__(self, inner: Any, error: Exception) -> None:
        self._inner = inner
        self._error = error
        self.events = inner.events
        self.warming_up = inner.warming_up
        self.wait = inner.wait

    def capture(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self._inner.capture(work)
        raise self._error


def end_with(first: Exception) -> Exception:
    """Return the error of ending a capture after another error."""
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = first
    return error


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (
            RuntimeError("not permitted"),
            BackendError,
            r"CUDA graph \(not permitted\); use --set cuda_graph=off",
        ),
        (torch.OutOfMemoryError("too large"), torch.OutOfMemoryError, "too large"),
        (end_with(torch.OutOfMemoryError("too large")), torch.OutOfMemoryError, "too large"),
        (end_with(RuntimeError("not permitted")), BackendError, r"CUDA graph \(not permitted\)"),
    ],
)
def test_a_failed_capture_is_named(error: Exception, expected: type[Exception], text: str) -> None:
    graph = StepGraph(lambda columns: columns[0] + 1, Failing(TapeCapturer(), error))
    column = torch.ones(1)
    for _ in range(WARM_UP):
        graph([column])
    with pytest.raises(expected, match=text):
        graph([column])


class OfWorld:
    """A world that is on a GPU or has several ranks, as far as `make_capturer` looks."""

    torch_device = torch.device("cuda", 0)

    def __init__(self, *, on_gpu: bool, ranks: int) -> None:
        self.on_gpu = on_gpu
        self.ranks = ranks


def test_with_several_ranks_only_on_is_refused() -> None:
    world: Any = OfWorld(on_gpu=True, ranks=2)
    assert make_capturer(Execution(cuda_graph="auto"), world) is None
    assert make_capturer(Execution(cuda_graph="off"), world) is None
    with pytest.raises(BackendError, match="cuda_graph is on, but gradients are added up over"):
        make_capturer(Execution(cuda_graph="on"), world)


@pytest.mark.parametrize(
    ("cuda_graph", "auto", "expected"),
    [("on", False, 1), ("auto", False, 0), ("auto", True, 1), ("off", True, 0)],
)
def test_auto_captures_once_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, cuda_graph: Any, auto: bool, expected: int
) -> None:
    made: list[object] = []
    monkeypatch.setattr(step_graph, "CudaCapturer", lambda device: made.append(device) or made)
    monkeypatch.setattr(step_graph, "AUTO", auto)
    world: Any = OfWorld(on_gpu=True, ranks=1)
    assert (make_capturer(Execution(cuda_graph=cuda_graph), world) is not None) == bool(expected)
    assert len(made) == expected


if DEVICE != "cpu" and torch.cuda.is_available():  # on a CPU, steps are done when `train` returns

    @pytest.mark.parametrize("parts", [1, 2])
    def test_train_returns_before_its_steps_are_done(
        both: Built, tiny_recipe: Recipe, parts: int
    ) -> None:
        recipe = tiny_recipe.replace(**OVERFLOWING, ema_decay=0.9)
        for engine in both(recipe, accumulation_steps=parts):
            batches = draw_batches(recipe, 5, mixup="sample")
            train(engine, batches, 0)
            torch.cuda._sleep(2_000_000_000)  # cycles: about a second
            # One step: the host waits, too, when a stream holds about a thousand kernels.
            handle = engine.train(batches[:1], 5)
            assert not handle.ready
            engine.fetch(handle)
            assert handle.ready
