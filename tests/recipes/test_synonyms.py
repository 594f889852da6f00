"""Names that other programs use for fields and options."""

import pytest

from lockstep.recipes import Execution, Recipe, parse_settings, synonyms
from lockstep.recipes.synonyms import suggest_fields, suggest_option
from lockstep.system.errors import RecipeError

KNOWN = [*Recipe.model_fields, *Execution.model_fields]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("batch_size", "global_batch_images"),
        ("batch-size", "global_batch_images"),
        ("learning_rate", "lr"),
        ("LearningRate", "lr"),
        ("num_classes", "logits"),
        ("num_clases", "logits"),
        ("workers", "loader_threads"),
        ("img_size", "image_size"),
        ("imgsz", "image_size"),
        ("wd", "weight_decay"),
        ("Epochs", "epochs"),
        ("epoch", "epochs"),
        ("amp", "precision"),
        ("milestones", "lr_step_epochs"),
        ("grad_checkpointing", "recompute"),
        ("gradient_accumulation_steps", "accumulation_steps"),
    ],
)
def test_a_field_is_found_by_the_word_that_others_have_for_it(name: str, field: str) -> None:
    assert suggest_fields(name, KNOWN) == [field]


def test_what_is_like_nothing_means_nothing() -> None:
    assert suggest_fields("zzz", KNOWN) == []


def test_every_word_means_one_field_that_is_there_and_is_called_otherwise() -> None:
    words = [word for text in synonyms._FIELDS.values() for word in text.split()]
    assert sorted(words) == sorted(set(words))
    assert set(synonyms._FIELDS) <= set(KNOWN)
    assert set(words) & set(KNOWN) == set()


def test_a_setting_that_is_not_there_is_answered_with_what_to_type() -> None:
    message = r"no field 'batch'. Did you mean --set global_batch_images=32 \(images of a"
    with pytest.raises(RecipeError, match=message):
        parse_settings(["batch=32"])
    with pytest.raises(RecipeError, match=r"Did you mean --set 'lr_step_epochs=\[3, 4\]'\?$"):
        parse_settings(["milestones=[3, 4]"])
    with pytest.raises(RecipeError, match=r"`lockstep recipes fields` describes all\.$"):
        parse_settings(["zzz=3"])


def test_a_field_that_is_not_there_is_answered_with_its_name() -> None:
    message = r"there is no field 'batch_size'. Did you mean global_batch_images\?"
    with pytest.raises(RecipeError, match=message):
        Recipe().replace(batch_size=3)


TRAIN = ["--recipe", "--data", "--out", "--weights", "--backend", "--set", "--resume-from"]
WEIGHTS = ["--recipe", "--checkpoint", "--data", "--set"]


@pytest.mark.parametrize(
    ("option", "options", "sentence"),
    [
        ("--output-dir", TRAIN, "Did you mean --out 3?"),
        ("--pretrained", TRAIN, "Did you mean --weights 3?"),
        ("--backnd", TRAIN, ""),
        ("--lr", TRAIN, "Did you mean --set lr=3?"),
        ("--epochs", TRAIN, "Did you mean --set epochs=3?"),
        ("--resume", TRAIN, "A run resumes by itself: lockstep train --out RUN"),
        ("--batch-size", ["--batch", "--data"], "Did you mean --batch 3?"),
        ("--run", TRAIN, "Did you mean --out 3?"),
        ("--run", WEIGHTS, "Give a run or a file of weights without an option: 3"),
        ("--pretrained", WEIGHTS, "Give a run or a file of weights without an option: 3"),
        ("--zzz", TRAIN, ""),
        ("--resume", ["--recipe", "--data", "--set"], ""),
        ("--val-split", ["--data", "--split"], "Did you mean --split 3?"),
        ("--val-split", ["--data", "--split", "--step"], ""),
    ],
)
def test_an_unknown_option_has_its_answer(option: str, options: list[str], sentence: str) -> None:
    assert suggest_option(option, "3", options, KNOWN) == sentence
