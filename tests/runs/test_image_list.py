"""A run resumes with the bytes of the images that it had, and says which ones differ."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.data.index import open_index, subset
from lockstep.data.split import Sets, open_sets
from lockstep.inference.label_errors import check_labels
from lockstep.recipes import Execution, Recipe
from lockstep.runs.image_results import IMAGES_FILE, compare_images, list_images, read_sample
from lockstep.system.errors import CheckpointError, DataError
from tests.data.cases import image_folder, jpeg
from tests.runs.cases import read_losses

HALF = Execution(stop_after_steps=3, log_every_steps=1)
WHOLE = Execution(log_every_steps=1)


def damage(path: Path) -> None:
    """Change 40 bytes within the pixels of a JPEG; its length and time stay."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def data(textures: Path, tmp_path: Path) -> Path:
    shutil.copytree(textures, tmp_path / "data", ignore=shutil.ignore_patterns(".lockstep"))
    return tmp_path / "data"


def test_changed_bytes_stop_a_resume(data: Path, tmp_path: Path, tiny_recipe: Recipe) -> None:
    run = tmp_path / "run"
    lockstep.train(tiny_recipe, data, run, execution=HALF)
    image = sorted((data / "train").glob("*/*.jpg"))[0]
    sound = image.read_bytes()
    time = image.stat().st_mtime_ns
    damage(image)
    place = str(image.relative_to(data / "train"))
    with pytest.raises(DataError, match=rf"{place} is not the image that was indexed: its bytes"):
        lockstep.train(tiny_recipe, data, run, execution=WHOLE)
    assert len(read_losses(run)) == 3
    open_index(data / "train", anew=True)
    with pytest.raises(CheckpointError, match=rf"train: 1 image changed \({place}\)"):
        lockstep.train(tiny_recipe, data, run, execution=WHOLE)
    image.write_bytes(sound)
    assert image.stat().st_mtime_ns != time
    open_index(data / "train", anew=True)
    lockstep.train(tiny_recipe, data, run, execution=HALF)
    assert len(read_losses(run)) == 6


def open_both(root: Path) -> Sets:
    return open_sets(root, 0.0, lambda activity: lambda done, total: None)


def test_images_of_the_weights_count_through_all_generations(
    data: Path, tmp_path: Path, tiny_recipe: Recipe
) -> None:
    """Weights know the images of all runs before theirs, whatever these are called."""
    recipe = tiny_recipe.replace(epochs=1, validation_share=0.4)
    seen: set[bytes] = set()
    run = None
    notes: list[str] = []
    for number, chosen in enumerate(("[02].jpg", "[13].jpg", ".jpg")):
        for path in sorted((data / "train").glob(f"*/*{chosen}")):
            copy = tmp_path / f"part{number}" / path.parent.name / f"{number}{path.name}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        weights = run
        run = tmp_path / f"run{number}"
        part = tmp_path / f"part{number}"
        add = lambda event: notes.append(str(event.get("notes")))  # noqa: E731
        lockstep.train(
            recipe,
            part,
            run,
            weights=weights,
            execution=Execution(stop_after_steps=1),
            listener=add,
        )
        sets = open_sets(part, 0.4, lambda activity: lambda done, total: None)
        shown = [sets.validation.read(i) for i in range(len(sets.validation))]
        known = sum(image in seen for image in shown)
        seen |= {sets.training.read(i) for i in range(len(sets.training))}
    assert run is not None
    assert 0 < known < len(shown)
    assert f"were trained on {known} of {len(shown)} validation images" in "".join(notes)
    result = lockstep.load(run).evaluate()
    assert result.trained_images == known
    page = lockstep.report(run, tmp_path / "page.html").read_text()
    assert f"trained on {known} of its validation images" in page
    check = check_labels(part, [run])
    assert (check.judged, check.trained) == (len(shown) - known, known)


def test_images_that_a_run_was_trained_on_are_counted_whatever_they_are_called(
    data: Path, tmp_path: Path, tiny_recipe: Recipe
) -> None:
    photos = (data / "train").rename(tmp_path / "photos")
    recipe = tiny_recipe.replace(epochs=1, validation_share=0.3)
    lockstep.train(recipe, photos, tmp_path / "run", execution=Execution(stop_after_steps=1))
    training = open_sets(photos, 0.3, lambda activity: lambda done, total: None).training
    trained = {training.read(i) for i in range(len(training))}
    assert lockstep.load(tmp_path / "run").evaluate().trained_images == 0
    for path in sorted(photos.glob("*/*.jpg")):
        path.rename(path.with_name(f"new_{path.name}"))
    moved = sorted(photos.glob("dots/*.jpg"))[0]
    moved.rename(photos / "stripes" / "moved.jpg")
    sets = open_sets(photos, 0.3, lambda activity: lambda done, total: None)
    unseen = [sets.validation.read(i) not in trained for i in range(len(sets.validation))]
    known = unseen.count(False)
    assert 0 < known < len(unseen)
    result = lockstep.load(tmp_path / "run").evaluate(photos)
    assert result.to_json()["trained_images"] == known
    assert result.remarks[0].startswith(
        "the run, or the weights that it started from, was trained on"
        f" {known} of these {len(unseen)} im"
    )
    assert lockstep.load(tmp_path / "run").evaluate(photos, split=0).trained_images == len(trained)
    for number in range(4):
        shutil.copy(sets.training.path(0), photos / "stripes" / f"copy{number}.jpg")
    notes: list[str] = []
    lockstep.train(
        recipe,
        photos,
        tmp_path / "next",
        weights=tmp_path / "run",
        execution=Execution(stop_after_steps=1),
        listener=lambda event: notes.append(str(event.get("notes"))),
    )
    later = open_sets(photos, 0.3, lambda activity: lambda done, total: None)
    seen = {later.training.read(i) for i in range(len(later.training))}
    shown = [later.validation.read(i) for i in range(len(later.validation))]
    copies = sum(image in seen for image in shown)
    known = sum(image in trained for image in shown)
    text = "\n".join(notes)
    assert 0 < copies < known < len(shown)
    assert f"'{copies} of {len(shown)} validation images are copies of training im" in text
    assert f"were trained on {known} of {len(shown)} validation images" in text


def images(root: Path) -> Path:
    for split in ("train", "val"):
        names = [f"{split}/{label}/{i}.jpg" for label in ("cat", "owl") for i in range(3)]
        image_folder(root, {name: jpeg(8 + i, 9) for i, name in enumerate(names)})
    return root


def remove(root: Path) -> None:
    (root / "train/cat/1.jpg").unlink()


def add(root: Path) -> None:
    image_folder(root, {"train/owl/new.jpg": jpeg()})


def rewrite(root: Path) -> None:
    image_folder(root, {"train/owl/2.jpg": jpeg(80, 80)})


def move(root: Path) -> None:
    (root / "train/cat/1.jpg").rename(root / "train/owl/9.jpg")


def add_class(root: Path) -> None:
    image_folder(root, {f"{split}/ape/0.jpg": jpeg() for split in ("train", "val")})


def remove_class(root: Path) -> None:
    for split in ("train", "val"):
        shutil.rmtree(root / split / "cat")


def rename_class(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "cat").rename(root / split / "lynx")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (remove, "train: 1 image missing (cat/1.jpg)"),
        (add, "train: 1 image new (owl/new.jpg)"),
        (rewrite, "train: 1 image changed (owl/2.jpg)"),
        (
            move,
            "1 image with a different name or label (cat/1.jpg, now owl/9.jpg)",
        ),
        (remove_class, "1 class missing (cat)"),
        (add_class, "1 class new (ape)"),
        (
            rename_class,
            "class cat was renamed lynx",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_differs_from_the_images_of_a_run_is_named(
    change: Callable[[Path], None], expected: str, tmp_path: Path
) -> None:
    root = images(tmp_path / "data")
    out = tmp_path / "run"
    out.mkdir()
    before = open_both(root)
    list_images(out, before, is_new=True)
    assert compare_images(out, before) == ""
    change(root)
    for split in ("train", "val"):
        open_index(root / split, anew=True)
    assert compare_images(out, open_both(root)) == expected


def test_images_that_are_not_listed_yet_are_listed(tmp_path: Path) -> None:
    """Runs of older versions have no list, those that only train no validation images in it."""
    root = images(tmp_path / "data")
    out = tmp_path / "run"
    out.mkdir()
    sets = open_both(root)
    assert compare_images(out, sets) == ""
    nothing = sets._replace(validation=open_both(root).validation)
    nothing = nothing._replace(validation=subset(sets.validation, np.arange(0)))
    list_images(out, nothing, is_new=False)
    with np.load(out / IMAGES_FILE) as listed:
        assert {name.partition(".")[0] for name in listed.files} == {"train"}
    list_images(out, sets, is_new=False)
    with np.load(out / IMAGES_FILE) as listed:
        assert listed["val.checksums"].tolist() == sets.validation.checksums.tolist()
        assert listed["train.classes"].tolist() == ["cat", "owl"]
    with (out / IMAGES_FILE).open("wb") as file:
        strange = {"labels": np.zeros((2, 2)), "checksums": np.ones(3), "classes": np.array(7)}
        np.savez(file, **{f"train.{name}": values for name, values in strange.items()})
    assert compare_images(out, sets) == ""
    (out / IMAGES_FILE).write_bytes(b"PK")  # a damaged list is no reason to refuse
    list_images(out, sets, is_new=False)
    assert compare_images(out, sets) == ""


def test_a_sample_meets_every_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{label}/{i:03d}.jpg" for label in ("a", "b") for i in range(100)]
    index = open_index(image_folder(tmp_path / "data", dict.fromkeys(names, jpeg(8, 8))))
    seen: list[int] = []
    monkeypatch.setattr(type(index), "read", lambda self, sample: seen.append(sample))
    read_sample(index, 0)
    assert len(set(seen)) == len(seen) == 64
    assert max(np.diff(sorted(seen))) <= 4
    for turn in range(1, 4):
        read_sample(index, turn)
    assert set(seen) == set(range(200))
