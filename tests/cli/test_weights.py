"""`lockstep weights`, and commands that take weights by name."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.weights import hub, known_preprocessing
from lockstep.weights.known_weights import read_known_weights
from tests.weights.file_server import serve
from tests.weights.small_models import plain_state, recipe_of, use_narrow_models, zip_file

NAME = "torchvision/resnet50.IMAGENET1K_V2"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_known_weights_are_listed(answer: Callable[..., tuple[int, str, str]]) -> None:
    code, output, _ = answer("weights")
    row = next(line.split() for line in output.splitlines() if line.startswith(NAME))
    assert (code, row) == (0, [NAME, "resnet50", "80.86", "232", "224", "BSD-3-Clause"])
    rows = json.loads(answer("weights", "--json")[1])
    assert {row["name"] for row in rows} == set(read_known_weights())
    assert all(row["cached"] is None for row in rows)


def test_a_command_downloads_weights_by_their_name(
    answer: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_narrow_models(monkeypatch)
    zip_file(tmp_path / "a.pth", plain_state(recipe_of()))
    content = (tmp_path / "a.pth").read_bytes()
    with serve(content, f"a-{hashlib.sha256(content).hexdigest()[:8]}.pth") as server:
        row = replace(read_known_weights()[NAME], address=server.address)
        for module in (known_preprocessing, hub):
            monkeypatch.setattr(module, "read_known_weights", lambda: {NAME: row})
        target = tmp_path / "b.safetensors"
        code, _, errors = answer("convert", NAME, target, "--no-certificate")
    assert code == 0
    assert f"downloading {NAME}, {len(content) / 1e6:.1f} MB" in errors
    assert target.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--data", "DATA", "--out", "RUN", "--weights", "NAME"),
        ("evaluate", "NAME", "--data", "DATA"),
        ("predict", "NAME", "a.jpg"),
        ("export", "NAME", "FOLDER"),
        ("serve", "NAME"),
        ("convert", "NAME", "b.pth"),
        ("sparsify", "NAME", "b.safetensors"),
    ],
)
def test_every_command_with_weights_knows_their_names(
    arguments: tuple[str, ...], answer: Callable[..., tuple[int, str, str]], textures: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("a.jpg").touch()
    words = {"NAME": "timm/resnet5.a1_in1k", "DATA": str(textures)}
    code, _, errors = answer(*(words.get(word, word) for word in arguments))
    assert code == 2
    assert "lockstep weights" in errors


def test_missing_data_is_said_before_weights_are_downloaded(
    answer: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    command = ("train", "--data", tmp_path / "photos", "--out", tmp_path / "run")
    code, _, errors = answer(*command, "--weights", "https://127.0.0.1:1/a.pth")
    assert code == 2
    assert "photos" in errors
    assert "127.0.0.1" not in errors
