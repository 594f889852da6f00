"""`lockstep benchmark loader`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

Answer = tuple[int, str, str]
QUICK = ("--seconds", 0.2, "--turns", 1, "--batch", 8, "--size", 32)


@pytest.fixture
def images(textures: Path) -> Path:
    return textures / "train"


def test_the_table_holds_others_to_the_first(answer: Callable[..., Answer], images: Path) -> None:
    code, output, _ = answer("benchmark", "loader", images, *QUICK, "--loaders", "dali,host")
    lines = [line.split() for line in output.splitlines()]
    assert code == 0
    assert [line[0] for line in lines] == ["loader", "dali", "host"]
    rates = [float(line[1]) for line in lines[1:]]
    assert float(lines[1][-1]) == 1
    assert float(lines[2][-1]) == pytest.approx(rates[0] / rates[1], rel=0.05, abs=0.006)


def test_a_contender_that_cannot_run_is_named_with_the_reason(
    answer: Callable[..., Answer], images: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "__init__.py").write_text("raise ImportError('no DALI here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, output, _ = answer("benchmark", "loader", images, *QUICK)
    assert code == 0
    assert "dali             cannot run: " in output
    assert "DALI cannot be imported (no DALI here); install it: " in output


def test_images_of_any_format_are_measured(answer: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "images" / "class").mkdir(parents=True)
    for number in range(8):
        Image.new("RGB", (40, 40)).save(tmp_path / "images" / "class" / f"{number}.png")
    source = tmp_path / "images"
    assert answer("data", "pack", source, tmp_path / "packed", "--format", "recordio")[0] == 0
    options = (*QUICK, "--loaders", "host", "--json")
    code, output, _ = answer("benchmark", "loader", tmp_path / "packed", *options)
    content = json.loads(output)
    assert (code, content["images"]) == (0, 8)
    assert content["results"]["host"]["images_per_sec"] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--loaders", "host,dalli"), "there is no loader 'dalli' to measure. Did you mean dali"),
        (("--threads", 0), "threads"),
        (("--threads", 1000), "1000 threads are more than the"),
        (("--batch", 61), "has 60 images, fewer than a batch; use --batch 60"),
    ],
)
def test_wrong_use_is_answered(
    answer: Callable[..., Answer], images: Path, arguments: tuple, message: str
) -> None:
    code, _, errors = answer("benchmark", "loader", images, *QUICK, *arguments)
    assert code == 2
    assert message in errors
