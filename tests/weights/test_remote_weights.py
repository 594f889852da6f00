"""Weights that are named, and downloaded from a server on this machine."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.models.architectures import MODELS
from lockstep.recipes.published import RECIPES
from lockstep.system.errors import CheckpointError
from lockstep.weights import hub as remote
from lockstep.weights import known_preprocessing, known_weights, open_weights
from lockstep.weights.hub import fetch_weights, is_remote, locate_cached
from lockstep.weights.known_weights import KnownWeights, read_known_weights
from tests.weights.file_server import Server, serve, serve_hub
from tests.weights.small_models import plain_state, recipe_of, use_narrow_models, zip_file

CONTENT = b"weights of a network" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
NAME = "torchvision/resnet18.IMAGENET1K_V1"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of the weights NAME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with serve(CONTENT, f"w-{DIGEST[:8]}.pth") as server:
        row = replace(read_known_weights()[NAME], address=server.address)
        monkeypatch.setattr(remote, "read_known_weights", lambda: {NAME: row})
        yield server


@pytest.mark.parametrize(("name", "row"), read_known_weights().items())
def test_rows_are_whole(name: str, row: KnownWeights) -> None:
    publisher, _, network = name.partition("/")
    assert f"{publisher}/" in known_weights.PUBLISHERS
    assert network.partition(".")[0].replace("_", "-") == row.model.replace("_", "-")
    assert row.model in MODELS
    assert row.address.startswith("https://")
    assert len(bytes.fromhex(row.sha256_start)) == 4
    assert row.eval_crop <= row.eval_resize
    assert row.licence in {"BSD-3-Clause", "Apache-2.0", "CC-BY-NC-4.0"}


def test_no_file_has_two_names() -> None:
    names = [row.file_name for row in read_known_weights().values()]
    assert len(set(names)) == len(names)


def test_timms_sizes_follow_from_its_crop_share() -> None:
    """timm resizes to floor(size / share): 224 / 0.95, 288 / 0.95, 224 / 0.875, 288 / 1."""
    rows = [row for name, row in read_known_weights().items() if name.startswith("timm/")]
    assert {(row.eval_resize, row.eval_crop) for row in rows} == {
        (235, 224),
        (303, 288),
        (256, 224),
        (288, 288),
        (224, 224),
        (320, 320),
    }


def test_torchvisions_preprocessing_is_that_of_its_recipes() -> None:
    """Its models without a recipe here were trained as its ResNet-50 of the same evaluation."""
    for name, row in read_known_weights().items():
        if name.startswith("torchvision/"):
            end = f"torchvision-v{2 if row.eval_resize == 232 else 1}"
            recipe = f"{row.model.replace('_', '-')}-{end}"
            fields = RECIPES.get(recipe, RECIPES[f"resnet50-{end}"])().fields()
            assert row.preprocessing.items() <= fields.items(), name


def test_timms_sizes_in_training_are_those_of_its_recipes() -> None:
    for name, row in read_known_weights().items():
        procedure = name.partition(".")[2].removesuffix("_in1k")
        if procedure in {"a1", "a2", "a3"}:
            assert row.image_size == RECIPES[f"resnet50-rsb-{procedure}"]().image_size, name


def test_known_weights_are_downloaded_once(server: Server) -> None:
    for _ in range(2):
        assert fetch_weights(NAME).read_bytes() == CONTENT
    assert len(server.requests) == 1


def test_a_file_put_into_the_cache_by_hand_is_used_if_it_is_the_right_one(server: Server) -> None:
    path = locate_cached(remote.find_known_weights(NAME))
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch_weights(NAME) == path
    path.write_bytes(CONTENT[1:])
    with pytest.raises(CheckpointError, match=DIGEST[:8]):
        fetch_weights(NAME)
    assert server.requests == []


@pytest.mark.parametrize("fragment", ["", f"#sha256={DIGEST}", f"#sha256={DIGEST[:8].upper()}"])
def test_an_address_is_downloaded(server: Server, fragment: str) -> None:
    path = fetch_weights(server.address + fragment)
    assert path.name == server.address.rpartition("/")[2]
    assert path.read_bytes() == CONTENT


def test_an_address_with_another_digest_is_refused(server: Server) -> None:
    with pytest.raises(CheckpointError, match="begins with 0123abcd"):
        fetch_weights(server.address + "#sha256=0123abcd")


@pytest.mark.parametrize("fragment", ["#", "#main", "#sha256=", "#sha256=0123xyz0", "#sha256=0123"])
def test_an_address_with_a_wrong_digest_is_refused(fragment: str, server: Server) -> None:
    with pytest.raises(CheckpointError, match="#sha256= and the first 8 to 64 hexadecimal digits"):
        fetch_weights(server.address + fragment)
    assert server.requests == []


def test_a_file_takes_precedence_over_known_weights(server: Server, tmp_path: Path) -> None:
    assert is_remote(NAME)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / NAME).write_bytes(CONTENT)
    assert not is_remote(NAME)
    assert is_remote("hf:owner/model")
    assert is_remote("https://example.org/w.pth")
    assert not is_remote("run/checkpoints")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchvision/resnet18.IMAGENET1K_V3", NAME),
        ("timm/vit.a1_in1k", "lockstep weights"),
        ("https://example.org/", "https://HOST/FOLDER/FILE"),
        ("https://example.org/a/..", "https://HOST/FOLDER/FILE"),
        ("https://example.org/..?w.pth", "https://HOST/FOLDER/FILE"),
        ("https://example.org/a/.", "https://HOST/FOLDER/FILE"),
        ("https://example.org/a/", "https://HOST/FOLDER/FILE"),
        (f"https://example.org/{'a' * 250}", "at most 200 characters"),
        ("https://example.org/\u0435.pth", "visible ASCII"),
        ("hf:model", "hf:OWNER/MODEL"),
        ("hf:../../etc", "hf:OWNER/MODEL"),
    ],
)
def test_names_of_nothing_are_refused(server: Server, name: str, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        fetch_weights(name)


PAGE = b"<!doctype html><title>Sign in</title>"


def test_a_download_that_its_reader_refuses_is_removed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_narrow_models(monkeypatch)
    server.content = PAGE
    with pytest.raises(CheckpointError, match="and was removed; the same command downloads it"):
        open_weights(server.address)
    zip_file(tmp_path / "a.pth", plain_state(recipe_of()))
    server.content = (tmp_path / "a.pth").read_bytes()
    assert open_weights(server.address).recipe.model == "resnet50"


def test_a_file_that_the_user_named_or_verified_is_kept(server: Server, tmp_path: Path) -> None:
    server.content = PAGE
    verified = fetch_weights(f"{server.address}#sha256={hashlib.sha256(PAGE).hexdigest()}")
    (tmp_path / "page.pth").write_bytes(PAGE)
    for path in (verified, tmp_path / "page.pth"):
        with pytest.raises(CheckpointError) as refusal:
            open_weights(path)
        assert "removed" not in str(refusal.value)
        assert path.exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchvision/resnet50.IMAGENET1K_V2", (232, 224, "bilinear")),
        ("timm/resnet50.a1_in1k", (288, 288, "bicubic")),
        ("timm/resnetblur50.bt_in1k", (303, 288, "bicubic")),
    ],
)
def test_weights_are_opened_by_name_and_recognised_by_their_sha256(
    name: str, expected: tuple[int, int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_narrow_models(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    zip_file(tmp_path / "a.pth", plain_state(recipe_of()))
    content = (tmp_path / "a.pth").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    with serve(content, f"a-{digest[:8]}.pth") as server:
        row = replace(read_known_weights()[name], address=server.address)
        for module in (known_preprocessing, remote):
            monkeypatch.setattr(module, "read_known_weights", lambda: {name: row})
        for path in (name, tmp_path / "a.pth", f"{server.address}#sha256={digest}"):
            weights = open_weights(path)
            recipe = weights.recipe
            assert (recipe.eval_resize, recipe.eval_crop, recipe.interpolation) == expected
            assert recipe.model == row.model
            assert not any("assumed" in remark for remark in weights.remarks)


HUB = """
import pathlib, sys
from lockstep.system.errors import CheckpointError
from lockstep.weights.hub import fetch_weights
for name in sys.argv[1:]:
    try:
        folder = fetch_weights(name)
        print(sorted(path.name for path in folder.iterdir()))
        for path in folder.iterdir():
            path.resolve().write_bytes(b"damaged")
    except CheckpointError as error:
        print(error)
"""


def test_without_a_hub_there_is_one_message() -> None:
    pytest.importorskip("huggingface_hub")
    done = subprocess.run(
        [sys.executable, "-c", f"import time\ntime.sleep = lambda seconds: None\n{HUB}", "hf:a/b"],
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout == (
        "hf:a/b cannot be downloaded: [Errno 111] Connection refused. To download it"
        " elsewhere: hf download a/b; name the folder of its files\n"
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Start Lockstep with a hub on this machine, which has files of owner/model."""
    pytest.importorskip("huggingface_hub")
    with serve_hub({"config.json": b"{}", "pytorch_model.bin": CONTENT}) as address:
        yield lambda *names: subprocess.run(
            [sys.executable, "-c", HUB, *names],
            env=os.environ
            | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()


def test_a_model_of_the_hub_is_downloaded_and_verified(hub: Callable[..., list[str]]) -> None:
    downloaded, damaged, unknown = hub("hf:owner/model", "hf:owner/model", "hf:owner/other")
    assert downloaded == "['config.json', 'pytorch_model.bin']"
    assert "is damaged" in damaged
    assert unknown == (
        "hf:owner/other cannot be downloaded: there is no such model or revision, or this login may"
        " not see it: log in with hf auth login, or set HF_TOKEN"
    )
