"""`python -m benchmarks.loaders`."""

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.loaders.__main__ import main
from benchmarks.loaders.contenders import CONTENDERS
from lockstep.system.errors import DataError
from tests.soak import in_a_soak

QUICK = ("--seconds", "0.2", "--turns", "1", "--batch", "8", "--size", "32")


def measure(images: Path, *contenders: str) -> None:
    main(["--data", str(images), "--loaders", ",".join(contenders), *QUICK])


@in_a_soak  # each contender is a process of seconds
def test_every_contender_is_measured(textures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(textures, *CONTENDERS)
    content = json.loads(capsys.readouterr().out)
    assert list(content["results"]) == list(CONTENDERS)
    for name, result in content["results"].items():
        assert result.get("images_per_sec", 0) > 1, f"{name}: {result}"
        assert 0 < result["cpu_ms"] < 1000, name
        assert len(result["turns"]) == 1


def test_contenders_are_shown(textures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(textures, "host", "libjpeg-whole")
    results = json.loads(capsys.readouterr().out)["results"]
    assert list(results) == ["host", "libjpeg-whole"]
    assert all(result["images_per_sec"] > 1 for result in results.values())


def test_an_unknown_contender_is_refused(textures: Path) -> None:
    with pytest.raises(DataError, match=r"no loader 'tfdata' to measure. Did you mean tf-data"):
        measure(textures, "tfdata")


def test_images_that_not_every_loader_decodes_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "class"
    folder.mkdir(parents=True)
    for number in range(8):
        Image.new("RGB", (40, 40)).save(folder / f"picture{number}.png")
    with pytest.raises(DataError, match=r"picture0.png is not a JPEG"):
        measure(tmp_path / "data", "host")
