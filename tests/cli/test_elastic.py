"""A run resumes on another number of ranks with the same global batches."""

from pathlib import Path

import pytest

from tests.cli.cases import ROUNDING, choose_launcher, measure_difference, run_command, set_fields
from tests.runs.cases import read_losses, read_state
from tests.soak import in_a_soak

pytestmark = pytest.mark.slow


@pytest.fixture
def training(launcher: str, recipe_file: Path, textures: Path) -> list[object]:
    """A training of one epoch, on one backend; on all backends in a soak."""
    fields = set_fields(epochs=1, lr=0.001, log_every_steps=1)
    options = [*fields, *choose_launcher(launcher)]
    return ["train", "--recipe", recipe_file, "--data", textures, *options]


def compare_weights(first: Path, second: Path, *, trained_only: bool) -> float:
    """Return the largest difference of the weights of two runs, relative to the largest value of
    each tensor."""
    weights = []
    for run in (first, second):
        tensors = read_state(run, 7).tensors
        if trained_only:
            tensors = {name: value for name, value in tensors.items() if "running" not in name}
        weights.append(tensors)
    return measure_difference(*weights)


@in_a_soak  # `tests/runs/test_resuming.py` counts the parts
def test_on_half_as_many_ranks_a_step_has_the_same_parts(
    training: list[object], tmp_path: Path
) -> None:
    # Local batch norm normalises each part alone, so that the parts are seen in the weights.
    whole = tmp_path / "whole"
    kept = tmp_path / "kept"
    run_command("launch", "-n", 2, "--", *training, "--out", whole)
    run_command("launch", "-n", 2, "--", *training, "--out", kept, "--stop-after-steps", 3)
    run_command(*training, "--out", kept, "--keep-global-batch")
    assert read_losses(kept) == pytest.approx(read_losses(whole), rel=1e-5)
    assert compare_weights(whole, kept, trained_only=True) < ROUNDING


@in_a_soak
def test_without_the_option_a_step_has_other_parts(training: list[object], tmp_path: Path) -> None:
    # This shows that the bounds above can fail.
    whole = tmp_path / "whole"
    other = tmp_path / "other"
    run_command("launch", "-n", 2, "--", *training, "--out", whole)
    run_command("launch", "-n", 2, "--", *training, "--out", other, "--stop-after-steps", 3)
    run_command(*training, "--out", other)
    assert read_losses(other)[:3] == read_losses(whole)[:3]
    assert read_losses(other) != pytest.approx(read_losses(whole), rel=1e-3)
    assert compare_weights(whole, other, trained_only=True) > ROUNDING


@in_a_soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_synchronised_ranks_are_alike(ranks: int, training: list[object], tmp_path: Path) -> None:
    training += ["--set", "batch_norm=synchronised"]
    one = tmp_path / "one"
    several = tmp_path / "several"
    run_command(*training, "--out", one)
    run_command("launch", "-n", ranks, "--", *training, "--out", several)
    assert read_losses(several) == pytest.approx(read_losses(one), rel=1e-5)
    assert compare_weights(one, several, trained_only=False) < ROUNDING


@in_a_soak
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_synchronised_run_moves(ranks: int, training: list[object], tmp_path: Path) -> None:
    training += ["--set", "batch_norm=synchronised"]
    whole = tmp_path / "whole"
    moved = tmp_path / "moved"
    run_command("launch", "-n", 2, "--", *training, "--out", whole)
    run_command("launch", "-n", 2, "--", *training, "--out", moved, "--stop-after-steps", 3)
    run_command("launch", "-n", ranks, "--", *training, "--out", moved)
    assert read_losses(moved) == pytest.approx(read_losses(whole), rel=1e-5)
    assert compare_weights(whole, moved, trained_only=False) < ROUNDING
