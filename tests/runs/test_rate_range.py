"""The range test of the learning rate: how it begins and ends."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.reporting.rate_curve import draw_curve
from lockstep.runs.rate_range import find_rate
from lockstep.runs.resuming import RunSettings, complete_settings
from lockstep.system.errors import Interrupted, UserError
from tests.runs.cases import read_losses, stop_when


@pytest.fixture
def settings(tiny_recipe: Recipe, textures: Path, tmp_path: Path) -> RunSettings:
    return complete_settings(tmp_path / "run", tiny_recipe, textures)


def test_the_test_begins_as_a_run_does_and_ends_where_the_loss_diverges(
    settings: RunSettings, uninterrupted: Path, tmp_path: Path
) -> None:
    result = find_rate(settings, steps=20, low=1e-2, high=1e12)
    assert result.losses[0] == read_losses(uninterrupted)[0]
    assert result.diverged
    assert len(result.losses) < 20
    assert result.rates == np.geomspace(1e-2, 1e12, 20)[: len(result.losses)].tolist()
    draw_curve(result, tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")


def test_a_test_can_be_stopped(settings: RunSettings) -> None:
    listener = stop_when(
        lambda event: event["kind"] == "progress" and event["what"].startswith("raising")
    )
    with pytest.raises(Interrupted, match="stopped by SIGTERM while raising the learning rate"):
        find_rate(settings, steps=200, listener=listener)


@pytest.mark.parametrize(
    "changes", [{"low": 0.0}, {"low": 2.0, "high": 1.0}, {"steps": 5}, {"high": float("nan")}]
)
def test_a_range_that_is_none_is_refused(changes: dict[str, float], settings: RunSettings) -> None:
    with pytest.raises(UserError, match="expected"):
        find_rate(settings, **changes)  # type: ignore[arg-type]
