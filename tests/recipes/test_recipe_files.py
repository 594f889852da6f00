"""Recipes in files, and settings as texts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Execution, Recipe, difference, load_recipe, parse_settings
from lockstep.recipes.published import RECIPES
from lockstep.recipes.schedule import learning_rates
from lockstep.system.errors import RecipeError
from tests.docs.pages import ROOT, read_blocks


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_is_loaded_by_its_name(name: str) -> None:
    assert load_recipe(name) == RECIPES[name]()


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_without_a_base_changes_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.yaml", "epochs: 7\nweight_decay: 1e-4\n")

    assert load_recipe(path) == Recipe(epochs=7, weight_decay=0.0001)
    assert load_recipe(str(path)) == load_recipe(path)


def test_a_file_with_a_base_changes_that_recipe(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.yaml", "base: resnet50-mxnet-90ep\nepochs: 7\n")

    assert difference(load_recipe("resnet50-mxnet-90ep"), load_recipe(path)) == {"epochs": (90, 7)}


def test_the_file_of_an_older_run_means_what_it_meant(tmp_path: Path) -> None:
    recipe = load_recipe(
        written(tmp_path / "recipe.yaml", "based_on: resnet50-paddle-asp-90ep\nsparsity: mask_1d\n")
    )

    assert (recipe.stem_channels, recipe.nesterov) == (3, False)


def test_a_base_may_be_a_file_beside_the_one_that_names_it(tmp_path: Path) -> None:
    written(tmp_path / "first.yaml", "base: demo\nlr: 0.5\nepochs: 3\n")
    second = written(tmp_path / "second.yaml", "base: first.yaml\nepochs: 4\n")

    demo = load_recipe("demo")
    result = difference(demo, load_recipe(second))
    assert result == {"epochs": (demo.epochs, 4), "lr": (demo.lr, 0.5)}


BAD = {
    "binary": (bytes(range(256)), "cannot be read as YAML"),
    "zeros": (b"\0\0\0", "cannot be read as YAML"),
    "cut off": (b"epochs: [1", "cannot be read as YAML"),
    "tabs": (b"epochs: 1\n\tlr: 2", "cannot be read as YAML"),
    "no date": (b"seed: 2024-13-45", "cannot be read as YAML"),
    "a list as a key": (b"? [1, 2]\n: 5", "cannot be read as YAML"),
    "too deep": (b"seed: " + b"[" * 500, "cannot be read as YAML"),
    "a Python object": (b"seed: !!python/object:os.system 1", "cannot be read as YAML"),
    "no bool": (b"zero_init_last_bn: !!bool maybe", "line 1: 'maybe' is not a valid bool"),
    "alias": (b"mean: &a [1, 2, 3]\nstd: *a", "line 2: aliases are not supported"),
    "long": (b"#" * 10**6, "it has 1,000,000 bytes; expected at most 262,144"),
    "empty": (b"", "expected fields of a recipe"),
    "list": (b"- epochs: 1", "expected fields of a recipe"),
    "words": (b"just some words", "expected fields of a recipe"),
    "unknown field": (b"epoch: 1", "no field 'epoch'. Did you mean epochs"),
    "a field that Python uses itself": (b"self: 1", "no field 'self'"),
    "a number as a field": (b"1: 1", "no field 1"),
    "wrong value": (b"base: demo\nepochs: none", "epochs: Input should be a valid integer"),
    "unknown base": (b"base: dem", "no recipe and no file 'dem'. Did you mean demo"),
    "a number as base": (b"base: 5", "no recipe and no file '5'"),
    "a list as base": (b"base: [demo]", "no recipe and no file"),
    "its own base": (b"base: mine.yaml", "is its own base"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)

    with pytest.raises(RecipeError, match=message) as raised:
        load_recipe(path)

    assert str(raised.value).startswith(str(path))


def test_files_that_are_each_others_base_are_refused(tmp_path: Path) -> None:
    first = written(tmp_path / "first.yaml", "base: second.yaml")
    written(tmp_path / "second.yaml", "base: first.yaml")

    with pytest.raises(RecipeError, match=r"first\.yaml is its own base"):
        load_recipe(first)


def test_a_name_that_is_neither_recipe_nor_file_is_answered_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"'resnet50-padle-90ep'.*resnet50-paddle-90ep"):
        load_recipe("resnet50-padle-90ep")


def test_a_folder_without_a_run_is_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe and no file"):
        load_recipe(tmp_path)


def test_settings_go_to_the_recipe_or_to_the_execution_by_their_name() -> None:
    changes = parse_settings(
        ["epochs=2", "mean=[1, 2, 3]", "log_every_steps=1", "model=resnet18", "device=cpu"]
    )

    assert changes == (
        {"epochs": 2, "mean": [1, 2, 3], "model": "resnet18"},
        {"log_every_steps": 1, "device": "cpu"},
    )


def test_no_field_is_of_both_recipe_and_execution() -> None:
    assert not Recipe.model_fields.keys() & Execution.model_fields.keys()


def test_a_later_setting_of_a_field_wins() -> None:
    assert parse_settings(["epochs=2", "epochs=3"]) == ({"epochs": 3}, {})


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("lr=1e-4", "lr", 0.0001),
        ("zero_init_last_bn=yes", "zero_init_last_bn", True),
        ("weight_decay_roles=[]", "weight_decay_roles", ()),
        ("lr_decay=linear", "lr_decay", "linear"),
        ("loss_scaling=none", "loss_scaling", "none"),
        (
            "model={block: basic, layers: [1, 1, 1, 1]}",
            "model",
            ModelSpec(block="basic", layers=(1, 1, 1, 1)),
        ),
    ],
)
def test_a_setting_is_read_as_its_fields_kind(setting: str, field: str, value: Any) -> None:
    changes, _ = parse_settings([setting])

    assert getattr(Recipe().replace(**changes), field) == value


@pytest.mark.parametrize("word", ["auto", "on", "off"])
def test_the_compiler_can_be_set_by_word_though_yaml_reads_some_as_truth_values(word: str) -> None:
    _, changes = parse_settings([f"compile={word}"])

    assert Execution.of(changes).compile == word


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epochs", "expected field=value, found 'epochs'"),
        ("epoch=2", "no field 'epoch'. Did you mean --set epochs=2"),
        ("log_every_step=2", "no field 'log_every_step'. Did you mean --set log_every_steps=2"),
        ("=5", "no field ''"),
        ("base=demo", "no field 'base'"),
        ("mean=[1,", r"mean: '\[1,' is not a value"),
        ("seed=2024-13-45", "seed: '2024-13-45' is not a value"),
        ("epochs=!!int _", "epochs: '!!int _' is not a value: line 1: '_' is not a valid int"),
    ],
)
def test_a_setting_that_cannot_be_understood_is_refused(setting: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_settings([setting])


def test_the_recipe_of_the_page_on_timm_has_timms_learning_rates(tmp_path: Path) -> None:
    [block] = [b for b in read_blocks(ROOT / "docs/how-to/timm.md") if b.language == "yaml"]
    (tmp_path / "timm.yaml").write_text(block.text)
    rates = learning_rates(load_recipe(tmp_path / "timm.yaml"), steps_per_epoch=2)[::2]
    # Its --lr-base 0.1 at 128 of 256 images; 5 epochs from 1e-5, and a cosine from epoch 0.
    warm = 1e-5 + (0.05 - 1e-5) * np.arange(5) / 5
    cosine = 0.05 * (1 + np.cos(np.pi * np.arange(5, 300) / 300)) / 2
    np.testing.assert_allclose(rates, [*warm, *cosine], rtol=1e-12, atol=1e-15)
