"""`lockstep data check` as a user sees it: its output, its exit code, and a quarantine that
training respects."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.data.index import open_index
from lockstep.recipes import Recipe

Answer = tuple[int, str, str]


@pytest.fixture
def data(textures: Path, tmp_path: Path) -> Path:
    """A copy of the textures, without faults."""
    return Path(
        shutil.copytree(textures, tmp_path / "my data", ignore=shutil.ignore_patterns(".lockstep"))
    )


@pytest.fixture
def broken_data(data: Path) -> Path:
    """A data set with a truncated image, a file that is not an image, and a training image that is
    also in val."""
    images = sorted((data / "train" / "dots").iterdir())
    images[0].write_bytes(images[0].read_bytes()[:-200])
    images[1].write_bytes(b"<html>not found</html>")
    shutil.copy(images[2], data / "val" / "dots" / "copy.jpg")
    return data


def names(broken_data: Path) -> list[str]:
    return [f"dots/{path.name}" for path in sorted((broken_data / "train" / "dots").iterdir())[:3]]


def test_a_sound_data_set_gives_exit_code_0(answer: Callable[..., Answer], data: Path) -> None:
    code, output, errors = answer("data", "check", data)
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == "nothing found"
    assert "train (folder): 60 images of 10 classes" in output
    assert not list(data.rglob("quarantine.json"))
    (data / "train/dots/Thumbs.db").write_text("to be left out")
    code, output, _ = answer("data", "check", data)
    assert (code, output.splitlines()[-1]) == (0, "1 finding")


def test_a_table_names_every_finding(answer: Callable[..., Answer], broken_data: Path) -> None:
    code, output, _ = answer("data", "check", broken_data)
    assert code == 1
    cut, no_image, copied = names(broken_data)
    lines = [line.split() for line in output.splitlines()]
    for kind in ("truncated", "not-an-image", "in-train-and-val"):
        assert ["error", kind, "1"] in [line[:3] for line in lines]
    assert f"train/{cut}: " in output
    assert f"train/{no_image}: " in output
    assert f"train/{copied}: " in output
    assert output.splitlines()[-1] == "3 findings"
    assert not list(broken_data.rglob("quarantine.json"))


def test_json_has_the_same_findings(answer: Callable[..., Answer], broken_data: Path) -> None:
    code, output, _ = answer("data", "check", broken_data, "--json")
    report = json.loads(output)
    assert code == 1
    assert {finding["kind"]: finding["place"] for finding in report["findings"]} == dict(
        zip(("truncated", "not-an-image", "in-train-and-val"), names(broken_data), strict=True)
    )


def test_what_is_in_quarantine_is_left_out_of_training(
    answer: Callable[..., Answer], broken_data: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    code, output, _ = answer("data", "check", broken_data, "--quarantine")
    assert code == 1
    assert f"wrote {broken_data / 'train' / 'quarantine.json'}" in output
    result = {bad.file for bad in open_index(broken_data / "train").quarantined}
    assert result == set(names(broken_data))
    assert answer("data", "check", broken_data)[0] == 0
    (tmp_path / "tiny.yaml").write_text(tiny_recipe.replace(epochs=1).format_yaml())
    code, output, _ = answer(
        "train",
        "--recipe",
        tmp_path / "tiny.yaml",
        "--data",
        broken_data,
        "--out",
        tmp_path / "run",
    )
    assert code == 0
    assert "57 training and 21 validation images" in output
    assert "3 bad images left out" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--labels", "RUN", "--quarantine"), "--quarantine works only without --labels"),
        (("--labels", "RUN", "--smallest", "32"), "--smallest works only without --labels"),
        (("--out", "labels.png"), "--out works only with --labels"),
    ],
)
def test_options_without_a_meaning_are_refused(
    answer: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
) -> None:
    code, _, errors = answer("data", "check", tmp_path, *words)
    assert code == 2
    assert message in " ".join(errors.replace("│", " ").split())


def test_labels_are_compared_with_outputs(answer: Callable[..., Answer], data: Path) -> None:
    assert answer("data", "check", data, "--logits", 10)[0] == 0
    code, output, _ = answer("data", "check", data, "--logits", 9)
    assert code == 1
    assert "too-many-classes" in output
