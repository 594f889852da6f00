"""`preprocessing.py` next to a model: the preprocessing in words. Tests of exports run it."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.inference.preprocessing_file import FILE, write_preprocessing
from lockstep.recipes import Recipe

WORDS: list[tuple[dict[str, Any], str]] = [
    ({}, "rounded down"),
    ({"eval_side_rounding": "nearest"}, "halves up"),
    ({"eval_side_rounding": "float32_down"}, "computed in float32"),
    ({}, "to the even number"),
    ({"eval_offset_rounding": "up"}, "rounded up"),
    ({}, "fills the rounded sides"),
    ({"eval_sampling": "half_pixel_symmetric"}, "scale of the shorter side"),
    ({"eval_sampling": "asymmetric"}, "i times the scale"),
    ({"exif_orientation": True}, "EXIF"),
]


@pytest.mark.parametrize(("changes", "words"), WORDS)
def test_preparation_is_in_words(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_preprocessing(tmp_path, Recipe(**changes), normalises=False)
    description = (tmp_path / FILE).read_text(encoding="utf-8").split('"""')[1]
    assert words in description
