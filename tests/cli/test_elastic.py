"""A run resumes on another number of ranks with the same global batches."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lockstep.system.event_log import read_log
from lockstep.weights import checkpoint
from tests.backends.launchers import LAUNCHED
from tests.processes import call
from tests.soak import SOAK, in_a_soak

pytestmark = pytest.mark.slow
ROUNDING = 2e-4
"""The largest relative difference of weights that rounding explains after an epoch at this learning
rate."""


@pytest.fixture(params=LAUNCHED if SOAK else LAUNCHED[-1:])
def trains(request: pytest.FixtureRequest, recipe_file: Path, textures: Path) -> list[object]:
    """A training of one epoch, on one engine; on all engines in a soak."""
    backend, _, distributed = str(request.param).partition(" ")
    changes = (
        "epochs=1",
        "lr=0.001",
        "log_every_steps=1",
        f"distributed={distributed or 'native'}",
    )
    options = [word for change in changes for word in ("--set", change)]
    return ["train", "--recipe", recipe_file, "--data", textures, *options, "--backend", backend]


def done(*command: object) -> None:
    code, _, errors = call(*command)
    assert code == 0, errors


def losses(run: Path) -> list[float]:
    return [
        loss
        for entry in read_log(run / "log.jsonl")
        if entry["kind"] == "train"
        for loss in entry["losses"]
    ]


def difference(first: Path, second: Path, *, trained_only: bool) -> float:
    """Return the largest difference of the weights of two runs, relative to the largest value of
    each tensor."""
    a, b = (
        load_file(checkpoint.checkpoint_path(run / "checkpoints", 7) / "model.safetensors")
        for run in (first, second)
    )
    names = [name for name in a if not (trained_only and "running" in name)]
    return max(float(np.abs(a[name] - b[name]).max() / np.abs(a[name]).max()) for name in names)


@in_a_soak  # `tests/runs/test_resuming.py` counts the parts
def test_on_half_as_many_ranks_a_step_has_the_same_parts(
    trains: list[object], tmp_path: Path
) -> None:
    # Local batch norm normalises each part alone, so that the parts are seen in the weights.
    whole = tmp_path / "whole"
    kept = tmp_path / "kept"
    done("launch", "-n", 2, "--", *trains, "--out", whole)
    done("launch", "-n", 2, "--", *trains, "--out", kept, "--stop-after-steps", 3)
    done(*trains, "--out", kept, "--keep-global-batch")
    assert losses(kept) == pytest.approx(losses(whole), rel=1e-5)
    assert difference(whole, kept, trained_only=True) < ROUNDING


@in_a_soak
def test_without_the_option_a_step_has_other_parts(trains: list[object], tmp_path: Path) -> None:
    # This shows that the bounds above can fail.
    whole = tmp_path / "whole"
    other = tmp_path / "other"
    done("launch", "-n", 2, "--", *trains, "--out", whole)
    done("launch", "-n", 2, "--", *trains, "--out", other, "--stop-after-steps", 3)
    done(*trains, "--out", other)
    assert losses(other)[:3] == losses(whole)[:3]
    assert losses(other) != pytest.approx(losses(whole), rel=1e-3)
    assert difference(whole, other, trained_only=True) > ROUNDING


@in_a_soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_with_synchronised_batch_norm_any_number_of_ranks_trains_the_weights_of_one(
    ranks: int, trains: list[object], tmp_path: Path
) -> None:
    trains += ["--set", "batch_norm=synchronised"]
    one = tmp_path / "one"
    several = tmp_path / "several"
    done(*trains, "--out", one)
    done("launch", "-n", ranks, "--", *trains, "--out", several)
    assert losses(several) == pytest.approx(losses(one), rel=1e-5)
    assert difference(one, several, trained_only=False) < ROUNDING


@in_a_soak
@pytest.mark.parametrize("ranks", [1, 4])
def test_with_synchronised_batch_norm_a_run_moves_to_any_number_of_ranks(
    ranks: int, trains: list[object], tmp_path: Path
) -> None:
    trains += ["--set", "batch_norm=synchronised"]
    whole = tmp_path / "whole"
    moved = tmp_path / "moved"
    done("launch", "-n", 2, "--", *trains, "--out", whole)
    done("launch", "-n", 2, "--", *trains, "--out", moved, "--stop-after-steps", 3)
    done("launch", "-n", ranks, "--", *trains, "--out", moved)
    assert losses(moved) == pytest.approx(losses(whole), rel=1e-5)
    assert difference(whole, moved, trained_only=False) < ROUNDING
