"""All threads together decode at most a limit of pixels at the same time, counting only large images."""

import threading
import time

import pytest

from lockstep.data.decoding import size_limits
from lockstep.data.decoding.size_limits import MOST_PIXELS, MOST_PIXELS_IN_WHOLE, USUAL, check_size, decoding


def second(pixels: int, order: list[str]) -> threading.Thread:
    """Start a thread that decodes; return when it has begun, or waits for its turn."""

    def decode() -> None:
        with decoding(pixels):
            order.append("second")

    thread = threading.Thread(target=decode)
    thread.start()
    while thread.is_alive() and not decoding._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0)
    return thread


@pytest.mark.parametrize(
    ("first", "other", "order"),
    [
        (MOST_PIXELS - USUAL, USUAL + 1, ["first", "second"]),
        (MOST_PIXELS - USUAL - 1, USUAL + 1, ["second", "first"]),
        (MOST_PIXELS, USUAL, ["second", "first"]),
        (2 * MOST_PIXELS, USUAL + 1, ["first", "second"]),
    ],
    ids=["too many together", "as many as may be", "usual", "alone"],
)
def test_a_large_image_waits_until_there_is_room_for_it(first: int, other: int, order: list[str]) -> None:
    found: list[str] = []
    with decoding(first):
        thread = second(other, found)
        found.append("first")
    thread.join()
    assert found == order


def test_room_is_given_back_by_what_cannot_be_decoded() -> None:
    with pytest.raises(ValueError, match="damaged"), decoding(MOST_PIXELS):
        raise ValueError("damaged")
    assert decoding._pixels == 0


@pytest.mark.parametrize(
    ("height", "width", "size", "most", "message"),
    [
        (10_000, 10_000, 10**6, MOST_PIXELS_IN_WHOLE, None),
        (10_000, 10_001, 10**6, MOST_PIXELS_IN_WHOLE, "10001 x 10000 pixels are too many: at most 100,000,000 unless"),
        (10_000, 10_001, 10**6, MOST_PIXELS, None),
        (13_378, 13_378, 10**8, MOST_PIXELS, "too many: at most 178,956,970; reduce"),
        (2048, 2048, 30, MOST_PIXELS_IN_WHOLE, None),
        (2048, 2049, 30, MOST_PIXELS_IN_WHOLE, "2049 x 2048 pixels are too many for a file of 30 bytes"),
        (4096, 4096, 1024, MOST_PIXELS_IN_WHOLE, None),
    ],
)
def test_a_size_is_held_against_the_format_and_the_bytes(
    height: int, width: int, size: int, most: int, message: str | None
) -> None:
    if message is None:
        check_size(height, width, size, most)
        return
    with pytest.raises(ValueError, match=message):
        check_size(height, width, size, most)


def test_the_bound_of_a_jpeg_is_pillows() -> None:
    from PIL import Image

    assert Image.MAX_IMAGE_PIXELS is not None
    assert size_limits.MOST_PIXELS == 2 * Image.MAX_IMAGE_PIXELS
