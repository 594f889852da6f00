"""Preprocessing that a file of weights does not say: it is set, stored in what is written, and used
from there."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.inference.onnx_model import build_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import RecipeError
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.formats import keras_file
from lockstep.weights.preprocessing import FIELDS, read_evaluation
from tests.lines import check_lines
from tests.soak import in_a_soak
from tests.weights.small_models import (
    keras_recipe,
    plain_state,
    positive_tensors,
    recipe_of,
    timm,
    zip_file,
)

SMALL = {"image_size": 48, "mean": (1.0, 2.0, 3.0)}
"""What is set. Resize and crop follow: 48 * 256 / 224 is 55 when rounded."""


pytestmark = pytest.mark.usefixtures("narrow", "one_process")


def save_checkpoint(folder: Path, recipe: Recipe) -> Path:
    state = State(7, positive_tensors(recipe), {})
    about = {"recipe": recipe.fields(), "classes": []}
    return checkpoint.save(folder / "source", state, data_digest="", about=about)


def nameless(folder: Path) -> Path:
    """Return a file that does not say its preprocessing."""
    zip_file(folder / "a.pth", plain_state(recipe_of()))
    return folder / "a.pth"


def open_evaluation(path: Path, **options: Any) -> dict[str, Any]:
    return read_evaluation(open_weights(path, **options).recipe)


def test_what_is_set_replaces_what_is_assumed_and_fields_follow_it(tmp_path: Path) -> None:
    path = nameless(tmp_path)
    weights = open_weights(path, preprocessing=SMALL)
    before = open_evaluation(path)
    expected = before | {
        "image_size": 48,
        "mean": [1.0, 2.0, 3.0],
        "eval_resize": 55,
        "eval_crop": 48,
    }
    assert read_evaluation(weights.recipe) == expected
    check_lines(
        weights.remarks,
        "torchvision-v1 is assumed: bilinear, ",
        r"mean \[1\.0, 2\.0, 3\.0\], not \[123\.675, 116\.28, 103\.53\];"
        " eval_resize 55, not 256; eval_crop 48, not 224; image_size 48, not 224$",
    )


def test_a_recipes_whole_evaluation_can_be_set(tmp_path: Path) -> None:
    recipe = Recipe(
        image_size=64, antialias=True, interpolation="bicubic", eval_sampling="asymmetric", lr=3.0
    )
    weights = open_weights(nameless(tmp_path), preprocessing=recipe)
    assert read_evaluation(weights.recipe) == read_evaluation(recipe)
    assert weights.recipe.lr == Recipe().lr
    assert not any("is assumed" in remark for remark in weights.remarks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.1, "epochs": 3}, "^lr, epochs cannot be set for trained weights"),
        (
            {"eval_corp": 48},
            "eval_corp cannot be set for trained weights; .* Did you mean eval_crop",
        ),
        ({"eval_crop": 500}, r"eval_crop \(500\) must fit into eval_resize \(256\)"),
        ({"mean": "grey"}, "mean: "),
    ],
)
def test_other_values_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        open_weights(nameless(tmp_path), preprocessing=changes)


TARGETS = {
    **{"safetensors": "b.safetensors", "timm": "b", "torchvision": "b.pth"},
    **{"nvidia-pytorch": "b.pth.tar", "nvidia-tensorflow": "out/b", "nvidia-paddle": "out/b"},
    **{"nvidia-mxnet": "out/b", "keras": "b.weights.h5"},
}


def list_places(path: Path, **options: Any) -> dict[str, set[str]]:
    """Return the fields of the preprocessing by where their values come from."""
    places: dict[str, set[str]] = {}
    for name, place in open_weights(path, **options).preprocessing_from.items():
        places.setdefault(place, set()).add(name)
    assert sum(map(len, places.values())) == len(FIELDS)
    return places


def test_each_value_has_the_place_that_it_comes_from(tmp_path: Path) -> None:
    path = nameless(tmp_path)
    everything = set(FIELDS)
    sized = {"mean", "eval_resize", "eval_crop"}
    assert list_places(path) == {"assumed": everything}
    assert list_places(path, preprocessing=SMALL) == {"user": sized, "assumed": everything - sized}
    lockstep.load(path, preprocessing=SMALL).save(tmp_path / "b.safetensors")
    lockstep.load(tmp_path / "b.safetensors").save(tmp_path / "b.pth", to="torchvision")
    lockstep.load(tmp_path / "b.pth").save(tmp_path / "b", to="timm")
    rest = everything - sized
    assert list_places(tmp_path / "b.safetensors") == {"file": sized, "assumed": rest}
    assert list_places(tmp_path / "b.pth") == {"certificate": sized, "assumed": rest}
    assert list_places(tmp_path / "b") == {"file": sized, "assumed": rest}
    about = list_places(tmp_path / "b.pth", preprocessing={"std": [1, 2, 3]})
    assert about == {"user": {"std"}, "certificate": sized, "assumed": rest - {"std"}}


def test_only_what_a_graph_does_not_say_is_assumed(tmp_path: Path) -> None:
    model = build_model(recipe_of().replace(**SMALL), plain_state(recipe_of()).tensors, ())
    del model.metadata_props[:]
    path = tmp_path / "a.onnx"
    path.write_bytes(model.SerializeToString())
    weights = open_weights(path)
    stated = {"mean", "std", "eval_crop"}
    places = {"file": stated, "assumed": set(FIELDS) - stated}
    assert list_places(path) == places
    recipe = weights.recipe
    assert (recipe.mean, recipe.eval_resize, recipe.eval_crop) == (SMALL["mean"], 55, 48)
    check_lines(weights.remarks, r"torchvision-v1 is assumed: shorter side 55, bilinear$")


def test_timms_defaults_are_assumed(tmp_path: Path) -> None:
    timm(tmp_path / "a", plain_state(recipe_of()))
    assert list_places(tmp_path / "a") == {"file": set(FIELDS)}
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    del config["pretrained_cfg"]["interpolation"]
    config["pretrained_cfg"]["std"] = None
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    missing = {"interpolation", "std"}
    assert list_places(tmp_path / "a") == {"file": set(FIELDS) - missing, "assumed": missing}


def test_colours_that_keras_layers_do_not_say_are_those_of_its_networks(tmp_path: Path) -> None:
    keras_file.write_keras(tmp_path / "a.weights.h5", keras_recipe(), plain_state(keras_recipe()))
    assert list_places(tmp_path / "a.weights.h5") == {"assumed": set(FIELDS)}
    weights = open_weights(tmp_path / "a.weights.h5")
    assert (weights.recipe.mean, weights.recipe.std) == (keras_file.MEAN, keras_file.STD)
    sizes = "keras is assumed: shorter side 256, crop 224, bilinear"
    assert f"{sizes}, preprocess_input's mean and standard deviation" in " ".join(weights.remarks)
    weights = open_weights(tmp_path / "a.weights.h5", preprocessing={"mean": [0, 0, 0]})
    assert f"{sizes}, preprocess_input's standard deviation" in " ".join(weights.remarks)


@pytest.mark.parametrize("to", TARGETS)
def test_what_is_set_is_stored_by_every_format_or_its_certificate(to: str, tmp_path: Path) -> None:
    recipe = keras_recipe() if to == "keras" else recipe_of()
    recipe = recipe.replace(
        padding="same" if to == "nvidia-tensorflow" else "symmetric", antialias=True
    )
    source = save_checkpoint(tmp_path, recipe)
    target = tmp_path / TARGETS[to]
    changes = SMALL if to != "keras" else {"image_size": 48, "mean": keras_file.MEAN}
    lockstep.load(source, preprocessing=changes).save(target, to=to)
    written = target.with_name("b-0000.params") if to == "nvidia-mxnet" else target
    stored = open_evaluation(written)
    assert stored == open_evaluation(source, preprocessing=changes)
    assert (stored["eval_resize"], stored["eval_crop"]) == (55, 48)
    if to == "nvidia-pytorch":
        assert open_evaluation(tmp_path / "b.weights.pth.tar") == stored


def test_the_certificate_of_another_file_of_the_same_name_is_not_used(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path, recipe_of())
    path = tmp_path / "b.pth"
    result = lockstep.load(source, preprocessing=SMALL).save(path, to="torchvision")
    ending = "Lockstep reads it from the certificate"
    assert any(remark.endswith(ending) for remark in result["remarks"])
    [note] = [remark for remark in open_weights(path).remarks if "certificate" in remark]
    assert re.search(r"^b\.pth\.certificate\.json .* side 55, crop 48, bilinear$", note)
    path.rename(tmp_path / "other.pth")
    assert "certificate" not in " ".join(open_weights(tmp_path / "other.pth").remarks)
    zip_file(path, plain_state(recipe_of()))
    weights = open_weights(path)
    assert (
        "b.pth.certificate.json belongs to other files with these names, so" in weights.remarks[0]
    )
    assert weights.recipe.eval_crop == 224
    assert "torchvision-v1 is assumed" in weights.remarks[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.pop("preprocessing"),
        lambda about: about["preprocessing"].update(eval_crop=-1),
        lambda about: about["preprocessing"].update(lr=1),
        lambda about: about.update(target_sha256=[]),
        lambda about: about["preprocessing"].pop("eval_crop"),
    ],
)
def test_a_certificate_that_does_not_say_it_changes_nothing(change: Any, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path, recipe_of())
    path = tmp_path / "b.pth"
    lockstep.load(source, preprocessing=SMALL).save(path, to="torchvision")
    file = tmp_path / "b.pth.certificate.json"
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))
    assert open_weights(path).recipe.eval_crop == 224
    file.write_text("[" * 100_000)
    assert open_weights(path).recipe.eval_crop == 224
    file.unlink()
    file.mkdir()
    assert open_weights(path).recipe.eval_crop == 224


def test_only_what_evaluation_uses_is_needed_by_others(tmp_path: Path) -> None:
    like_torchvision = recipe_of().replace(antialias=True)
    trained_otherwise = save_checkpoint(
        tmp_path, like_torchvision.replace(antialias=False, eval_antialias=True)
    )
    how: dict[str, Any] = {"to": "torchvision", "certificate": False}
    remarks = lockstep.load(trained_otherwise).save(tmp_path / "b.pth", **how)["remarks"]
    assert not any("does not say how images are prepared" in remark for remark in remarks)
    model = lockstep.load(trained_otherwise, preprocessing={"eval_antialias": False})
    remarks = model.save(tmp_path / "c.pth", **how)["remarks"]
    expected = (
        "torchvision does not say how images are prepared; these weights need eval_antialias False,"
        " not True; evaluate them with --set FIELD=VALUE"
    )
    assert expected in remarks


def test_weights_predict_and_evaluate_as_set(textures: Path, tmp_path: Path) -> None:
    recipe = recipe_of().replace(image_size=32, logits=10)
    source = save_checkpoint(tmp_path, recipe)
    path = tmp_path / "b.pth"
    lockstep.load(source).save(path, to="torchvision", certificate=False)
    expected = lockstep.load(source).evaluate(textures).to_json()
    model = lockstep.load(path, preprocessing={"image_size": 32, "antialias": False})
    assert model.evaluate(textures).to_json()["loss"] == expected["loss"]
    assert lockstep.load(path).evaluate(textures).to_json()["loss"] != expected["loss"]
    image = np.asarray(Image.effect_noise((50, 60), 90).convert("RGB"))
    set_by_hand = lockstep.load(path, preprocessing=recipe).predict(image)
    assert set_by_hand == lockstep.load(source).predict(image)


def test_an_export_with_another_preprocessing_is_weights(textures: Path, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path, recipe_of().replace(logits=10, image_size=64))
    lockstep.load(source, preprocessing={"image_size": 32}).export(
        tmp_path / "onnx", to="onnx", compare=False
    )
    assert open_evaluation(tmp_path / "onnx")["eval_crop"] == 32
    model = lockstep.load(tmp_path / "onnx", preprocessing={"image_size": 64})
    result = model.evaluate(textures).to_json()
    expected = lockstep.load(source).evaluate(textures).to_json()["loss"]
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    assert result["runtime"] == "native"


@pytest.mark.parametrize(
    ("to", "bare", "file"),
    [
        ("onnx", False, "model.onnx"),
        ("onnx", True, "model.onnx"),
        pytest.param("savedmodel", False, "", marks=in_a_soak),
        ("frozen-graph", False, "frozen_graph.pb"),
    ],
)
def test_an_exports_assumptions_are_read(to: str, bare: bool, file: str, tmp_path: Path) -> None:
    settings = {"mean": (1.0, 2.0, 3.0)}
    folder = tmp_path / "b"
    lockstep.load(nameless(tmp_path), preprocessing=settings).export(
        folder, to=to, bare=bare, compare=False
    )
    rest = set(FIELDS) - {"mean"}
    assert list_places(folder / file) == {"file": {"mean"}, "assumed": rest}
    about = json.loads((folder / "export.json").read_text())
    assert set(about["preprocessing"].pop("assumed")) == rest
    lockstep.load(folder / file).export(tmp_path / "c", to="onnx", compare=False)
    assert list_places(tmp_path / "c") == {"file": {"mean"}, "assumed": rest}
    own = save_checkpoint(tmp_path, recipe_of())
    lockstep.load(own).export(tmp_path / "d", to=to, bare=bare, compare=False)
    assert list_places(tmp_path / "d" / file) == {"file": set(FIELDS)}


def test_a_folder_of_timm_reports_that_its_weights_were_evaluated_otherwise(tmp_path: Path) -> None:
    note = "timm's resize filters when shrinking; that of the converted weights did not"
    for is_filtered in (False, True):
        folder = tmp_path / str(is_filtered) / "b"
        folder.parent.mkdir()
        settings = {"eval_antialias": is_filtered}
        lockstep.load(nameless(tmp_path), preprocessing=settings).save(folder, to="timm")
        assert (note in open_weights(folder).remarks) == (not is_filtered)
        proof = json.loads((folder / "proof/proof.json").read_bytes())
        assert proof["input"]["antialias"]  # timm's, which is what the folder computes with
