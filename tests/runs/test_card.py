"""The card of a model, as Hugging Face's own library and a renderer of Markdown read it."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import yaml

import lockstep
from lockstep.data.index import open_index
from lockstep.inference import card
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.upload import list_files
from tests.reporting.cases import STEPS, write_run
from tests.weights.small_models import recipe_of, use_narrow_models

NASTY = (
    *("no", "on", "a: b", "'\"", "- x", "a|b", "<script>alert(1)</script>", "`code`", "![i](u)"),
    *("[a](javascript:b)", "*a* _b_ ~~c~~", "line\nbreak\r\n---", "\N{RIGHT-TO-LEFT OVERRIDE}abc"),
    *("Äöü ß", "\N{DOG FACE}", "&lt;b&gt;", "\\", "# title", "$$x$$", "www.example.com", "\\|", ""),
    *("\\(x\\)", "_a_", "a_b", "x __b__ y", "__a_b__", "1_", "3:4", ":3", "snake_case_"),
    *("https://example.com", ":smile:", "@me", "<!-- ", "{{x}}", "\udcff", "a" * 2000, "\x1b[31m"),
)
"""Names that mean something in YAML, Markdown, HTML or a terminal."""

TAGS = {"h1", "h2", "p", "code", "pre", "table", "thead", "tbody", "tr", "th", "td"}


class Page(HTMLParser):
    """The tags of an HTML page, its title and the texts of the cells of its tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags = set[str]()
        self.cells: list[str] = []
        self.title = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data
        elif self.tags == {"h1"}:
            self.title = (self.title + data).rstrip("\n")

    @property
    def rows(self) -> dict[str, str]:
        """The cells in pairs; text after a table follows its last cell."""
        texts = [cell.partition("\n")[0] for cell in self.cells]
        return dict(zip(texts[::2], texts[1::2], strict=True))


def render(text: str) -> Page:
    renderer = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    return Page(renderer.render(text.partition("\n---\n\n")[2]))


def read_head(text: str) -> Any:
    """Return what the hub's own library reads of a card."""
    return pytest.importorskip("huggingface_hub").ModelCard(text).data


def card_of(source: Path, folder: Path, **settings: Any) -> str:
    folder.mkdir()
    assert card.write_card(folder, open_weights(source, **settings), "onnx") == ["README.md"]
    return (folder / "README.md").read_text(encoding="utf-8")


def solve_interval(hits: int, images: int) -> list[float]:
    """Return the shares that are as far from the measured one as 95 % of samples: the roots of
    Wilson's equation."""
    square = NormalDist().inv_cdf(0.975) ** 2 / images
    share = hits / images
    return sorted(np.roots([1 + square, -2 * share - square, share**2]).real.tolist())


def test_figures_are_those_of_the_run(dense: Path, textures: Path, tmp_path: Path) -> None:
    text = card_of(dense, tmp_path / "model", ema=True)
    with np.load(dense / "validation.npz") as results:
        labels = results["labels"]
        right = results["ema.predictions"] == labels
    head = read_head(text)
    (result,) = head.eval_results
    assert result.metric_type == "accuracy"
    assert result.metric_value == right.mean()
    interval = solve_interval(right.sum(), len(right))
    assert result.metric_args["interval_95_percent"] == pytest.approx(interval)
    digest = open_index(textures / "val").digest
    assert result.dataset_args == {"digest": digest, "images": 20}
    assert (head.library_name, head.pipeline_tag) == ("onnx", "image-classification")
    assert head.license is None
    rows = render(text).rows
    for label, name in enumerate(sorted(path.name for path in (textures / "val").iterdir())):
        own = right[labels == label]
        low, high = solve_interval(own.sum(), len(own))
        assert rows[f"{label} {name}"] == (
            f"{100 * own.mean():.2f} % ({100 * low:.1f} to {100 * high:.1f}), {own.sum()} of 2"
        )
    (weights,) = dense.glob("checkpoints/*/ema.safetensors")
    sha = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert rows[f"{weights.parent.name}/ema.safetensors"] == f"SHA-256 {sha}"
    assert rows["digest of the training images"] == open_index(textures / "train").digest
    assert rows["training images"] == "60 (damaged and left out: 0)"
    assert "torch 2." in rows["machine (last process)"]
    assert rows["starting weights"] == "random, seed 0"
    block = re.findall("^    .*\n", text.partition("## Recipe")[2], re.MULTILINE)
    assert yaml.safe_load("".join(block)) == open_weights(dense).recipe.fields()


def test_the_same_run_has_the_same_card_without_its_place(dense: Path, tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        texts.append(card_of(dense, tmp_path / name / "model"))
    assert texts[0] == texts[1]
    for place in (dense.parent, tmp_path, Path.home()):
        assert str(place) not in texts[0]
    assert dense.name not in texts[0]


def test_what_is_not_known_is_named(dense: Path, tiny_recipe: Recipe, tmp_path: Path) -> None:
    lockstep.load(dense).save(tmp_path / "bare.safetensors", certificate=False)
    text = card_of(tmp_path / "bare.safetensors", tmp_path / "model")
    assert text.count("Not known: the weights are not in a run's folder.") == 2
    head = read_head(text)
    assert (head.eval_results, head.license, head.metrics) == (None, None, None)
    assert render(text).rows["starting weights"] == "not known"


def save_checkpoint(run: Path, recipe: Recipe, classes: list[str], digest: str = "a b") -> None:
    state = State(STEPS, initial_tensors(recipe), {})
    about = {"recipe": recipe.fields(), "classes": classes}
    checkpoint.save(run / "checkpoints", state, data_digest=digest, about=about)


def test_no_name_of_a_class_is_markup(tiny_recipe: Recipe, tmp_path: Path) -> None:
    classes = [*NASTY, *(f"class {number}" for number in range(1000 - len(NASTY)))]
    recipe = tiny_recipe.replace(logits=len(classes))
    run = write_run(tmp_path / "run", recipe=recipe, classes=classes, images=3000, digest="b")
    save_checkpoint(run, recipe, classes)
    with np.load(run / "validation.npz") as results:
        labels = results["labels"]
        hits = np.bincount(labels[results["trained.ranks"] == 0], minlength=1000)
    page = render(card_of(run, tmp_path / "a: *b* <i>"))
    ranked = [(hits[label] / 3, label) for label in range(1000)]
    expected = sorted(ranked)[:10] + sorted(ranked)[-10:]
    numbers = [int(name.split()[0]) for name in page.rows if re.match(r"\d+( |$)", name)]
    assert numbers == [label for _, label in expected]


def test_a_name_is_shown_as_it_is(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "_HALF", len(NASTY))
    recipe = tiny_recipe.replace(logits=len(NASTY))
    run = write_run(tmp_path / "run", recipe=recipe, classes=[*NASTY], digest="b")
    save_checkpoint(run, recipe, [*NASTY])
    for number, name in enumerate(("no: 'yes' # *b* <i>", "\N{DOG FACE}", "3.10")):
        (tmp_path / str(number)).mkdir()
        text = card_of(run, tmp_path / str(number) / name)
        assert read_head(text).model_name == name
        page = render(text)
        assert page.title == name
        assert page.tags == TAGS
        assert "\\(" not in text
        assert "$" not in text
    shown = [row for row in page.rows if re.match(r"\d+ |\d+$", row)]
    letters = [re.sub("[\x1b\u202e]", "", name) for name in NASTY]
    plain = [name.encode(errors="backslashreplace").decode() for name in letters]
    lines = [" ".join(f"{number} {name}".split())[:1000] for number, name in enumerate(plain)]
    assert shown == lines


def test_figures_of_something_else_are_left_out(dense: Path, tmp_path: Path) -> None:
    text = card_of(dense, tmp_path / "set", preprocessing={"eval_crop": 40, "eval_resize": 40})
    assert "Not known: the run did not evaluate the model as written here." in text
    weights = open_weights(dense)
    for is_requantised, scales in (False, {"fc": 1.0}), (True, {}):
        quantised = replace(weights, scales=scales)
        card.write_card(tmp_path, quantised, "onnx", is_requantised=is_requantised)
        assert read_head((tmp_path / "README.md").read_text()).eval_results is None
    copy = tmp_path / "copy"
    shutil.copytree(dense, copy)
    with np.load(copy / "validation.npz") as results:
        arrays = dict(results) | {"digest": np.array("of other images")}
    np.savez(copy / "validation.npz", **arrays)
    text = card_of(copy, tmp_path / "other-images")
    assert "Accuracy by class is not known" in text
    identity = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(identity | {"id": "0" * 32}))
    (file,) = copy.glob("checkpoints/*/model.safetensors")
    text = card_of(file.parent, tmp_path / "other-run")
    assert "Not known: the folder of the run is missing or damaged." in text
    assert read_head(text).eval_results is None
    assert f"{file.parent.name}/model\\.safetensors | SHA-256 " in text


def test_a_run_names_the_weights_that_it_started_from(dense: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(dense, run)
    start = {"weights": "step-9|", "weights_sha256": "abc", "is_classifier": True}
    (run / "start.json").write_text(json.dumps(start))
    row = "starting weights"
    page = render(card_of(run, tmp_path / "a"))
    assert page.rows[row] == "step-9|, SHA-256 of its tensors abc"
    (run / "start.json").write_text("{}")
    assert render(card_of(run, tmp_path / "b")).rows[row] == "not known"


@pytest.mark.parametrize("to", ["timm", "transformers"])
def test_a_converted_folder_has_a_card_that_is_pushed(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_narrow_models(monkeypatch)
    run = tmp_path / "run"
    save_checkpoint(run, recipe_of(), [*"abcde"])
    target = tmp_path / "model"
    done = lockstep.load(run).save(target, to=to, certificate=False)
    assert done["written"][-1] == str(target / "README.md")
    assert "README.md" in list_files(target)
    head = read_head((target / "README.md").read_text())
    assert (head.library_name, head.model_name) == (to, None)
    assert head.tags == ["image-classification", "lockstep", "resnet50"]
