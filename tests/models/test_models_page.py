"""The table of models has every model with its counts, and the described models are recipes."""

import re
from pathlib import Path

import pytest
import yaml

from lockstep.models.architectures import MODELS
from lockstep.models.operations import forward_macs
from lockstep.recipes import Recipe

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference/models.md").read_text(encoding="utf-8")
DESCRIPTIONS = (DOCS / "how-to/model.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| `(?P<name>[^`]+)` \| (?P<parameters>[0-9.]+) \| (?P<macs>[0-9.]+) \|")


def test_the_table_has_every_model_with_its_counts() -> None:
    rows = {row["name"]: (row["parameters"], row["macs"]) for row in ROW.finditer(PAGE)}
    assert rows == {
        name: (
            f"{spec.count_parameters(1000) / 1e6:.2f}",
            f"{forward_macs(spec, 224, 1000) / 1e9:.2f}",
        )
        for name, spec in MODELS.items()
    }


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", DESCRIPTIONS, re.DOTALL))
def test_the_models_of_the_page_are_recipes(text: str) -> None:
    assert not isinstance(Recipe.of(yaml.safe_load(text)).model, str)
