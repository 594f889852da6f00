import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from docs.extensions.recipe_tables import write_tables
from lockstep.recipes import Execution, Recipe, parse_settings
from lockstep.recipes.published import ORIGINS, OWN_RECIPES, RECIPES
from tests.reporting.cases import write_run

Run = Callable[..., tuple[int, str, str]]

NAMES = list(RECIPES)


def test_the_list_names_every_recipe_by_origin_and_what_it_reaches(answer: Run) -> None:
    code, output, errors = answer("recipes")
    lines = [line for line in output.splitlines() if line.startswith("  ")]
    assert (code, errors) == (0, "")
    assert [line for line in output.splitlines() if line not in lines] == list(ORIGINS)
    assert [line.split()[0] for line in lines] == NAMES
    assert len({line.index("ResNe") for line in lines}) == 1
    published = lines[: -len(OWN_RECIPES)]
    assert all(any(sign.isdigit() for sign in line.split(":")[-1]) for line in published)


@pytest.mark.parametrize("name", NAMES)
def test_a_shown_recipe_is_yaml_with_its_source_in_front(name: str, answer: Run) -> None:
    code, output, _ = answer("recipes", "show", name)
    comments = [line for line in output.splitlines() if line.startswith("#")]
    assert code == 0
    assert output.startswith("# ResNe")
    assert any("Source" in line for line in comments)
    assert list(yaml.safe_load(output)) == list(Recipe.model_fields)
    assert Recipe.of(yaml.safe_load(output)) == RECIPES[name]()


def test_a_shown_recipe_lists_its_published_accuracies(answer: Run) -> None:
    lines = answer("recipes", "show", "resnet50-mxnet-90ep")[1].splitlines()
    first = lines.index(
        "# Published top-1 in percent, NVIDIA/DeepLearningExamples"
        " MxNet/Classification/RN50v1.5/README.md at 0663b67:"
    )
    assert lines[first + 1] == "#   76.424 (MXNet, 1 x V100 16GB, 90 epochs, FP16, 22.9 h)"
    assert lines[first + 6] == "#   76.668 (MXNet, 8 x V100 16GB, 90 epochs, FP32, 11.1 h)"


def test_the_table_has_every_published_accuracy_with_its_conditions(answer: Run) -> None:
    code, output, errors = answer("recipes", "table")
    rows = [re.split(" {2,}", line.strip()) for line in output.splitlines()]
    assert (code, errors) == (0, "")
    assert rows[0] == ["recipe", "top-1 %", "precision", "hardware", "epochs", "hours", "notes"]
    # NVIDIA's README at 0663b67.
    assert ["resnet50-mxnet-90ep", "76.424", "fp16", "1 x V100 16GB", "90", "22.9"] in rows
    assert ["resnet50-paddle-50ep", "75.96 ± 0.09", "mixed", "8 x A100 80GB", "50", "-"] in rows
    assert [
        "resnet50-paddle-asp-90ep",
        "76.72",
        "mixed",
        "8 x A100 80GB",
        "90",
        "-",
        "2:4 sparse",
    ] in rows
    as_json = json.loads(answer("recipes", "table", "--json")[1])
    assert [row["recipe"] for row in as_json] == [row[0] for row in rows[1:] if len(row) > 1]
    origins = [RECIPES[row["recipe"]].origin for row in as_json]
    assert [row[0] for row in rows if len(row) == 1] == list(dict.fromkeys(origins))
    assert next(row for row in as_json if row["hours"] == 22.9)["container"] == "mxnet:18.12-py3"


def test_the_page_of_recipes_has_the_tables_made_from_them() -> None:
    page = Path(__file__).parents[2] / "docs/reference/recipes.md"
    tables = write_tables()
    assert f"\n\n{tables}\n" in page.read_text(encoding="utf-8"), (
        "docs/extensions/recipe_tables.py prints them"
    )
    assert re.findall(r"^\| `(.*?)` \|", tables, flags=re.MULTILINE) == NAMES


def test_a_shown_run_stands_beside_the_published_accuracies(answer: Run, tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", recipe=RECIPES["resnet50-paddle-90ep"](), classes=["a", "b"]
    )
    assert not answer("recipes", "show", folder)[1].startswith("#")
    (folder / "recipe.yaml").write_text(
        "based_on: resnet50-paddle-90ep\n" + (folder / "recipe.yaml").read_text()
    )
    first, second = answer("recipes", "show", folder)[1].splitlines()[:2]
    assert first.endswith(") of 400 images")
    assert second.startswith("# published not compared: ")
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(report | {"final": {}, "best": None}))
    code, output, _ = answer("recipes", "show", folder)
    assert (code, output.startswith("#")) == (0, False)


def test_what_is_shown_can_be_saved_and_trained_from(answer: Run, tmp_path: Path) -> None:
    _, output, _ = answer("recipes", "show", "resnet50-mxnet-90ep")
    (tmp_path / "mine.yaml").write_text(output)
    result = answer("recipes", "diff", tmp_path / "mine.yaml", "resnet50-mxnet-90ep")
    assert result == (0, "no field differs\n", "")


def test_a_file_is_shown_with_all_its_fields(answer: Run, tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("base: demo\nepochs: 3\n")
    code, output, _ = answer("recipes", "show", tmp_path / "short.yaml")
    assert code == 0
    assert yaml.safe_load(output) == RECIPES["demo"]().replace(epochs=3).fields()


def test_a_difference_has_both_values_of_no_other_fields(answer: Run, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: demo\nepochs: 3\nlr: 0.5\nlr_decay: linear\n")
    code, output, errors = answer("recipes", "diff", tmp_path / "a.yaml", "demo")
    assert (code, errors) == (0, "")
    rows = [line.split() for line in output.splitlines()]
    demo = RECIPES["demo"]()
    assert rows[-4:] == [
        ["learning", "rate"],
        ["epochs", "3", f"{demo.epochs}"],
        ["lr", "0.5", f"{demo.lr}"],
        ["lr_decay", "linear", "cosine"],
    ]


def test_a_difference_can_name_every_field(answer: Run, tmp_path: Path) -> None:
    published = answer("recipes", "diff", "resnet50-mxnet-90ep", "resnet50-tensorflow-250ep")[1]
    a = RECIPES["resnet50-mxnet-90ep"]().fields()
    b = RECIPES["resnet50-tensorflow-250ep"]().fields()
    assert re.findall(r"^   (\w+)", published, flags=re.MULTILINE) == [n for n in a if a[n] != b[n]]


def test_a_custom_model_is_its_fields(answer: Run, tiny_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(tiny_recipe.format_yaml())
    shown = yaml.safe_load(answer("recipes", "show", tmp_path / "tiny.yaml")[1])
    assert not isinstance(tiny_recipe.model, str)
    assert shown["model"] == {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(tiny_recipe.model).items()
    }


def test_every_field_is_described_with_its_default(answer: Run) -> None:
    code, output, errors = answer("recipes", "fields")
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    for kind, settings in enumerate((Recipe(), Execution())):
        for name, value in settings.fields().items():
            place = next(place for place, line in enumerate(lines) if line.startswith(f"  {name}="))
            assert parse_settings([lines[place].strip()])[kind] == {name: value}, (
                "it can be given to --set"
            )
            assert lines[place + 1].startswith("      "), f"{name} is not described"
            assert lines[place + 1].strip()
    assert any(line.startswith('      - "lamb" (arXiv:1904.00962') for line in lines)
    assert max(map(len, lines)) <= 120


def test_fields_are_described_by_name_subject_and_augmentation(answer: Run) -> None:
    everything = answer("recipes", "fields")[1]
    for name, first, fields in (
        ("lr", "Recipe: learning rate", ["lr"]),
        ("compile", "Execution: how a recipe is run", ["compile"]),
        ("solarise", "Augmentation solarise: ", ["probability", "threshold"]),
        ("blur", "Model: ", ["blur"]),
    ):
        code, output, _ = answer("recipes", "fields", name)
        assert code == 0
        heading, described = output.split("\n", 1)
        assert heading.startswith(first)
        assert f"\n{heading}\n" in f"\n{everything}"
        assert described in everything
        assert re.findall(r"^  (\w+)[=:]", output, flags=re.MULTILINE) == fields
    code, _, errors = answer("recipes", "fields", "momentun")
    assert (code, errors) == (
        2,
        "lockstep: there is no field 'momentun'. Did you mean momentum?\n",
    )
