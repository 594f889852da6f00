"""Tests for Paddle alone: modules, programs and the max pool.

The other tests of engines run uncompiled. Here the same is tested with programs.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

# First, because it suppresses Paddle's greetings.
from lockstep.backends import paddle as paddle_backend

# isort: split
import paddle

from lockstep.backends.paddle.model import Pass
from lockstep.backends.paddle.program import Compiled
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import RATES, all_bits, bits, normalise, statistics
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import (
    draw_batch,
    draw_batches,
    draw_images,
    draw_state,
    draw_steady_state,
)
from tests.backends.native import paddle as native
from tests.soak import in_a_soak

backend = make_backend_fixture("paddle")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Return the functions from which programs are built, one entry for each program."""
    built: list[Compiled] = []
    build = Compiled._built

    def note(self: Compiled, inputs: Any) -> Any:
        built.append(self)
        return build(self, inputs)

    monkeypatch.setattr(Compiled, "_built", note)
    return built


# The module


def test_a_loaded_module_has_a_canonical_state_dict(tiny_recipe: Recipe) -> None:
    values = draw_state(tiny_recipe).tensors
    state = paddle_backend.load_module(tiny_recipe.replace(precision="bf16"), values).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {paddle.float32}
    assert list(state) == list(values)
    assert bits({name: tensor.numpy() for name, tensor in state.items()}) == bits(values)


def test_a_loaded_module_takes_a_state_dict(tiny_recipe: Recipe) -> None:
    module = paddle_backend.load_module(tiny_recipe, draw_state(tiny_recipe).tensors)
    images = native.images(normalise(draw_images(4), tiny_recipe))
    other = draw_state(tiny_recipe, seed=3).tensors
    missing, unexpected = module.set_state_dict(
        {name: paddle.to_tensor(value) for name, value in other.items()}
    )
    assert (missing, unexpected) == ([], [])
    result = module(images).numpy().tobytes()
    assert result == paddle_backend.load_module(tiny_recipe, other)(images).numpy().tobytes()


# Programs


def test_steps_on_batches_of_one_shape_are_one_program(
    start_compiled: Start, tiny_recipe: Recipe, built: list[Compiled]
) -> None:
    engine: Any = start_compiled(tiny_recipe.replace(ema_decay=0.9), accumulation_steps=2)
    engine.train(draw_batches(tiny_recipe, 3, mixup="sample"), 0)
    engine.write(draw_state(tiny_recipe.replace(ema_decay=0.9), seed=2))
    engine.train(draw_batches(tiny_recipe, 2, mixup="batch"), 3)
    engine.train(draw_batches(tiny_recipe, 2), 5)
    assert built == [engine._gradients_of_part]
    engine.train([draw_batch(tiny_recipe, 12)], 7)
    assert built == [engine._gradients_of_part] * 2


def test_inference_has_a_program_for_every_shape(
    start_compiled: Start, tiny_recipe: Recipe, built: list[Compiled]
) -> None:
    engine: Any = start_compiled(tiny_recipe.replace(ema_decay=0.9))
    for _ in range(2):
        for ema in (False, True):
            engine.evaluate([draw_batch(tiny_recipe, count) for count in (8, 8, 3)], ema=ema)
        engine.predict(draw_images(3))
        engine.predict(draw_images(3, 45))
    assert built == [engine._logits] * 3


@in_a_soak
def test_programs_stay_what_they_are_beside_many_others(
    start_compiled: Start, tiny_recipe: Recipe
) -> None:
    # A Paddle executor keeps eight programs and would build others again, without oneDNN, with
    # other outputs.
    state = draw_steady_state(tiny_recipe)
    engine = start_compiled(tiny_recipe)
    batches = [draw_batch(tiny_recipe, count) for count in range(4, 13)]
    ends = []
    for batch in [*batches, *batches[:2]]:
        engine.write(state)
        engine.train([batch], 0)
        ends.append(all_bits(engine.read()))
    assert ends[9:] == ends[:2]


def test_a_program_whose_first_run_failed_is_built_anew(
    start_compiled: Start, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("none left")

    state = draw_steady_state(tiny_recipe)
    batch = draw_batch(tiny_recipe)
    engine = start_compiled(tiny_recipe, state)
    with monkeypatch.context() as patched:
        patched.setattr(paddle.static.Executor, "run", failing)
        with pytest.raises(BackendError, match="none left"):
            engine.train([batch], 0)
    engine.train([batch], 0)
    expected = oracle.train(tiny_recipe, state, [batch], RATES).state
    assert distance(statistics(engine.read()), statistics(expected)) < BOUNDS["statistics"].value


def values(*shape: int, seed: int = 0) -> Any:
    return paddle.to_tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


LYING: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose([0, 2, 3, 1]),
    "with its axes reversed": lambda x: x.transpose([3, 2, 1, 0]),
    "every second": lambda x: x[:, ::2],
    "a part": lambda x: x[1:, 2:],
}


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("laid", LYING.values(), ids=LYING)
def test_inputs_may_lie_in_memory_as_they_like(laid: Callable[[Any], Any], onednn: bool) -> None:
    run = Compiled(lambda inputs: [inputs["x"] * 2 + 1, inputs["x"].max([1])], onednn=onednn)
    for seed in range(2):
        x = laid(values(3, 8, 4, 6, seed=seed))
        doubled, largest = run({"x": x})
        assert distance(doubled.numpy(), x.numpy() * 2 + 1) < BOUNDS["operation"].value
        assert distance(largest.numpy(), x.numpy().max(axis=1)) == BOUNDS["exact"].value


def test_a_program_passes_no_gradient_on() -> None:
    x = values(4, 5)
    x.stop_gradient = False
    (y,) = Compiled(lambda inputs: [inputs["x"] * 2], onednn=True)({"x": x})
    assert y.stop_gradient


@pytest.fixture(params=[False, True], ids=["oneDNN off", "oneDNN on"])
def flag(request: pytest.FixtureRequest) -> Iterator[dict[str, bool]]:
    """Flags for oneDNN that a user has set."""
    before = paddle.get_flags("FLAGS_use_mkldnn")
    flags = {"FLAGS_use_mkldnn": request.param}
    paddle.set_flags(flags)
    yield flags
    paddle.set_flags(before)


def test_a_program_leaves_the_process_as_it_was(flag: dict[str, bool]) -> None:
    def function(inputs: Any) -> list[Any]:
        assert not paddle.in_dynamic_mode()
        return [inputs["x"] * 2]

    Compiled(function, onednn=True)({"x": values(4, 5)})
    assert paddle.in_dynamic_mode()
    assert paddle.get_flags("FLAGS_use_mkldnn") == flag


@pytest.mark.parametrize("when", ["built", "run"])
def test_a_program_that_fails_leaves_the_process_as_it_was(
    when: str, flag: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> list[Any]:
        raise ValueError("it fails")

    run = Compiled(failing if when == "built" else lambda inputs: [inputs["x"] * 2], onednn=True)
    if when == "run":
        monkeypatch.setattr(paddle.static.Executor, "run", failing)
    with pytest.raises(ValueError, match="it fails"):
        run({"x": values(4, 5)})
    assert paddle.in_dynamic_mode()
    assert paddle.get_flags("FLAGS_use_mkldnn") == flag


def make_engine(recipe: Recipe, compile: Any) -> Any:
    """Return the engine of one of two ranks."""
    execution = Execution(backend="paddle", device="cpu", compile=compile)
    return paddle_backend.engine(recipe, np.zeros(1), native.OfTwo(), execution)


@pytest.mark.parametrize(("compile", "programs"), [("on", True), ("auto", True), ("off", False)])
def test_programs_are_used_by_default(tiny_recipe: Recipe, compile: str, programs: bool) -> None:
    engine = make_engine(tiny_recipe, compile)
    assert (
        isinstance(engine._gradients_of_part, Compiled)
        == isinstance(engine._logits, Compiled)
        == programs
    )


@pytest.mark.parametrize("compile", ["auto", "off"])
def test_batch_norm_over_several_ranks_is_not_compiled(tiny_recipe: Recipe, compile: str) -> None:
    assert not isinstance(
        make_engine(tiny_recipe.replace(batch_norm="synchronised"), compile)._gradients_of_part,
        Compiled,
    )


def test_programs_are_refused_to_batch_norm_over_several_ranks(tiny_recipe: Recipe) -> None:
    message = "has no batch norm over all ranks; leave compile at auto"
    with pytest.raises(BackendError, match=message):
        make_engine(tiny_recipe.replace(batch_norm="synchronised"), "on")


# Max pool


def pad(x: np.ndarray, padding: str) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Pad images [N, C, H, W], none below 0, for windows of 3 at a stride of 2; return them and the
    place of the images."""
    places = [(0, 0), (0, 0)]
    for length in x.shape[2:]:
        missing = 2 if padding == "symmetric" else max((-(-length // 2) - 1) * 2 + 3 - length, 0)
        places.append((missing // 2, missing - missing // 2))
    inside = tuple(
        slice(before, before + length) for (before, _), length in zip(places, x.shape, strict=True)
    )
    return np.pad(x, places), inside


def pool(x: np.ndarray, padding: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the largest value of every window, a gradient of these, and the gradient of x if all
    values of x differ."""
    wide, inside = pad(x, padding)
    height, width = ((length - 3) // 2 + 1 for length in wide.shape[2:])
    y = np.zeros((*x.shape[:2], height, width), np.float32)
    back = np.zeros_like(wide)
    gradient = np.random.default_rng(seed).normal(size=y.shape).astype(np.float32)
    for i, j in itertools.product(range(height), range(width)):
        window = (..., slice(2 * i, 2 * i + 3), slice(2 * j, 2 * j + 3))
        y[..., i, j] = wide[window].max(axis=(2, 3))
        back[window] += (wide[window] == y[..., i, j, None, None]) * gradient[..., i, j, None, None]
    return y, gradient, back[inside]


def pool_and_back(recipe: Recipe, onednn: bool) -> Callable[[Any], Any]:
    """Return a function of x and the gradient of its pool to the pool and the gradient of x."""
    differentiate = paddle.static.gradients if onednn else paddle.grad

    def function(inputs: Any) -> list[Any]:
        y = Pass(recipe, {}, training=True, onednn=onednn)._pool(inputs["x"], 2)
        return [y.detach(), *differentiate([y], [inputs["x"]], [inputs["g"]])]

    return Compiled(function, onednn=True) if onednn else function


SQUARE = [(size, size) for size in (2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 18, 28)]
OBLONG = [(3, 4), (4, 3), (7, 16), (16, 7), (8, 14), (15, 9), (1, 6)]
"""Shapes that are not tested with programs, since the images of a run are square."""


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize(
    ("onednn", "shapes"), [(False, SQUARE + OBLONG), (True, SQUARE)], ids=["plain", "compiled"]
)
def test_a_max_pool_and_its_gradient_are_right_at_every_size(
    tiny_recipe: Recipe, padding: str, onednn: bool, shapes: list[tuple[int, int]]
) -> None:
    run = pool_and_back(tiny_recipe.replace(padding=padding), onednn)
    for seed, shape in enumerate(shapes):
        order = (
            np.random.default_rng(seed).permutation(6 * shape[0] * shape[1]).reshape(2, 3, *shape)
        )
        x = np.maximum(order - 5, 0).astype(np.float32)
        expected, gradient, expected_back = pool(x, padding, seed)
        y, back = run(
            {"x": paddle.to_tensor(x, stop_gradient=False), "g": paddle.to_tensor(gradient)}
        )
        assert y.numpy().tobytes() == expected.tobytes(), shape
        # The gradient of a 0 does not matter, since a ReLU comes before the pool.
        assert (
            distance(back.numpy() * (x > 0), expected_back * (x > 0)) < BOUNDS["operation"].value
        ), shape
