"""The page as text: its content, and that no text of a user becomes a tag."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import lockstep
from lockstep.models.accuracy_interval import format_accuracy
from lockstep.recipes import Recipe, load_recipe
from lockstep.reporting.page import MISSING
from lockstep.runs.image_results import Results, write_results
from lockstep.runs.reading import read_run
from lockstep.system.errors import CheckpointError, UserError
from tests.reporting.cases import STEPS, random_scores, write_run
from tests.reporting.conftest import NASTY


class Page(HTMLParser):
    """Texts and attributes of a page, by tag."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.get_starttag_text() != "":
            self.scripts[-1] += data
        self.text += data

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.scripts[0]))

    def ids(self) -> set[str | None]:
        return {attributes.get("id") for _, attributes in self.tags}


def write_page(folders: Path | list[Path], out: Path) -> Page:
    return Page(lockstep.report(folders, out))


def test_a_page_has_all_of_a_run(run: Path, tmp_path: Path) -> None:
    page = write_page(run, tmp_path / "page.html")
    assert {
        "summary",
        "curves",
        "classes",
        "confusion",
        "calibration",
        "mistakes",
        "speed",
        "recipe",
        "environment",
    } <= page.ids()
    assert "95 % Wilson interval" in page.text
    assert "nearest recipe: demo" in page.text
    result = [chart["name"] for chart in page.data["charts"]]
    assert result == ["loss", "accuracy", "lr", "throughput", "wait"]
    assert len([tag for tag, attributes in page.tags if "data-image" in attributes]) == 48


def test_a_page_names_no_other_file_and_no_address(run: Path, tmp_path: Path) -> None:
    page = write_page(run, tmp_path / "page.html")
    named = [
        attributes.get(name)
        for _, attributes in page.tags
        for name in ("src", "href", "action", "srcset")
    ]
    assert {value for value in named if value and not value.startswith("#")} == {"data:,"}
    assert "@import" not in page.text
    assert "url(" not in page.text.replace("`url(#${clip})`", "")


@pytest.mark.parametrize(("classes", "shown"), [("abcde", False), ("abcdef", True)])
def test_top_5_of_five_classes_or_fewer_is_left_out(
    classes: str, shown: bool, recipe: Recipe, tmp_path: Path
) -> None:
    folders = [
        write_run(tmp_path / name, recipe=recipe, classes=list(classes)) for name in ("a", "b")
    ]
    for shown_folders in (folders[:1], folders):
        page = write_page(shown_folders, tmp_path / "page.html")
        # One is in the table of classes, and the script hides it.
        assert page.text.count("Top-5") - 1 == shown
        assert {view["top5"] for view in page.data["views"]} == {shown}


def test_rare_classes_alone_are_marked_as_rough(recipe: Recipe, tmp_path: Path) -> None:
    for images, is_rough in ((60, False), (30, True)):
        run = write_run(tmp_path / str(images), recipe=recipe, classes=["a", "b"], images=images)
        page = write_page(run, tmp_path / "page.html")
        assert ("* fewer than 20 images" in page.text) == is_rough


def test_several_runs_are_overlaid_and_compared(four: list[Path], tmp_path: Path) -> None:
    page = write_page(four, tmp_path / "page.html")
    assert {curve["run"] for curve in page.data["charts"][0]["curves"]} == {0, 1, 2, 3}
    assert {"results", "agreement"} <= page.ids()
    assert "the recipes differ in seed" in page.text


def test_runs_on_other_images_are_marked_and_get_the_commands_that_compare_them(
    four: list[Path], recipe: Recipe, data: Path, tmp_path: Path
) -> None:
    about: Any = {"classes": list(read_run(four[0], "").classes), "images": 60, "digest": "x"}
    other = write_run(tmp_path / "a run", recipe=recipe, **about)
    page = write_page([*four[:2], other], tmp_path / "page.html")
    text = " ".join(page.text.split())
    assert "different images (torch, tensorflow: 400 images; a run: 60 images)" in text
    for run in (str(four[0]), f"'{other}'"):
        assert f"lockstep evaluate {run} --data {data}" in text
    assert "Images" in text
    assert "agreement" in page.ids()
    page = write_page([four[0], other], tmp_path / "page.html")
    assert "agreement" not in page.ids()
    assert "other-images" not in write_page(four[:2], tmp_path / "page.html").ids()


@pytest.mark.parametrize("share", [0.2, 0.0])
def test_runs_of_data_that_grew_are_compared_on_the_images_of_both(
    share: float, recipe: Recipe, tmp_path: Path
) -> None:
    """The grown set has the old images in another order, more of them, and one class more."""
    old = [(0, 10 + n) for n in range(6)] + [(1, 30 + n) for n in range(6)]
    grown = [(0, 90), *old[:6], (1, 91), (1, 92), (1, 93), *old[:5:-1], (2, 94), (2, 95)]
    lines = []
    for name, classes, images in (("first", "ab", old), ("second", "abc", grown)):
        run = tmp_path / name
        about: Any = {"classes": list(classes), "images": len(images), "digest": name}
        own = recipe.replace(validation_share=share, logits=len(classes))
        write_run(run, recipe=own, data=tmp_path / f"{name} data", **about)
        columns = np.array(images)
        scores = random_scores(len(classes), len(images), 1)
        scores = replace(scores, labels=columns[:, 0].astype(np.int32))
        write_results(run, Results(STEPS, name, {"trained": scores}, tuple(classes)))
        kept: Any = {"val.classes": np.array(list(classes)), "val.labels": columns[:, 0]}
        kept |= {"val.lengths": columns[:, 1] * 7, "val.checksums": columns[:, 1] * 9}
        np.savez(run / "images.npz", **kept)
        places = [images.index(image) for image in old]
        hits = int((scores.ranks[places] == 0).sum())
        lines.append(f"{name} {format_accuracy(100 * hits / 12, 12)}")
    page = write_page([tmp_path / "first", tmp_path / "second"], tmp_path / "page.html")
    text = " ".join(page.text.split())
    assert f"Top-1 on the 12 images that all were evaluated on: {', '.join(lines)}." in text
    assert "second knows classes that not all runs know: c." in text
    assert f"lockstep evaluate {tmp_path}/first --data DATA" in text
    (tmp_path / "first/images.npz").write_bytes(b"damaged")
    page = write_page([tmp_path / "first", tmp_path / "second"], tmp_path / "page.html")
    assert "that all were evaluated on" not in page.text
    assert "second knows classes that not all runs know: c." in " ".join(page.text.split())


def test_a_run_stands_beside_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(
        tmp_path / "run", recipe=load_recipe("resnet50-paddle-90ep"), classes=list("abcdefghij")
    )
    (folder / "recipe.yaml").write_text(
        "based_on: resnet50-paddle-90ep\n" + (folder / "recipe.yaml").read_text()
    )
    about = json.loads((folder / "environment.json").read_text()) | {
        "device": "NVIDIA A100-SXM4-80GB",
        "ranks": 8,
    }
    (folder / "environment.json").write_text(json.dumps(about))
    page = write_page(folder, tmp_path / "page.html")
    assert "Not compared with the accuracies published for resnet50-paddle-90ep" in page.text
    assert "published-speeds" in page.ids()
    assert "published-accuracies" not in page.ids()
    monkeypatch.setattr("lockstep.recipes.published_accuracies.CLASSES", 10)
    monkeypatch.setattr("lockstep.recipes.published_accuracies.IMAGES", 400)
    page = write_page([folder], tmp_path / "page.html")
    assert "published-accuracies" in page.ids()
    assert "PaddlePaddle, 8 x A100 80GB, 90 epochs, mixed precision" in page.text
    assert "The recipe differs from resnet50-paddle-90ep in logits, epochs." in page.text


def test_a_run_that_is_not_finished_has_a_page(recipe: Recipe, tmp_path: Path) -> None:
    part = write_run(tmp_path / "part", recipe=recipe, classes=["a", "b"], steps=35)
    page = write_page(part, tmp_path / "page.html")
    assert "not finished: at step 35 of 120" in page.text
    assert "curves" in page.ids()
    assert "confusion" not in page.ids()
    scores = {"trained": random_scores(2, 400, 1)}
    write_results(part, Results(30, "of no images", scores, ("a", "b")))
    assert "confusion" in write_page(part, tmp_path / "page.html").ids()


def test_a_run_that_never_began_has_a_page(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe.format_yaml())
    page = write_page(tmp_path, tmp_path / "page.html")
    assert "recipe" in page.ids()
    assert "the run never started" in page.text


def test_a_run_of_an_older_lockstep_has_a_page_with_a_note(recipe: Recipe, tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", recipe=recipe, classes=["a", "b"], keeps_results=False)
    assert "no results of single images" in write_page(old, tmp_path / "page.html").text


@pytest.mark.parametrize("log", [None, ""])
def test_a_run_without_a_log_has_dashes_for_speed_beside_one_that_has(
    run: Path, recipe: Recipe, tmp_path: Path, log: str | None
) -> None:
    lost = write_run(tmp_path / "lost", recipe=recipe, classes=["a", "b"])
    (lost / "log.jsonl").unlink()
    if log is not None:
        (lost / "log.jsonl").write_text(log)
    html = lockstep.report([lost, run], tmp_path / "page.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr><th scope.*?</tr>", html[html.index('id="results"') :], re.DOTALL)
    # The first row has the headers.
    cells = [re.findall(r">([^<>]*)</td>", row)[-2:] for row in rows[1:3]]
    assert cells[0] == [MISSING, MISSING]
    assert MISSING not in cells[1]


def test_names_are_texts_and_never_tags(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / NASTY.replace("/", "\N{DIVISION SLASH}")
    write_run(
        folder,
        recipe=recipe,
        classes=["<img src=x onerror=alert(1)>", NASTY, "a & b"],
        data=Path(NASTY),
    )
    page = write_page(folder, tmp_path / "page.html")
    assert [tag for tag, _ in page.tags].count("script") == 2
    result = [row[0] for row in page.data["views"][0]["classes"]]
    assert result == ["<img src=x onerror=alert(1)>", NASTY, "a & b"]
    assert all(attributes.get("src") is None for tag, attributes in page.tags if tag == "img")
    assert folder.name in page.text


def test_numbers_that_are_none_are_no_invalid_json(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"], steps=20)
    log = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(log.replace('"losses": [', '"losses": [NaN, ', 1))
    result = write_page(folder, tmp_path / "page.html").data["charts"][0]["curves"][0]["values"][0]
    assert result is None


@pytest.mark.parametrize("word", ["null", "NaN"])
def test_infinite_losses_are_said_in_words(word: str, recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"], steps=30)
    *lines, last = (folder / "log.jsonl").read_text().splitlines()
    assert '"kind": "evaluate"' in last
    lines[2] = re.sub(r'"losses": \[[^,]*, [^,]*', f'"losses": [{word}, {word}', lines[2])
    last = re.sub(r'"loss": [^,]*', f'"loss": {word}', last)
    (folder / "log.jsonl").write_text("\n".join([*lines, last, ""]))
    page = write_page(folder, tmp_path / "page.html")
    assert (
        "The loss is not finite in training at 2 steps, the first of them 6 and in the evaluation"
        " at step 30 (trained)" in page.text
    )
    assert '<p class="figure">not finite</p>' in (tmp_path / "page.html").read_text(
        encoding="utf-8"
    )


def test_one_of_a_thing_is_no_plural(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe.replace(epochs=7), classes=["a", "b"])
    text = (folder / "recipe.yaml").read_text()
    assert "· 4 epochs ·" in re.sub(r"\s+", " ", write_page(folder, tmp_path / "page.html").text)
    (folder / "recipe.yaml").write_text(text.replace("epochs: 4\n", "epochs: 1\n"))
    assert "· 1 epoch ·" in re.sub(r"\s+", " ", write_page(folder, tmp_path / "page.html").text)


def test_the_command_is_shown_as_it_is_typed_and_in_full(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe=recipe, classes=["a", "b"])
    about = json.loads((folder / "environment.json").read_text())
    command = [
        "lockstep",
        "train",
        *(part for i in range(9) for part in ("--set", f"mean=[{i}, 1, 2]")),
    ]
    (folder / "environment.json").write_text(json.dumps(about | {"command": command}))
    text = write_page(folder, tmp_path / "page.html").text
    assert "lockstep train --set 'mean=[0, 1, 2]' --set" in text
    assert "--set 'mean=[8, 1, 2]'" in text


def test_names_that_are_not_utf_8_are_written_all_the_same(recipe: Recipe, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run\udcff", recipe=recipe, classes=["a", "b"])
    result = write_page(folder, tmp_path / "page.html").data["runs"][0]["name"]
    assert result == "run\N{REPLACEMENT CHARACTER}"


def test_nothing_to_report_and_nowhere_to_write_are_errors(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one run"):
        lockstep.report([])
    with pytest.raises(UserError, match=r"cannot write .*No such file.* choose another -o"):
        lockstep.report(run, tmp_path / "no" / "page.html")
    with pytest.raises(CheckpointError, match="is not a run's folder"):
        lockstep.report(tmp_path / "nothing", tmp_path / "page.html")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("demo", "based on demo"),
        ("<b>pets", "<b>pets · nearest recipe: demo"),
        ("", " nearest recipe: demo"),
    ],
)
def test_a_page_names_the_recipe_of_a_run(name: str, shown: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "named")
    note = yaml.safe_dump({"based_on": name}) if name else ""
    (tmp_path / "named" / "recipe.yaml").write_text(note + (run / "recipe.yaml").read_text())
    page = write_page(tmp_path / "named", tmp_path / "page.html")
    assert shown in page.text
    assert '<th scope="col">Published</th>' not in (tmp_path / "page.html").read_text()
