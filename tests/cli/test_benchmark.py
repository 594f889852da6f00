"""`lockstep benchmark loader`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from lockstep.benchmark.loader import CONTENDERS
from tests.soak import in_a_soak

Answer = tuple[int, str, str]
QUICK = ("--seconds", 0.2, "--turns", 1, "--batch", 8, "--size", 32)


@pytest.fixture
def images(textures: Path) -> Path:
    return textures / "train"


@in_a_soak  # each contender is a process of seconds
def test_every_contender_is_measured(answer: Callable[..., Answer], images: Path) -> None:
    contenders = list(CONTENDERS)
    code, output, _ = answer(
        "benchmark", "loader", images, *QUICK, "--loaders", ",".join(contenders), "--json"
    )
    content = json.loads(output)
    assert code == 0
    assert list(content["results"]) == contenders
    for name, result in content["results"].items():
        assert result.get("images_per_sec", 0) > 1, f"{name}: {result}"
        assert 0 < result["cpu_ms"] < 1000, name
        assert len(result["turns"]) == 1


def test_the_table_holds_others_to_the_first(answer: Callable[..., Answer], images: Path) -> None:
    code, output, _ = answer(
        "benchmark", "loader", images, *QUICK, "--loaders", "host,libjpeg-whole"
    )
    lines = [line.split() for line in output.splitlines()]
    assert code == 0
    assert [line[0] for line in lines] == ["loader", "host", "libjpeg-whole"]
    rates = [float(line[1]) for line in lines[1:]]
    assert float(lines[1][-1]) == 1
    assert float(lines[2][-1]) == pytest.approx(rates[0] / rates[1], rel=0.05)


def test_a_contender_that_cannot_run_is_named_with_the_reason(
    answer: Callable[..., Answer], images: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, output, _ = answer("benchmark", "loader", images, *QUICK, "--loaders", "host,tf-data")
    assert code == 0
    assert "tf-data          cannot run: ImportError: no TensorFlow here" in output


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


def test_images_that_not_every_loader_decodes_are_refused(
    answer: Callable[..., Answer], tmp_path: Path, images: Path
) -> None:
    (tmp_path / "data" / "class").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "data" / "class" / "picture.png")
    code, _, errors = answer("benchmark", "loader", tmp_path / "data", *QUICK, "--batch", 1)
    assert code == 2
    assert "picture.png is not a JPEG" in errors
