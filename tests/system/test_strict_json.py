"""JSON without NaN and Infinity."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.system.strict_json import is_figure, is_rate, parsed, to_json

INF = float("inf")
NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"loss": 1.5, "name": "café", "none": None}, {"loss": 1.5, "name": "café", "none": None}),
        ({"loss": -INF}, {"loss": None, "not_finite": {"loss": "-inf"}}),
        (
            {"losses": [1.0, NAN, INF]},
            {"losses": [1.0, None, None], "not_finite": {"losses": "nan"}},
        ),
        ([{"a": {"b": (1, NAN)}}], [{"a": {"b": [1, None], "not_finite": {"b": "nan"}}}]),
    ],
    ids=str,
)
def test_numbers_that_json_lacks_are_null_with_a_key_beside(value: Any, expected: Any) -> None:
    assert json.loads(to_json(value), parse_constant=pytest.fail) == expected


def test_no_other_json_of_the_package_can_have_nan_in_it() -> None:
    lax = []
    for path in Path(lockstep.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump"):
                strict = any(
                    keyword.arg == "allow_nan" and ast.unparse(keyword.value) == "False"
                    for keyword in node.keywords
                )
                lax += [] if strict else [f"{path}:{node.lineno}"]
    assert lax == []


def test_a_file_name_that_is_not_utf8_is_written_and_read_back() -> None:
    text = to_json({"Vögel": "b\udcff"})
    assert text.encode() == b'{"V\xc3\xb6gel": "b\\udcff"}'
    assert json.loads(text) == {"Vögel": "b\udcff"}


def test_brackets_that_cannot_be_read_are_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parsed("[" * 100_000)


def test_a_key_that_stands_twice_is_refused_wherever_it_is() -> None:
    for text in ('{"a": 1, "b": 2, "a": 1}', '[{"c": {"a": 1, "\\u0061": 2}}]'):
        with pytest.raises(ValueError, match="an object has the key 'a' twice"):
            parsed(text)
    assert parsed('[{"a": 1}, {"a": {"a": 2}}]') == [{"a": 1}, {"a": {"a": 2}}]


def test_true_is_no_number_and_null_stands_for_one_that_is_not_finite() -> None:
    result = [is_figure(value) for value in (1, 0.5, None, float("nan"), True, "1", 10**400)]
    assert result == [True] * 4 + [False] * 3
    result = [is_rate(value) for value in (1, 0.5, 0, -1, float("inf"), float("nan"), None)]
    assert result == [True] * 2 + [False] * 5
