"""Unusual inputs, and what an engine must make of them: arrays and batches in memory, and logits
far apart."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.data import Batch
from lockstep.recipes import Recipe
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends import oracle
from tests.backends.cases import RATES, all_bits
from tests.backends.drawing import draw_batch, draw_batches, state_with_logits

COLUMNS = ("images", "labels", "coefficients", "partners")


def stride(array: np.ndarray) -> np.ndarray:
    """Return the same values, with other values between them in memory."""
    wide = np.repeat(array, 2, axis=-1)
    wide[..., 1::2] = 0
    return wide[..., ::2]


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.setflags(write=False)
    return copy


def backwards(array: np.ndarray) -> np.ndarray:
    """Return the same values, in reverse order in memory."""
    return array[::-1].copy()[::-1]


KINDS = (stride, read_only, backwards, np.asfortranarray)


def check_arrays(start: Any, recipe: Recipe, kind: Any) -> None:
    """Check that an engine computes the same from arrays of another kind."""
    plain = draw_batch(recipe, mixup="sample")
    ends = []
    other = Batch(*(kind(getattr(plain, column)) for column in COLUMNS))
    for batch in (plain, other):
        engine = start(recipe)
        losses = engine.fetch(engine.train([batch], 0)).losses
        scores = engine.evaluate([batch])
        predicted = engine.predict(batch.images)
        ends.append(
            (
                all_bits(engine.read()),
                losses.tobytes(),
                scores.losses.tobytes(),
                predicted.tobytes(),
            )
        )
    assert ends[0] == ends[1]


def check_refilled(start: Any, recipe: Recipe) -> None:
    """Check that an engine has taken all of a batch when it asks for the next one."""
    batches = draw_batches(recipe, 3, mixup="sample")

    def refill() -> Iterator[Batch]:
        place = Batch(*(getattr(batches[0], column).copy() for column in COLUMNS))
        for batch in batches:
            for column in COLUMNS:
                getattr(place, column)[:] = getattr(batch, column)
            yield place

    ends = []
    for source in (batches, refill()):
        engine = start(recipe)
        engine.train(source, 0)
        ends.append(all_bits(engine.read()))
    assert ends[0] == ends[1]


class Lender:
    """Images that are lent by DLPack, and nothing else. When the last of those who borrowed them
    are gone, it is noted."""

    def __init__(self, array: np.ndarray, given_back: list[str], name: str) -> None:
        self._array = array.copy()
        self.shape = array.shape
        self.is_borrowed = False
        weakref.finalize(self._array, given_back.append, name)

    def __len__(self) -> int:
        return len(self._array)

    def __dlpack__(self, **how: Any) -> Any:
        self.is_borrowed = True
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array.copy()

    def overwrite(self) -> None:
        """Do what a loader may do with the memory when it has been read."""
        self._array[:] = 0


def check_lent(start: Any, recipe: Recipe, *, borrows: bool, ahead: int) -> None:
    """Check that images that are lent are trained and evaluated as others, and given back.

    `borrows` says whether the engine reads them by DLPack, `ahead` how many batches it takes before
    it reads one.
    """
    batches = draw_batches(recipe, 3, mixup="sample")
    given_back = []
    ends = []
    lenders: list[Lender] = []

    def lent() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            lenders.append(Lender(batch.pixels, given_back, f"batch {number}"))
            yield replace(batch, images=lenders[-1])
            if number >= ahead:
                lenders[-1 - ahead].overwrite()

    for make in (lambda: batches, lent):
        engine = start(recipe)
        scores = engine.evaluate(make())
        losses = engine.fetch(engine.train(make(), 0)).losses
        ends.append((all_bits(engine.read()), losses.tobytes(), scores.losses.tobytes()))
    assert ends[0] == ends[1]
    assert {lender.is_borrowed for lender in lenders} == {borrows}
    lenders.clear()
    assert sorted(given_back) == ["batch 0", "batch 0", "batch 1", "batch 1", "batch 2", "batch 2"]


def check_far_logits(start: Any, recipe: Recipe, mixup: str) -> None:
    """Check losses and gradients of logits that are hundreds apart.

    Paddle's `log_softmax` on a CPU returns -64 for every logit that is more than 64 below the
    largest.
    """
    recipe = recipe.replace(label_smoothing=0.1 if mixup == "none" else 0.0)
    state = state_with_logits(
        recipe, [400.0, -300.0, 0.0, 5.0, -500.0, 200.0, 399.0, -70.0, 70.0, 64.0]
    )
    batch = draw_batch(recipe, mixup=mixup)
    engine = start(recipe, state)
    scores = engine.evaluate([batch])
    interval = engine.fetch(engine.train([batch], 0))
    expected = oracle.train(recipe, state, [batch], RATES)
    assert interval.losses == pytest.approx(expected.losses, rel=BOUNDS["loss"].value)
    assert scores.losses == pytest.approx(
        400.0 - state.tensors["fc.bias"][batch.labels], rel=BOUNDS["loss"].value, abs=0.4
    )
    assert distance(engine.read().momentum, expected.state.momentum) < BOUNDS["gradient"].value
