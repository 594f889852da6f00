"""Runs on classes of different sizes: class weights, sampling, copies, mixing and dropout."""

import shutil
from pathlib import Path

import pytest

import lockstep
from lockstep.recipes import Recipe, load_recipe
from lockstep.system.errors import RecipeError
from tests.runs.cases import find_same_parts, read_losses, stop_at, train_until


def test_a_stopped_run_counts_again(textures: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    data = shutil.copytree(textures, tmp_path / "data")
    for image in sorted((data / "train" / "dots").iterdir())[1:]:
        image.unlink()
    recipe = tiny_recipe.replace(class_weights="balanced", sampling="balanced", dropout=0.3)
    recipe = recipe.replace(cutmix_alpha=1.0, mixup_alpha=0.2, repeated_augmentation=2)
    whole = tmp_path / "whole"
    lockstep.train(recipe, data, whole)
    stopped = tmp_path / "stopped"
    train_until(stop_at("train", 3), recipe, data, stopped)

    weights = load_recipe(stopped / "recipe.yaml").class_weights
    assert sorted(weights) == pytest.approx([55 / (10 * 6)] * 9 + [55 / 10])
    with pytest.raises(RecipeError, match=r"class_weights: \[0\.9.* in that run, none here"):
        lockstep.train(recipe.replace(class_weights="none"), data, stopped)

    lockstep.train(recipe, data, stopped)
    assert read_losses(stopped) == read_losses(whole)
    assert find_same_parts(stopped, whole) == ["tensors", "momentum", "ema"]
