"""A run with the augmentation of docs/how-to/augmentation.md, and what happens without its
module."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import lockstep
from lockstep.data.contact_sheet import contact_sheet
from lockstep.data.index import open_index
from lockstep.recipes import Execution, Recipe, load_recipe
from lockstep.runs.environment import read_environment
from lockstep.system.errors import RecipeError
from lockstep.weights.checkpoint import newest_intact
from tests.runs.cases import read_entries, read_losses

PAGE = Path(__file__).parents[2] / "docs/how-to/augmentation.md"
HALF = Execution(train_only=True, stop_after_steps=3, loggers=())


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's module, fog.py, in the working directory."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert sum(map(bool, code.splitlines())) <= 20
    (tmp_path / "fog.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "fog", raising=False)
    return tmp_path / "fog.py"


def test_a_run_with_an_augmentation_of_ones_own_resumes_bit_for_bit(
    module: Path, tiny_recipe: Recipe, textures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe.replace(epochs=1, augmentations=["fog:Fog"])
    whole = HALF.replace(stop_after_steps=0)
    lockstep.train(recipe, textures, "whole", execution=whole)
    lockstep.train(recipe, textures, "halves", execution=HALF)
    module.write_text(module.read_text(encoding="utf-8") + "# more\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "fog")
    lockstep.train(recipe, textures, "halves", execution=whole)

    states = [newest_intact(Path(run, "checkpoints"))[0] for run in ("whole", "halves")]
    assert states[0] is not None
    assert states[1] is not None
    assert states[0].step == states[1].step == 7
    for name, tensor in states[0].tensors.items():
        assert tensor.tobytes() == states[1].tensors[name].tobytes()
    lockstep.train(recipe.replace(augmentations=()), textures, "plain", execution=HALF)
    assert read_losses(Path("plain"))[0] != read_losses(Path("whole"))[0]

    stored = yaml.safe_load(Path("halves/recipe.yaml").read_text(encoding="utf-8"))
    assert stored["augmentations"] == [{"name": "fog:Fog", "density": 0.5}]
    assert read_environment(Path("whole"))["plug_ins"]["fog:Fog"]["file"] == str(module)
    notes = [str(entry["notes"]) for entry in read_entries(Path("halves"), "start")]
    assert [f"{module} has changed" in note for note in notes] == [False, True]


def test_only_use_needs_the_module(module: Path, tiny_recipe: Recipe, textures: Path) -> None:
    fog = tiny_recipe.replace(augmentations=[{"name": "fog:Fog", "density": 1.0}])
    Path("recipe.yaml").write_text(fog.format_yaml(), encoding="utf-8")
    assert load_recipe("recipe.yaml") == fog
    assert "fog" not in sys.modules
    index = open_index(textures / "train")
    assert contact_sheet(index, fog, 8) != contact_sheet(index, tiny_recipe, 8)
    assert "fog" in sys.modules
    assert load_recipe("recipe.yaml").load_plug_ins() == fog
    with pytest.raises(RecipeError, match=r"fog:Fog: there is no field 'dens'\. .* density"):
        Recipe(augmentations={"name": "fog:Fog", "dens": 1}).load_plug_ins()
    with pytest.raises(RecipeError, match=r"fog.py has no class 'Fig' .* Did you mean Fog\?"):
        Recipe(augmentations="fog:Fig").load_plug_ins()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, r"there is no module 'fog'; expected fog.py in .*, or in a folder of PYTHONPATH"),
        ("import no_such_library", "cannot import fog: ModuleNotFoundError: No module named"),
        ("1 / 0", "cannot import fog: ZeroDivisionError"),
        ("raise SystemExit(0)", "cannot import fog: SystemExit: 0"),
        ("Fog = 3", r"fog.py has no class 'Fog' that derives from lockstep\.Augmentation\.$"),
        (
            "import lockstep\nclass Fog(lockstep.Augmentation): pass",
            "fog:Fog: .*abstract.*; the class must define numbers, draw and apply",
        ),
    ],
    ids=["missing", "lacks a library", "fails", "ends", "holds no class", "lacks methods"],
)
def test_a_module_that_cannot_be_used_is_refused_before_a_run_begins(
    code: str | None, message: str, module: Path, tiny_recipe: Recipe, textures: Path
) -> None:
    module.unlink()
    if code is not None:
        module.write_text(code, encoding="utf-8")
    recipe = tiny_recipe.replace(augmentations=["fog:Fog"])
    with pytest.raises(RecipeError, match=message):
        lockstep.train(recipe, textures, "run")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".astype(np.uint8)", "", r"fog:Fog returned float32 \(32, 32, 3\); expected uint8"),
        ("return (pixels", "return (1 / 0", r"failed in apply: ZeroDivision.*fog\.py, line \d+\)$"),
        ("return (pixels", "raise SystemExit(1) or (pixels", "failed in apply: SystemExit"),
        ("numbers[0]", "numbers[1]", r"fog:Fog failed in draw: IndexError: .*fog\.py, line \d+\)$"),
        ("return 1", "return 1.5", "numbers of fog:Fog is 1.5; expected a whole number, 0 or more"),
    ],
)
def test_an_augmentation_that_fails_is_named(
    old: str, new: str, message: str, module: Path, tiny_recipe: Recipe, textures: Path
) -> None:
    text = module.read_text(encoding="utf-8")
    assert old in text
    module.write_text(text.replace(old, new), encoding="utf-8")
    recipe = tiny_recipe.replace(augmentations=["fog:Fog"])
    with pytest.raises(RecipeError, match=message):
        contact_sheet(open_index(textures / "train"), recipe, 8)
