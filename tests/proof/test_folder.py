"""What `proof.json` says of mistakes: which ones can be seen, and which ones told apart."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.proof.folder import Subject, write_proof
from lockstep.proof.record import Proof, read_proof, take_log_softmax
from lockstep.recipes import Recipe
from tests.inference.cases import random_tensors

MOVE = np.array([0.5, 0.0])
"""By how much logits of a model differ from those of its weights."""


@pytest.fixture
def subject(tiny_recipe: Recipe) -> Subject:
    return make_subject(tiny_recipe, 2)


def make_subject(recipe: Recipe, logits: int) -> Subject:
    recipe = recipe.replace(logits=logits, eval_crop=64, eval_resize=64)
    tensors = random_tensors(recipe, 1)
    tensors["fc.weight"] = tensors["fc.weight"] * np.float32(0.2)
    classes = tuple(f"class {number}" for number in range(logits))
    return Subject("onnx", "fp32", recipe, tensors, classes, "photos", None, "torch", 1e-4, "why")


def write(subject: Subject, folder: Path) -> Proof:
    folder.mkdir()
    write_proof(folder, subject)
    return read_proof(folder / "proof")


def test_mistakes_without_effect_are_left_out_and_equal_ones_name_each_other(
    subject: Subject, tmp_path: Path
) -> None:
    faults = {fault.name: fault for fault in write(subject, tmp_path / "a").faults}
    assert faults["classes shifted up by one"].twins == ("classes shifted down by one",)  # of two
    assert faults["colours swapped"].twins == ()
    assert "a batch that mixes images: batch norm is in training mode" in faults
    absent = {"no margin", "ImageNet's mean and scale", "classes sorted as text"}
    assert faults.keys().isdisjoint(absent)
    recipe = subject.recipe.replace(mean=(0.0,) * 3, std=(255.0,) * 3, eval_resize=72)
    faults = {
        fault.name: fault for fault in write(replace(subject, recipe=recipe), tmp_path / "b").faults
    }
    assert {"no margin", "ImageNet's mean and scale"} < faults.keys()
    assert "pixels from 0 to 1" not in faults


def test_a_model_that_resembles_its_weights_is_expected_to_answer_as_it_does(
    subject: Subject, tmp_path: Path
) -> None:
    of_weights = write(subject, tmp_path / "a")
    shapes: list[Any] = []

    def run(photos: list[np.ndarray], squares: np.ndarray) -> np.ndarray:
        shapes.extend([photos[2].shape, squares.shape])
        return of_weights.logs + MOVE

    of_model = write(replace(subject, run=run), tmp_path / "b")
    assert shapes == [(460, 200, 3), (13, 64, 64, 3)]
    assert of_model.logits == pytest.approx(of_weights.logs + MOVE, abs=1e-5)
    pairs = {fault.name: [fault] for fault in of_weights.faults}
    for fault in of_model.faults:
        pairs.setdefault(fault.name, []).append(fault)
    before, after = pairs["colours swapped"]
    moved = take_log_softmax(before.logs + MOVE)
    assert after.logs == pytest.approx(moved, abs=1e-2)  # float16


def test_a_proof_of_many_classes_is_below_a_megabyte(tiny_recipe: Recipe, tmp_path: Path) -> None:
    proof = write(make_subject(tiny_recipe, 4000), tmp_path / "a")
    columns = {len(fault.columns) for fault in proof.faults}
    assert (columns, proof.logits.shape) == ({300}, (13, 4000))
    varies = proof.logits.std(axis=0)
    kept = proof.faults[0].columns
    assert varies[kept].min() >= np.delete(varies, kept).max()
    files = [path for path in (tmp_path / "a/proof").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10**6
    assert json.loads((tmp_path / "a/proof/proof.json").read_bytes())["format"] == 1
