"""The search for the largest batch, and the process that tries a step."""

from collections.abc import Callable
from typing import Any

import pytest

from lockstep.benchmark import largest_batch, step_process
from lockstep.benchmark.largest_batch import FINENESS, Try, _try_steps, find_batch, find_largest
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import EXIT_INTERRUPTED, BackendError, Interrupted, UserError

HOW = Execution(backend="reference", device="cpu")


@pytest.mark.parametrize("first", [1, 7, 32])
@pytest.mark.parametrize("least", [1, 2])
def test_the_largest_number_is_found_nearly_exactly_with_few_tries(first: int, least: int) -> None:
    for true in (0, 1, 2, 3, 31, 32, 33, 100, 255, 256, 1000, 5000):
        tried: list[int] = []

        def fits(number: int, true: int = true, tried: list[int] = tried) -> bool:
            tried.append(number)
            return number <= true

        largest = find_largest(fits, max(first, least), 1024, least)
        assert largest <= min(true, 1024)
        assert largest + max(largest // FINENESS, 1) >= min(true, 1024) or true < least
        assert (largest > 0) == (true >= least)
        assert len(tried) == len(set(tried)) <= 18
        assert least <= min(tried) <= max(tried) <= 1024


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[tuple[int, int]]]:
    """Return a function that lets this many images of a part fit. It returns a list of all tries:
    images and parts."""

    def limit(most: int) -> list[tuple[int, int]]:
        tried: list[tuple[int, int]] = []

        def fake(
            recipe: Recipe, execution: Execution, images: int, parts: int, memory_bytes: int | None
        ) -> Try:
            tried.append((images, parts))
            # With gradients kept from one part to the next, a little less fits.
            return Try(
                images,
                parts,
                images // parts <= (most if parts == 1 else most - 1),
                "no memory",
                is_short=True,
            )

        monkeypatch.setattr(largest_batch, "_try_steps", fake)
        return tried

    return limit


@pytest.mark.parametrize(
    ("most", "largest", "parts"),
    [(256, 256, 1), (64, 64, 8), (65, 64, 4), (100, 100, 4), (1, 1, None), (3, 3, 128)],
)
def test_the_recipes_own_batch_is_tried_in_as_few_parts_as_fit(
    limit: Any, tiny_recipe: Recipe, most: int, largest: int, parts: int | None
) -> None:
    tried = limit(most)
    # The largest size decides, at which a single image has several values of a channel.
    recipe = tiny_recipe.replace(image_sizes=[[0, 64], [1, 32]], global_batch_images=256)
    if parts is None:
        message = "a batch of 1 fits, but not 256 in any number of parts: no memory"
        with pytest.raises(UserError, match=message):
            find_batch(recipe, HOW)
        return
    answer = find_batch(recipe, HOW)
    assert (answer.largest, answer.parts) == (largest, parts)
    assert tried[-1] == (256, parts)
    assert [(done.images, done.parts) for done in answer.tries] == tried


def test_no_batch_of_a_single_value_of_a_channel_is_tried(limit: Any, tiny_recipe: Recipe) -> None:
    # At 32 px the last activations are one pixel wide: batch norm needs two images.
    tried = limit(0)
    with pytest.raises(UserError, match="no batch fits: no memory"):
        find_batch(tiny_recipe.replace(image_size=32), HOW)
    assert tried[-1] == (2, 1)


def test_interrupts_report_what_fits(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(
        recipe: Recipe, execution: Execution, images: int, parts: int, memory_bytes: int | None
    ) -> Try:
        if images > 64:
            raise KeyboardInterrupt
        return Try(images, parts, True)

    monkeypatch.setattr(largest_batch, "_try_steps", fake)
    with pytest.raises(
        Interrupted, match="stopped after try 2: a batch of 64 fits, larger ones may"
    ) as stop:
        find_batch(tiny_recipe, HOW)
    assert stop.value.exit_code == EXIT_INTERRUPTED


def test_a_step_fits_or_not(tiny_recipe: Recipe) -> None:
    fits = _try_steps(tiny_recipe, HOW, 16, 2, 2 * 10**9)
    assert (fits.images, fits.parts, fits.fits, fits.reason) == (16, 2, True, "")
    assert fits.images_per_sec is not None
    # The images alone take 0.3 GB.
    too_large = _try_steps(tiny_recipe, HOW, 100_000, 1, 6 * 10**8)
    assert (too_large.fits, too_large.is_short, too_large.images_per_sec) == (False, True, None)
    assert "Unable to allocate" in too_large.reason


def test_a_smallest_step_that_fails_otherwise_ends_the_search(tiny_recipe: Recipe) -> None:
    tried: list[Try] = []
    message = r"a step of 2 images failed, but not for lack of memory: .*nchw"
    with pytest.raises(BackendError, match=message):
        find_batch(tiny_recipe, HOW.replace(layout="nchw"), listener=tried.append)
    assert [(done.images, done.fits, done.is_short) for done in tried] == [(32, False, False)]


def test_unknown_failures_mean_memory(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(
        recipe: Recipe, execution: Execution, images: int, parts: int, memory_bytes: int | None
    ) -> Try:
        return Try(images, parts, images // parts <= 20, "std::exception")

    monkeypatch.setattr(largest_batch, "_try_steps", fake)
    assert find_batch(tiny_recipe.replace(global_batch_images=40), HOW).largest == 20


@pytest.mark.parametrize("parts", [1, 2])
def test_noise_is_a_batch_that_a_step_takes(tiny_recipe: Recipe, parts: int) -> None:
    batch = next(
        step_process.noise(tiny_recipe.replace(cutmix_alpha=0.2, global_batch_images=8), parts)
    )
    assert batch.images.shape == (8, 32, 32, 3)
    assert batch.partners is not None
    assert batch.partners.max() == 8 // parts - 1
    assert batch.boxes is not None
    assert batch.boxes.tolist() == [[16, 16, 16, 16]] * 8
    plain = next(step_process.noise(tiny_recipe.replace(global_batch_images=8), parts))
    assert (plain.coefficients, plain.partners) == (None, None)


def test_a_step_is_measured(tiny_recipe: Recipe) -> None:
    result = step_process.measure_steps(tiny_recipe.replace(global_batch_images=4), HOW, None)
    assert result["images_per_sec"] > 0
    assert result["peak_memory_bytes"] > 10**7
    assert result["device"].startswith("CPU")
