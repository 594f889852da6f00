import json
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.weights import checkpoint
from tests.lines import check_lines

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def images(textures: Path) -> list[Path]:
    return sorted((textures / "val").rglob("*.jpg"))[:2]


def test_a_table_shows_likely_classes(answer: Run, run_folder: Path, images: list[Path]) -> None:
    code, output, errors = answer("predict", run_folder, *images, "--top", 3)
    lines = output.splitlines()
    assert (code, errors) == (0, "")
    assert [lines[0], lines[4]] == [str(image) for image in images]
    for prediction, rows in zip(
        list(lockstep.load(run_folder).predict(images, top=3)),
        (lines[1:4], lines[5:8]),
        strict=True,
    ):
        expected = [
            (f"{100 * p:.2f}", "%", name)
            for p, name in zip(prediction.probabilities, prediction.classes, strict=True)
        ]
        assert [tuple(row.split()) for row in rows] == expected


def test_json_holds_the_same(answer: Run, run_folder: Path, images: list[Path]) -> None:
    code, output, errors = answer("predict", run_folder, *images, "--json", "--checkpoint", "best")
    assert (code, errors) == (0, "")
    for row, prediction in zip(
        json.loads(output), list(lockstep.load(run_folder).predict(images)), strict=True
    ):
        assert row["path"] == str(prediction.path)
        assert row["classes"] == list(prediction.classes)
        assert row["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-6)


def test_how_images_are_prepared_is_set(answer: Run, run_folder: Path, images: list[Path]) -> None:
    changes = ("--set", "eval_resize=80", "--set", "eval_crop=40")
    code, output, _ = answer("predict", run_folder, images[0], "--json", *changes)
    sizes = {"eval_resize": 80, "eval_crop": 40}
    (expected,) = list(lockstep.load(run_folder, preprocessing=sizes).predict(images[:1]))
    (row,) = json.loads(output)
    assert code == 0
    assert row["probabilities"] == pytest.approx(expected.probabilities, abs=1e-6)


def test_five_classes_are_the_default(answer: Run, run_folder: Path, images: list[Path]) -> None:
    assert answer("predict", run_folder, images[0])[1].count("%") == 5


@pytest.fixture
def of_imagenet(tiny_recipe: Recipe, tmp_path: Path) -> Callable[..., Path]:
    """A function that saves weights that prefer output 281, with these names of classes."""

    def save(classes: list[str], **changes: object) -> Path:
        recipe = tiny_recipe.replace(**changes)
        tensors = initial_tensors(recipe)
        tensors["fc.bias"][281 % recipe.logits] = 100
        about = {"recipe": recipe.fields(), "classes": classes}
        checkpoint.write_weights(tmp_path / "weights.safetensors", tensors, about)
        return tmp_path / "weights.safetensors"

    return save


def test_the_names_of_imagenet_are_shown_with_a_note_if_1000_outputs_have_none(
    answer: Run, of_imagenet: Callable[..., Path], images: list[Path]
) -> None:
    source = of_imagenet([], logits=1000)
    code, output, errors = answer("predict", source, images[0], "--top", 1)
    assert (code, output.splitlines()[1].split()) == (0, ["100.00", "%", "tabby"])
    check_lines(errors, "^note: .* 1000 outputs.*ImageNet's names.*--classes FILE$")


def test_a_synset_id_is_shown_with_its_word_and_stays_as_it_is_in_json(
    answer: Run, of_imagenet: Callable[..., Path], images: list[Path]
) -> None:
    source = of_imagenet(["goldfish", "n02123045", "n99999999"], logits=3, seed=0)
    _, output, errors = answer("predict", source, images[0], "--top", 3)
    result = {line.partition("%  ")[2] for line in output.splitlines()[1:]}
    assert result == {"goldfish", "tabby (n02123045)", "n99999999"}
    assert errors == ""
    [row] = json.loads(answer("predict", source, images[0], "--top", 3, "--json")[1])
    assert set(row["classes"]) == {"goldfish", "n02123045", "n99999999"}


def test_names_come_from_a_file(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    names = tmp_path / "names.txt"
    names.write_text("".join(f"class {i}\n" for i in range(10)))
    [row] = json.loads(
        answer("predict", run_folder, images[0], "--classes", names, "--top", 10, "--json")[1]
    )
    [own] = json.loads(answer("predict", run_folder, images[0], "--top", 10, "--json")[1])
    places = sorted(own["classes"])
    assert row["classes"] == [f"class {places.index(name)}" for name in own["classes"]]


def test_a_file_with_too_few_names_is_refused_with_both_numbers(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog\n")
    code, output, errors = answer("predict", run_folder, images[0], "--classes", names)
    assert (code, output) == (2, "")
    check_lines(errors, f"^lockstep: {names} has 2 names, .* expected 10 names, class 0 first$")


def test_a_missing_average_is_told(answer: Run, run_folder: Path, images: list[Path]) -> None:
    code, _, errors = answer("predict", run_folder, images[0], "--ema")
    assert code == 2
    assert "has no moving average; the recipe's ema_decay is 0" in errors


@pytest.mark.usefixtures("without_bf16")
def test_weights_of_bf16_are_used_in_fp32_where_it_is_emulated_and_this_is_noted(
    answer: Run, run_folder: Path, run_in_bf16: Path, images: list[Path]
) -> None:
    in_fp32 = answer("predict", run_folder, *images, "--json")[1]
    code, output, errors = answer("predict", run_in_bf16, *images, "--json")
    assert (code, output) == (0, in_fp32)
    check_lines(errors, "^note: computing in fp32, because bf16 is emulated.*--set precision=bf16$")


@pytest.mark.usefixtures("without_bf16")
def test_emulation_on_demand_is_noted(answer: Run, run_folder: Path, images: list[Path]) -> None:
    code, output, errors = answer(
        "predict", run_folder, *images, "--json", "--set", "precision=bf16"
    )
    assert code == 0
    check_lines(errors, "^note: bf16 is emulated.*--set precision=fp32 ")
    assert json.loads(output) != json.loads(answer("predict", run_folder, *images, "--json")[1])


def test_real_bf16_needs_no_note(answer: Run, run_in_bf16: Path, images: list[Path]) -> None:
    assert answer("predict", run_in_bf16, *images)[2] == ""
