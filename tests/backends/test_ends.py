"""Ranks whose work is done end without an abort, on a busy machine."""

import pytest

from tests.backends.ends import FORKED, run_pairs
from tests.backends.launchers import LAUNCHED
from tests.soak import in_a_soak


@in_a_soak
@pytest.mark.parametrize("name", [name for name in LAUNCHED if " " not in name])
def test_no_rank_aborts_at_its_end(name: str) -> None:
    pairs = 100 if name in FORKED else 10
    assert run_pairs(name, pairs) == []
