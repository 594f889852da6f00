"""What tests of ranks share."""

import os
from collections.abc import Callable

import pytest

from lockstep.backends.frameworks import name_rank

NameRank = Callable[..., dict[str, str]]


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> NameRank:
    """A function that returns the variables that `name_rank` adds to those of a launcher."""

    def name(variables: dict[str, str], backend: str = "torch") -> dict[str, str]:
        monkeypatch.setattr(os, "environ", dict(variables))
        name_rank(backend)
        assert os.environ.items() >= variables.items()
        return dict(os.environ.items() - variables.items())

    return name
