"""Pointers of Git LFS and web pages in place of weights are named as what they are, in every
format."""

import shutil
from pathlib import Path

import onnx as onnx_package
import pytest

import lockstep
from lockstep.models.state import State
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.inspection import inspect
from tests.weights.formats.cases import state_of
from tests.weights.small_models import (
    Writer,
    hub,
    mxnet,
    nvidia_pytorch,
    onnx,
    paddle,
    plain_state,
    recipe_of,
    tensorflow,
    timm,
    use_narrow_models,
)

POINTER = (
    f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '5'}\nsize 102469840\n".encode()
)
PAGES = {
    "doctype": b"\n\n<!DOCTYPE html>\n<html lang='en'><head></head></html>",
    "html": b"<HTML><HEAD><TITLE>302 Moved</TITLE></HEAD></HTML>",
    "after a byte order mark": b"\xef\xbb\xbf<!doctype html>",
    "XML": b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>',
}
NAMES = (
    *("a.pth.tar", "a.bin", "a.safetensors", "a.h5", "a.keras", "a.onnx", "a.params", "a.pdparams"),
    *("a.index", "a"),
)


@pytest.mark.parametrize("name", NAMES)
def test_pointers_and_web_pages_are_recognised(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=rf"/{name} is a Git LFS pointer.*git lfs pull"):
        open_weights(tmp_path / name)
    (tmp_path / name).write_bytes(PAGES["doctype"])
    with pytest.raises(CheckpointError, match=rf"/{name} is a web page \(HTML\), not weights"):
        open_weights(tmp_path / name)


@pytest.mark.parametrize("page", PAGES)
def test_pages_begin_in_several_ways(page: str, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(PAGES[page])
    kind = r"\(XML\), not weights" if page == "XML" else "is a web page"
    with pytest.raises(CheckpointError, match=rf"a\.pth .*{kind}"):
        inspect(tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("ending", "form", "kind"),
    [
        *((".tar", "tar", "tar"), (".tar.gz", "gztar", "gzip"), (".tar.bz2", "bztar", "bzip2")),
        (".tar.xz", "xztar", "xz"),
    ],
)
def test_a_packed_file_is_to_be_unpacked(ending: str, form: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(bytes(9))
    shutil.make_archive(str(tmp_path / "a"), form, tmp_path)
    file = (tmp_path / f"a{ending}").rename(tmp_path / "a.pth.tar")
    with pytest.raises(CheckpointError, match=rf"a\.pth\.tar .* \({kind}\).* unpack it"):
        open_weights(file)


PLACES: list[tuple[Writer, str, str, str]] = [
    # how it is written, the name of that, the path to open, the file that a clone left as a pointer
    (timm, "folder", "folder", "folder/model.safetensors"),
    (timm, "folder", "folder", "folder/config.json"),
    (hub, "folder", "folder/pytorch_model.bin", "folder/pytorch_model.bin"),
    (nvidia_pytorch, "checkpoint.pth.tar", "", "checkpoint.pth.tar"),
    (onnx, "model.onnx", "", "model.onnx"),
    (tensorflow, "model.ckpt-7", "model.ckpt-7", "model.ckpt-7.index"),
    (tensorflow, "model.ckpt-7", "", "model.ckpt-7.data-00000-of-00001"),
    (paddle, "model", "model", "model.pdparams"),
    (mxnet, "model", "model", "model-0000.params"),
    (mxnet, "model", "", "model-symbol.json"),
]


@pytest.mark.parametrize(
    ("write", "name", "opened", "pointer"), PLACES, ids=[place[3] for place in PLACES]
)
def test_a_pointer_among_the_files_of_a_checkpoint_is_named(
    write: Writer,
    name: str,
    opened: str,
    pointer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_narrow_models(monkeypatch)
    write(tmp_path / name, plain_state(recipe_of()))
    assert (tmp_path / pointer).is_file()
    (tmp_path / pointer).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=f"{pointer} is a Git LFS pointer"):
        open_weights(tmp_path / opened)


@pytest.mark.parametrize("name", ["model.safetensors", "momentum.safetensors", "state.json"])
def test_a_pointer_in_a_run_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_narrow_models(monkeypatch)
    state = State(0, plain_state(recipe_of()).tensors, state_of(recipe_of()).momentum)
    about = {"recipe": recipe_of().fields(), "classes": []}
    folder = checkpoint.save(tmp_path / "run" / "checkpoints", state, data_digest="", about=about)
    (folder / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=f"{name} is a Git LFS pointer"):
        lockstep.load(tmp_path / "run").save(tmp_path / "w.safetensors")


def test_external_data_may_be_a_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_narrow_models(monkeypatch)
    onnx(tmp_path / "a.onnx", plain_state(recipe_of()))
    model = onnx_package.load(tmp_path / "a.onnx")
    onnx_package.save(
        model, tmp_path / "b.onnx", save_as_external_data=True, location="b.data", size_threshold=0
    )
    assert open_weights(tmp_path / "b.onnx").origin == "ONNX"
    (tmp_path / "b.data").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"b\.data is a Git LFS pointer"):
        open_weights(tmp_path / "b.onnx")


@pytest.mark.parametrize("text", [b"version 2\n", b"<svg></svg>", b"see <html>", b"<header>"])
def test_other_texts_are_not_taken_for_pointers_and_pages(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(CheckpointError, match="holds no weights that can be read"):
        open_weights(tmp_path / "a")
