"""The generator against a second Philox4x64-10, written from the paper and checked with Random123's
known answers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.recipes.philox import Purpose, draw, normal, uniform
from tests.soak import EXAMPLES

ALL_ONES = 2**64 - 1

Words = tuple[int, int, int, int]


def philox4x64_10(counter: Words, key: tuple[int, int]) -> Words:
    """Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 3.3 and its
    constants."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        product0 = a * 0xD2E7470EE14C6C93
        product1 = c * 0xCA5A826395121157
        a = (product1 >> 64) ^ b ^ k0
        b = product1 & ALL_ONES
        c = (product0 >> 64) ^ d ^ k1
        d = product0 & ALL_ONES
        k0 = (k0 + 0x9E3779B97F4A7C15) & ALL_ONES
        k1 = (k1 + 0xBB67AE8584CAA73B) & ALL_ONES
    return a, b, c, d


# Random123, tests/kat_vectors: "philox4x64 10", counter, key and answer.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (ALL_ONES, ALL_ONES, ALL_ONES, ALL_ONES),
        (ALL_ONES, ALL_ONES),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_the_oracle_has_known_answers(counter: Words, key: tuple[int, int], answer: Words) -> None:
    assert philox4x64_10(counter, key) == answer


def test_a_draw_gives_random123s_known_answer_of_the_next_counter() -> None:
    # NumPy adds one to the counter before a block, so all ones become all zeros.
    block = draw(0, ALL_ONES, ALL_ONES, 1, epoch=ALL_ONES, attempt=ALL_ONES)

    assert tuple(block[0].tolist()) == KNOWN_ANSWERS[0][2]


@EXAMPLES
@given(
    seed=st.integers(0, 2**63 - 1),
    purpose=st.sampled_from(Purpose),
    first=st.integers(0, 2**40),
    epoch=st.integers(0, 2**40),
    attempt=st.integers(0, 2**40),
)
def test_the_numbers_of_a_position_are_the_block_of_its_counter(
    seed: int, purpose: Purpose, first: int, epoch: int, attempt: int
) -> None:
    expected = [
        philox4x64_10((first + i + 1, epoch, attempt, purpose), (seed, 0)) for i in range(3)
    ]

    result = draw(seed, purpose, first, 3, epoch=epoch, attempt=attempt).tolist()
    assert result == [list(block) for block in expected]


def test_the_values_of_purposes_never_change() -> None:
    names = ("ORDER", "CROP", "FLIP", "MIXUP_COEFFICIENT", "MIXUP_PARTNER", "WEIGHT", "TEXTURE")
    assert [Purpose[name] for name in names] == list(range(1, 8))


@EXAMPLES
@given(first=st.integers(0, 60), count=st.integers(0, 60))
def test_a_slice_of_positions_equals_that_slice_of_a_whole_draw(first: int, count: int) -> None:
    whole = draw(3, Purpose.FLIP, 0, 120, epoch=2)

    np.testing.assert_array_equal(
        draw(3, Purpose.FLIP, first, count, epoch=2), whole[first : first + count]
    )


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (0, 0.0),
        (2**11 - 1, 0.0),
        (2**11, 2.0**-53),
        (2**62, 0.25),
        (2**63, 0.5),
        (2**64 - 1, 1 - 2.0**-53),
    ],
)
def test_a_uniform_number_is_the_upper_53_bits(raw: int, value: float) -> None:
    assert uniform(np.array([raw], np.uint64))[0] == value


def test_normal_numbers_are_box_and_mullers_transform_of_the_draw() -> None:
    u = [
        word / 2**64
        for i in range(2)
        for word in philox4x64_10((i + 1, 9, 0, Purpose.WEIGHT), (11, 0))
    ]
    expected = []
    for first, second in zip(u[::2], u[1::2], strict=True):
        radius = math.sqrt(-2 * math.log(1 - first))
        expected += [
            radius * math.cos(2 * math.pi * second),
            radius * math.sin(2 * math.pi * second),
        ]

    np.testing.assert_allclose(normal(11, Purpose.WEIGHT, 8, stream=9), expected, rtol=1e-9)


def test_normal_numbers_follow_the_normal_distribution_function() -> None:
    count = 50_000
    numbers = np.sort(normal(1, Purpose.WEIGHT, count, stream=0))
    expected = np.array([(1 + math.erf(x / math.sqrt(2))) / 2 for x in numbers])

    assert np.abs(expected - np.arange(1, count + 1) / count).max() < 1.95 / math.sqrt(count)


@pytest.mark.parametrize("count", range(10))
def test_fewer_normal_numbers_are_the_first_of_more(count: int) -> None:
    more = normal(0, Purpose.WEIGHT, 40, stream=3)

    np.testing.assert_array_equal(normal(0, Purpose.WEIGHT, count, stream=3), more[:count])
