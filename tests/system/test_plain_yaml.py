"""Bounded YAML: values are those of PyYAML; hostile texts are refused with a reason and a line
number."""

import pytest
import yaml

from lockstep.recipes.published import RECIPES
from lockstep.system.plain_yaml import MOST_CHARACTERS, MOST_DEPTH, read_yaml

BOMB = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))]
)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_as_pyyaml_reads_it(name: str) -> None:
    text = RECIPES[name]().format_yaml()
    assert read_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text", ["", "1e-3", "on", "[1, [2, 3], {a: null}]", "a: 0x10\nb: 2024-01-01\n", "!!int '7'"]
)
def test_a_value_is_what_pyyaml_makes_of_it(text: str) -> None:
    assert read_yaml(text) == yaml.safe_load(text)


HOSTILE = {
    "bomb": (BOMB, r"line 2: aliases are not supported, write the value itself instead of \*a0"),
    "a list of itself": ("a: 1\nb: &b [*b]", "line 2: aliases are not supported"),
    "brackets": ("[" * 20_000, "line 1: more than 16 nested lists and mappings"),
    "keys": ("? " * 20_000, "line 1: more than 16 nested lists and mappings"),
    "long": ("a" * (MOST_CHARACTERS + 1), "it has more than 65,536 characters"),
    "empty integer": ("a: 1\nepochs: !!int ''", "line 2: '' is not a valid int"),
    "underscore": ("!!int '_'", "'_' is not a valid int"),
    "empty float": ("!!float ''", "'' is not a valid float"),
    "bool": ("!!bool maybe", "'maybe' is not a valid bool"),
    "timestamp": ("!!timestamp x", "'x' is not a valid timestamp"),
    "date": ("2001-99-99", "'2001-99-99' is not a valid timestamp"),
    "digits": ("9" * 5000, "is not a valid int"),
    "sexagesimal": ("1" + ":59" * 5000, "is not a valid int"),
    "hexadecimal": ("0x" + "f" * 5000, "is not a valid int"),
    "code": ("!!python/object/apply:os.system [true]", "could not determine a constructor"),
    "key": ("? [a, b]\n: 1", "unhashable"),
    "documents": ("a: 1\n---\nb: 2", "line 2: expected a single document"),
    "zero": ("\0", "unacceptable character"),
}


@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_hostile_or_wrong_is_one_error_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        read_yaml(text)
    assert type(error.value) is ValueError
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_depth_is_taken_up_to_its_bound() -> None:
    deep = "[" * (MOST_DEPTH - 1) + "1" + "]" * (MOST_DEPTH - 1)
    assert read_yaml(deep) == yaml.safe_load(deep)
    with pytest.raises(ValueError, match="more than 16"):
        read_yaml(f"[{deep}]")
