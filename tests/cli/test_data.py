"""`lockstep data`: pack, index, info, show and sort-val as a user calls them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lockstep import backends
from lockstep.backends import Framework
from lockstep.data.index import open_index
from lockstep.data.loading.host import HostLoader
from lockstep.recipes import Recipe, load_recipe
from lockstep.recipes.order import evaluation_plans, training_plans
from tests.data.cases import image_folder, jpeg
from tests.data.sets import FORMATS, NOT_UTF8, TRAIN, data_set, files_of, pack_as
from tests.lines import read_table
from tests.processes import call

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return data_set(tmp_path / "source")


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Training and validation images, one of them corrupt."""
    files = {
        "train/owl/a.jpg": jpeg(20, 30),
        "train/owl/b.jpg": jpeg(16, 24),
        "train/cat/z.jpg": jpeg(40, 10),
    }
    return image_folder(
        tmp_path / "few", files | {"train/cat/bad.jpg": b"text", "val/owl/v.jpg": jpeg(50, 60)}
    )


@pytest.mark.parametrize("format", FORMATS)
def test_packing_counts_images(format: str, folder: Path, tmp_path: Path, answer: Run) -> None:
    target = tmp_path / "target"
    code, output, errors = answer(
        "data", "pack", folder, target, "--format", format, "--shards", 2, "--workers", 1
    )
    assert (code, errors) == (0, "")
    result = output.splitlines()[-2:]
    assert result == [f"train: {len(TRAIN)} images in {target}", f"val: 3 images in {target}"]
    assert files_of(target) == files_of(pack_as(folder, tmp_path / "expected", format, shards=2))


def test_images_left_out_are_exit_code_1(few: Path, tmp_path: Path, answer: Run) -> None:
    code, output, errors = answer("data", "pack", few, tmp_path / "to", "--format", "recordio")
    assert (code, errors) == (1, "")
    assert "left out: train/cat/bad.jpg: not an image in a known format" in output
    assert output.endswith("left out: 1 image, named above\n")


def test_staging_says_what_it_copied(few: Path, tmp_path: Path, answer: Run) -> None:
    target = tmp_path / "local"
    code, output, errors = answer("data", "stage", few, "--to", target)
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == f"19 files in {target}, 19 of them copied now: 0.00 GB"
    assert (
        answer("data", "stage", few, "--to", target)[1]
        .splitlines()[-1]
        .endswith("0 of them copied now: 0.00 GB")
    )
    assert answer("data", "info", target)[1] == answer("data", "info", few)[1]


def test_packing_can_reduce_images(tmp_path: Path, answer: Run) -> None:
    source = image_folder(tmp_path / "source", {"a/x.jpg": jpeg(200, 300)})
    for quality in (30, 95):
        target = tmp_path / str(quality)
        how = ["--format", "recordio", "--resize", 64, "--quality", quality]
        assert answer("data", "pack", source, target, *how)[0] == 0
        assert open_index(target).sizes.tolist() == [[64, 96]]
    result = (tmp_path / "30" / "images.rec").stat().st_size
    assert result < (tmp_path / "95" / "images.rec").stat().st_size


def test_packing_takes_the_first_label(few: Path, tmp_path: Path, answer: Run) -> None:
    source = pack_as(few, tmp_path / "packed", "recordio")
    (source / "classes.txt").unlink()
    for first, classes in ((0, ["0", "1"]), (1, ["0"])):
        target = tmp_path / f"first {first}"
        command = ["data", "pack", source, target, "--format", "tfrecord", "--first-label", first]
        if first:
            # The cats have label 0, and no cat is left.
            code, _, errors = answer(*command)
            assert code == 2
            assert "its label is 0" in errors
        else:
            assert answer(*command)[0] == 0
            assert (target / "classes.txt").read_text().split() == classes


def test_progress_is_in_lines_but_not_in_json(tmp_path: Path, answer: Run) -> None:
    source = image_folder(tmp_path / "source", {f"a/{i:04d}.jpg": jpeg(8, 8) for i in range(1000)})
    _, output, _ = answer("data", "pack", source, tmp_path / "target", "--format", "tfrecord")
    assert output.splitlines()[-2] == "packing: 1000 of 1000"
    assert 3 < output.count("\npacking: ") < 11
    _, output, _ = answer("data", "info", source, "--json")
    assert json.loads(output)[""]["images"] == 1000


REFUSED = """
pack source target --format zip | zip is not a storage format; choose one of folder, recordio
pack nowhere target --format recordio | there is no folder nowhere
pack source source --format recordio | source holds other files
index nowhere | there is no folder nowhere
check s3://bucket/images | this command does not read object stores
info flat | lockstep data sort-val flat --labels FILE
show source --recipe demo --split vall | no split vall. Did you mean val?
show source --recipe demoo | demo
show source --recipe fine-tune | none are given: add --weights
show source --recipe demo --weights w.pth | leave out --weights or
show source --weights w.pth | there is no run, no file and no checkpoint
sort-val flat --labels none | none cannot be read
"""


@pytest.mark.parametrize(("arguments", "message"), read_table(REFUSED))
def test_what_cannot_be_done_is_said_in_one_line_with_exit_code_2(
    arguments: str,
    message: str,
    folder: Path,
    tmp_path: Path,
    answer: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / "flat", {"a.jpg": jpeg()})
    code, _, errors = answer("data", *arguments.split())
    assert code == 2
    assert errors.startswith("lockstep: ")
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("pack", "a", "b"),
        ("pack", "a", "b", "--format", "folder", "--shards", "-1"),
        ("show", "a", "--epoch", "0"),
        ("sort-val", "a"),
        ("nothing",),
    ],
)
def test_wrong_use_is_exit_code_2(arguments: tuple[str, ...], answer: Run) -> None:
    assert answer("data", *arguments)[0] == 2


def test_indexing_says_what_is_left_out_and_always_begins_anew(few: Path, answer: Run) -> None:
    for _ in range(2):
        code, output, errors = answer("data", "index", few)
        assert (code, errors) == (0, "")
        assert output.splitlines()[-3:] == [
            "train: 3 images of 2 classes, 1 left out",
            "  left out: cat/bad.jpg: not an image in a known format",
            "val: 1 image of 2 classes, 0 left out",
        ]
        time = (few / ".lockstep" / "train" / "index.json").stat().st_mtime_ns
        image_folder(few, {"train/cat/z.jpg": jpeg(41, 10)})
    assert (few / ".lockstep" / "train" / "index.json").stat().st_mtime_ns == time
    assert open_index(few / "train").sizes[0].tolist() == [41, 10]


def test_info_is_a_table_of_counts_classes_sizes_and_labels(few: Path, answer: Run) -> None:
    code, output, errors = answer("data", "info", few)
    lines = [line.split(None, 2) for line in output[output.index("train\n") :].splitlines()]
    assert (code, errors) == (0, "")
    size = sum(
        len(path.read_bytes()) for path in (few / "train").rglob("*.jpg") if path.name != "bad.jpg"
    )
    assert lines[:10] == [
        ["train"],
        ["format", "folder,", "3 files"],
        ["images", "3,", f"{size / 1e6:.1f} MB"],
        ["left", "out", "1"],
        ["classes", "2,", "1 to 2 images each"],
        ["shorter", "side", "10 to 20 px, median 16"],
        ["digest", open_index(few / "train").digest[:16]],
        ["owl", "2", "##"],
        ["cat", "1", "#"],
        ["val"],
    ]


def test_info_lists_ten_classes_and_counts_the_others(tmp_path: Path, answer: Run) -> None:
    files = {f"class {i:02d}/{j}.jpg": jpeg(8, 8) for i in range(13) for j in range(1 + 10 * i)}
    _, output, _ = answer("data", "info", image_folder(tmp_path / "data", files))
    rows = output.splitlines()[-11:]
    result = [row.split()[:3] for row in rows[:10]]
    assert result == [["class", f"{i:02d}", str(1 + 10 * i)] for i in range(12, 2, -1)]
    assert [row.count("#") for row in rows[:10]] == [(1 + 10 * i) // 3 for i in range(12, 2, -1)]
    assert rows[10].split() == ["...", "3", "more;", "--json", "lists", "all"]


@pytest.mark.parametrize("format", FORMATS)
def test_info_is_alike_in_formats(format: str, folder: Path, tmp_path: Path, answer: Run) -> None:
    pack_as(folder, tmp_path / "target", format)
    options = []
    for data in (folder, tmp_path / "target"):
        answer("data", "index", data)
        code, output, errors = answer("data", "info", data, "--json")
        assert (code, errors) == (0, "")
        options.append(json.loads(output))
    assert list(options[0]) == ["train", "val"]
    for split in options[0]:
        assert options[1][split]["format"] == format
        for name in ("images", "bytes", "quarantined", "shorter_side", "images_by_class", "digest"):
            assert options[0][split][name] == options[1][split][name]


def test_names_that_are_not_utf8_are_printed_with_replacements(tmp_path: Path, answer: Run) -> None:
    folder = image_folder(
        tmp_path / "data", {f"{NOT_UTF8[1]}/{NOT_UTF8[0]}": b"text", f"{NOT_UTF8[1]}/x.jpg": jpeg()}
    )
    show = ("show", "--recipe", "demo", "--out", tmp_path / "x.png")
    for run, *arguments in (
        (answer, "index"),
        (call, "info"),
        (answer, "info", "--json"),
        (answer, *show),
    ):
        code, output, errors = run("data", arguments[0], folder, *arguments[1:])
        assert (code, errors) == (0, "")
        assert "\ufffd" in output or "\\xfc" in output or arguments[0] == "show"


def test_show_draws_a_fine_tuning_at_the_size_of_its_weights(
    run_folder: Path, tiny_recipe: Recipe, textures: Path, tmp_path: Path, answer: Run
) -> None:
    for split, size in (("train", tiny_recipe.image_size), ("val", tiny_recipe.eval_crop)):
        out = tmp_path / f"{split}.png"
        command = ("data", "show", textures, "--weights", run_folder, "--split", split)
        code, output, _ = answer(*command, "--out", out, "--images", 4)
        assert code == 0
        assert output.splitlines()[-1] == f"{out}: images of {size} px, as fine-tune prepares them"


def test_show_needs_no_framework(
    textures: Path, tmp_path: Path, answer: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Framework(("no-such-distribution",), "")
    monkeypatch.setitem(backends.FRAMEWORKS, "torch", missing)
    out = tmp_path / "sheet.png"
    code, output, errors = answer("data", "show", textures, "--out", out, "--images", 4)
    assert (code, out.is_file()) == (0, True)
    assert errors == "note: PyTorch is not installed, so these are the sizes for a CPU\n"
    assert output.splitlines()[-1] == f"{out}: images of 64 px, as my-images prepares them"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_show_draws_what_the_host_loader_makes(
    split: str, format: str, textures: Path, tiny_recipe: Recipe, tmp_path: Path, answer: Run
) -> None:
    data = pack_as(textures, tmp_path / "data", format)
    (tmp_path / "mine.yaml").write_text(
        "base: demo\nimage_size: 40\neval_crop: 40\neval_resize: 50\n"
    )
    recipe = load_recipe(tmp_path / "mine.yaml")
    out = tmp_path / "sheets" / "sheet.png"
    code, output, errors = answer(
        *("data", "show", data, "--recipe", tmp_path / "mine.yaml"),
        *("--out", out, "--images", 8, "--split", split),
    )
    assert (code, errors) == (0, "")
    result = output.splitlines()[-1]
    assert result == f"{out}: images of 40 px, as {tmp_path / 'mine.yaml'} prepares them"
    index = open_index(textures / split)
    plans = (
        training_plans(recipe.replace(global_batch_images=8), index.sizes, 0)
        if split == "train"
        else evaluation_plans(recipe, index.sizes, 8)
    )
    with HostLoader(index, antialias=recipe.antialias) as loader:
        batch = next(loader.batches([next(plans)]))
    with Image.open(out) as sheet:
        assert (sheet.format, sheet.size) == ("PNG", (200, 136))
        pixels = np.asarray(sheet)
    for i, image in enumerate(batch.images):
        top = 8 + i // 4 * 64
        left = 8 + i % 4 * 48
        assert np.array_equal(pixels[top : top + 40, left : left + 40], image)


def test_show_takes_a_folder_without_splits(few: Path, tmp_path: Path, answer: Run) -> None:
    code, _, _ = answer(
        "data", "show", few / "train", "--recipe", "demo", "--out", tmp_path / "sheet.png"
    )
    assert code == 0
    assert (tmp_path / "sheet.png").is_file()


def test_a_flat_folder_is_refused_until_it_is_sorted(tmp_path: Path, answer: Run) -> None:
    root = image_folder(
        tmp_path / "data",
        {"train/cat/1.jpg": jpeg(), "train/owl/2.jpg": jpeg(), "val/a.jpg": jpeg()},
    )
    code, _, errors = answer("data", "index", root)
    assert code == 2
    assert f"lockstep data sort-val {root / 'val'} --labels FILE" in errors
    (tmp_path / "labels.csv").write_text("ImageId,PredictionString\na,owl 1 2 3 4\n")
    command = ("data", "sort-val", root / "val", "--labels", tmp_path / "labels.csv")
    assert answer(*command) == (0, f"1 image sorted into classes in {root / 'val'}\n", "")
    assert answer(*command) == (0, f"0 images sorted into classes in {root / 'val'}\n", "")
    assert open_index(root / "val", classes=("cat", "owl")).rows["label"].tolist() == [1]


def test_labels_that_do_not_fit_move_nothing(tmp_path: Path, answer: Run) -> None:
    folder = image_folder(tmp_path / "val", {"a.jpg": jpeg(), "b.jpg": jpeg()})
    (tmp_path / "labels").write_text("a.jpg cat\n")
    code, output, errors = answer("data", "sort-val", folder, "--labels", tmp_path / "labels")
    assert (code, output) == (2, "")
    assert "1 of 2 images; the first one is b.jpg" in errors
    assert sorted(path.name for path in folder.iterdir()) == ["a.jpg", "b.jpg"]
