"""Notes before a run's first step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from lockstep.recipes import Execution, Recipe
from lockstep.recipes.published import RECIPES
from lockstep.runs.notes import (
    FEW_IMAGES,
    RunFacts,
    list_unusual_settings,
    note_determinism_cost,
    note_single_class,
    suggest_weights,
)
from tests.lines import read_table

SENSIBLE = Recipe(logits=10, epochs=20, global_batch_images=32)


def facts(classes: int = 10, steps: int = 4, **counts: list[int]) -> RunFacts:
    names = [f"class {i}" for i in range(classes)]
    training = np.array(counts.get("training", [3] * classes))
    validation = np.array(counts.get("validation", [3] * classes))
    return RunFacts(names, training, validation, steps)


@pytest.mark.parametrize(
    ("on_gpu", "deterministic", "expected"), [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_determinism_has_its_command(on_gpu: bool, deterministic: bool, expected: int) -> None:
    world: Any = SimpleNamespace(on_gpu=on_gpu, ranks=4)
    recipe = Recipe(model="resnext101-32x4d", precision="bf16", global_batch_images=512)
    execution = Execution(deterministic=deterministic, accumulation_steps=2, recompute="blocks")
    notes = note_determinism_cost(recipe, execution, world)
    assert len(notes) == expected
    for note in notes:
        assert "--set deterministic=false" in note
        command = (
            "lockstep benchmark train --backend torch --model resnext101-32x4d -b 64 --set"
            " recompute=blocks --dtype bf16"
        )
        assert note.endswith(f": {command}")


def test_a_single_class_is_noted_without_advice_on_folds() -> None:
    one = facts(1, validation=[9])
    [note] = note_single_class(one)
    assert note.startswith("all images are of one class, class 0, so every accuracy is 100 %")
    assert list_unusual_settings(SENSIBLE.replace(logits=1).rename("my-images"), one) == []


def test_usual_settings_are_not_noted() -> None:
    assert list_unusual_settings(SENSIBLE, facts()) == []


@pytest.mark.parametrize("name", set(RECIPES) - {"demo"})
def test_a_published_recipe_on_imagenet_is_not_noted(name: str) -> None:
    assert list_unusual_settings(RECIPES[name](), facts(classes=1000, steps=40)) == []


UNUSUAL = """
{logits: 1000} | {} | the images have 10 classes, but the model has 1000 logits: --set logits=10
{logits: 12} | {} | the images have 10 classes, but the model has 12 logits: --set logits=10
{sampling: balanced, class_weights: [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]}
  | {} | sampling=balanced and class_weights both favour rare classes: use one
{eval_crop: 320, eval_resize: 330}
  | {} | the evaluation size, 320 px, is more than 1.4 times the training size, 224 px
{eval_crop: 160} | {} | the evaluation size, 160 px, is less than 3/4 of the training size, 224 px
{image_sizes: [[0, 160], [90, 224]], epochs: 90}
  | {} | image_sizes has 224 px from epoch 90 on, but the run ends after 90: set more epochs
{epochs: 3}
  | {} | the warm-up of 5 epochs lasts the whole run of 3, so the learning rate never
  decreases; --set warmup_epochs=0.3
{epochs: 1, warmup_epochs: 1} | {} | the warm-up of 1 epoch lasts the whole run of 1
{epochs: 5} | {} | the warm-up of 5 epochs lasts the whole run of 5
{lr_decay: step, lr_step_epochs: [1], warmup_epochs: 2.0}
  | {steps: 1} | the learning rate never reaches its peak of 0.032: the highest is 0.016
{}
  | {validation: [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]} | no validation images for 2 of 10 classes: class
  8, class 9
{}
  | {training: [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]} | no training images for 7 of 10 classes: class 0,
  class 1, class 2, class 3, class 4 and 2 more
"""


@pytest.mark.parametrize(("changes", "about", "sentence"), read_table(UNUSUAL))
def test_unusual_settings_are_noted(changes: str, about: str, sentence: str) -> None:
    recipe = SENSIBLE.replace(**yaml.safe_load(changes))
    notes = list_unusual_settings(recipe, facts(**yaml.safe_load(about)))
    assert any(note.startswith(sentence) for note in notes), notes


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"logits": 11}, {}),  # NVIDIA's TensorFlow model has one logit more
        ({"eval_crop": 280, "eval_resize": 300}, {}),
        ({"eval_crop": 168}, {}),
        ({"epochs": 6}, {}),
        ({"epochs": 3, "warmup_from_batch_images": 512}, {}),
        ({"logits": 6}, {"classes": 6}),
        ({"sampling": "balanced"}, {}),
    ],
    ids=str,
)
def test_settings_that_are_just_usual_are_not_noted(
    changes: dict[str, Any], about: dict[str, Any]
) -> None:
    assert list_unusual_settings(SENSIBLE.replace(**changes), facts(**about)) == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("resnet50", "torchvision/resnet50.IMAGENET1K_V2"),  # as the documentation says
        ("resnet18", "timm/resnet18.a1_in1k"),
        ("resnext101-32x4d", "timm/resnext101_32x4d.gluon_in1k"),
        ("resnet50-v1", "torchvision/resnet50.IMAGENET1K_V2"),
    ],
)
def test_few_images_get_the_best_free_weights_of_their_model(model: str, name: str) -> None:
    recipe = Recipe(model=model).rename("my-images")
    (note,) = suggest_weights(recipe, 500)
    assert f"--weights {name};" in note
    assert suggest_weights(recipe, FEW_IMAGES) == []
    for published in ("resnet50-paddle-90ep", "resnext101-32x4d-rsb-a1"):
        (note,) = suggest_weights(recipe.rename(published), 500)
        assert f"--weights {name} without --recipe;" in note
    for written in ("demo", "tiny", ""):
        assert suggest_weights(recipe.rename(written), 500) == []


def test_classes_whose_names_look_alike_are_noted() -> None:
    names = ["Cat", "cat ", "dog"]
    notes = list_unusual_settings(
        SENSIBLE.replace(logits=3), RunFacts(names, np.full(3, 9), np.full(3, 3), 4)
    )
    assert [note for note in notes if "Cat, cat ;" in note]
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("recipe", "images", "is_noted"),
    [
        (Recipe(logits=2).rename("fine-tune"), 19, True),
        (Recipe(logits=2).rename("my-images"), 19, True),
        (Recipe(logits=2).rename("my-images"), 60, False),
        (Recipe(logits=2, folds=5, fold=1).rename("fine-tune"), 19, False),
        (Recipe(logits=2).rename("demo"), 19, False),
    ],
)
def test_few_own_validation_images_are_noted(recipe: Recipe, images: int, is_noted: bool) -> None:
    facts = RunFacts(["cat", "dog"], np.array([50, 50]), np.array([9, images - 9]), 12)
    notes = [note for note in list_unusual_settings(recipe, facts) if "--folds 5" in note]
    assert [note.split()[0] for note in notes] == [str(images)] * is_noted
