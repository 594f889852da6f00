"""The folder `proof` of an export, and `lockstep check`, which reads it."""

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import lockstep
from lockstep.recipes import Recipe
from lockstep.weights import open_weights
from lockstep.weights.upload import list_files
from tests.cli.conftest import Answer
from tests.edges import softmax
from tests.inference.cases import CLASSES, compute_expected, save_random, save_tensors

Run = Callable[..., Answer]


@pytest.fixture(scope="module")
def weights(tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"eval_crop": 40, "eval_resize": 48, "exif_orientation": True}
    return save_random(tiny_recipe.replace(**changes), tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def exported(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with its proof. Tests must only read it."""
    folder = tmp_path_factory.mktemp("export") / "model"
    lockstep.load(weights).export(folder, to="onnx")
    return folder


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "model")
    return tmp_path / "model"


def read_proof(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "proof/proof.json").read_bytes())
    return record


def unpack(entry: dict[str, Any], dtype: str) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(entry[dtype]), np.dtype(dtype).newbyteorder("<"))
    return values.reshape(entry["shape"]).astype(np.float64)


def decode(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def test_photos_are_of_the_kinds_that_decoders_treat_differently(exported: Path) -> None:
    photos = {}
    for path in (exported / "proof/photos").iterdir():
        photos[path.name] = Image.open(path)
    assert 8 <= len(photos) <= 16
    assert {photo.mode for photo in photos.values()} == {"RGB", "L", "CMYK", "P", "RGBA"}
    assert {photo.format for photo in photos.values()} == {"JPEG", "PNG"}
    assert {photo.getexif().get(274) for photo in photos.values()} >= {None, 3, 6}
    sizes = [photo.size for photo in photos.values()]
    assert min(map(max, sizes)) == 20
    assert max(map(max, sizes)) == 1600
    assert min(width / height for width, height in sizes) < 0.5
    assert max(width / height for width, height in sizes) > 3
    for photo in photos.values():  # a mirrored or turned photo is another one
        pixels = np.asarray(photo.convert("RGB"), np.float64)
        assert np.abs(pixels - pixels[::-1]).mean() > 5
        assert np.abs(pixels - pixels[:, ::-1]).mean() > 5


def test_a_proof_says_what_the_reference_computes_of_pillows_pixels(
    exported: Path, weights: Path
) -> None:
    proof = read_proof(exported)
    expected = unpack(proof["expected"], "float32")
    recipe = proof["input"]
    assert (recipe["takes"], recipe["side"], recipe["resize"], recipe["exif"]) == (
        *("photos", 40, 48),
        True,
    )
    for probe, logits in zip(proof["probes"], expected, strict=True):
        path = exported / "proof" / probe["file"]
        pixels = decode(path)
        assert probe["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert probe["decoded"]["size"] == list(pixels.shape[:2])
        assert probe["decoded"]["means"] == pytest.approx(pixels.mean((0, 1)), abs=0.5)
        [shares] = compute_expected(weights, pixels[None])
        assert softmax(logits[None])[0] == pytest.approx(shares, rel=1e-3)
    assert proof["model"]["classes"] == list(CLASSES)
    digests = {}
    for name in ("model.onnx", "export.json", "classes.txt"):
        digests[name] = hashlib.sha256((exported / name).read_bytes()).hexdigest()
    assert proof["model"]["files"] == digests


def test_an_export_is_checked(answer: Run, exported: Path) -> None:
    code, output, errors = answer("check", exported)
    assert (code, errors) == (0, "")
    assert output.startswith("13 of 13 probes: preprocessing within 0")
    assert output.endswith("classes equal\n")


def test_a_changed_file_is_named_before_it_is_opened(answer: Run, copy: Path) -> None:
    (copy / "model.onnx").write_bytes(b"not a model")
    (copy / "classes.txt").unlink()
    code, output, _ = answer("check", copy)
    assert code == 1
    assert "model.onnx has changed since the export" in output
    assert "classes.txt cannot be read" in output
    assert "The model was not run" in output


def test_a_model_that_sees_other_colours_is_named(
    answer: Run, copy: Path, weights: Path, tmp_path: Path
) -> None:
    """The model is swapped for one that expects BGR, and the digests with it."""
    opened = open_weights(weights)
    tensors = dict(opened.tensors)
    tensors["conv1.weight"] = np.ascontiguousarray(tensors["conv1.weight"][:, ::-1])
    swapped = save_tensors(tmp_path / "swapped", opened.recipe, tensors)
    lockstep.load(swapped).export(tmp_path / "other", to="onnx", compare=False)
    shutil.copy(tmp_path / "other/model.onnx", copy / "model.onnx")
    proof = read_proof(copy)
    content = (copy / "model.onnx").read_bytes()
    proof["model"]["files"]["model.onnx"] = hashlib.sha256(content).hexdigest()
    (copy / "proof/proof.json").write_text(json.dumps(proof))
    code, output, _ = answer("check", copy)
    assert code == 1
    assert "colours swapped" in output


def test_a_damaged_proof_is_refused(answer: Run, copy: Path) -> None:
    proof = read_proof(copy)
    proof["probes"][0]["file"] = "../../../etc/passwd"
    (copy / "proof/proof.json").write_text(json.dumps(proof))
    code, output, errors = answer("check", copy)
    assert (code, output) == (2, "")
    assert "is not what lockstep export writes" in errors


def test_links_and_programs_in_a_proof_are_left_alone(answer: Run, copy: Path) -> None:
    (copy / "proof/check.py").write_text("raise SystemExit(99)")
    assert answer("check", copy)[0] == 0
    photo = copy / "proof/photos/plain.jpg"
    photo.rename(copy / "plain.jpg")
    photo.symlink_to(copy / "plain.jpg")
    code, _, errors = answer("check", copy)
    assert (code, "is a link" in errors) == (2, True)
    (copy / "proof").rename(copy.parent / "elsewhere")
    (copy / "proof").symlink_to(copy.parent / "elsewhere")
    assert answer("check", copy)[0] == 2


def test_a_folder_without_a_proof_is_refused(answer: Run, weights: Path) -> None:
    code, _, errors = answer("check", weights)
    assert code == 2
    assert "has no proof of a model; expected a folder with proof/proof.json" in errors


@pytest.mark.parametrize("options", [{"bare": True}, {"compare": False}])
def test_bare_forms_and_those_that_are_not_compared_have_no_proof(
    options: dict[str, Any], weights: Path, tmp_path: Path
) -> None:
    result = lockstep.load(weights).export(tmp_path / "model", to="onnx", **options)
    assert (result["proof"], (tmp_path / "model/proof").exists()) == (None, False)


def test_a_proof_is_pushed_with_its_photos_and_no_others(copy: Path) -> None:
    (copy / "README.md").unlink(missing_ok=True)
    names = list_files(copy)
    assert {f"proof/{probe['file']}" for probe in read_proof(copy)["probes"]} < names.keys()
    shutil.copy(copy / "proof/photos/plain.jpg", copy / "cat.jpg")
    with pytest.raises(lockstep.LockstepError, match=r"cat\.jpg"):
        list_files(copy)


def test_a_repository_of_triton_has_no_other_folder_than_its_model(
    answer: Run, weights: Path, tmp_path: Path
) -> None:
    result = lockstep.load(weights).export(tmp_path / "models", to="triton")
    folders = [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()]
    assert len(folders) == 1
    assert result["proof"] == str(tmp_path / "models" / folders[0] / "proof")
    assert answer("check", tmp_path / "models")[0] == 0
