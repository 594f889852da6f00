"""The contact sheet, pixel by pixel, and the facts about a data set."""

import base64
import os
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from matplotlib.font_manager import findfont, get_font
from PIL import Image, ImageFont

from lockstep.data import Batch
from lockstep.data.contact_sheet import contact_sheet, wrap_lines, write_sheet
from lockstep.data.dataset_facts import facts
from lockstep.data.index import Index, open_index
from lockstep.data.loading.host import HostLoader
from lockstep.recipes import Recipe
from lockstep.recipes.order import evaluation_plans, training_plans
from lockstep.system.errors import DataError
from lockstep.system.plots import find_font, list_families
from tests.data.cases import image_folder, jpeg
from tests.data.sets import CONTAINERS, pack_as

MARGIN = 8
LINE = 16


@pytest.fixture(scope="module")
def index(textures: Path) -> Index:
    return open_index(textures / "train")


def tiles(sheet: Image.Image, count: int, columns: int, size: int) -> np.ndarray:
    pixels = np.asarray(sheet)
    step = size + MARGIN
    places = [
        (MARGIN + i // columns * (step + LINE), MARGIN + i % columns * step) for i in range(count)
    ]
    return np.stack([pixels[top : top + size, left : left + size] for top, left in places])


def load_steps(index: Index, recipe: Recipe, first: int, images: int) -> list[Batch]:
    """Return the batches of a run from a step on that have this many images."""
    plans = training_plans(recipe, index.sizes, first)
    count = -(-images // recipe.global_batch_images)
    with HostLoader(index, antialias=recipe.antialias) as loader:
        return list(loader.batches(islice(plans, count)))


@pytest.mark.parametrize(
    ("images", "columns", "rows"), [(1, 1, 1), (2, 2, 1), (8, 4, 2), (13, 5, 3), (60, 10, 6)]
)
@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (1, 2)])
def test_the_sheet_holds_the_images_of_steps_as_the_loader_makes_them(
    epoch: int, step: int, images: int, columns: int, rows: int, index: Index, tiny_recipe: Recipe
) -> None:
    recipe = tiny_recipe.replace(epochs=4)
    sheet = contact_sheet(index, recipe, images, epoch=epoch, step=step)
    assert sheet.size == (columns * (32 + MARGIN) + MARGIN, rows * (32 + MARGIN + LINE) + MARGIN)
    batches = load_steps(index, recipe, 7 * epoch + step, images)  # 60 images, 8 a step
    expected = np.concatenate([batch.images for batch in batches])[:images]
    assert np.array_equal(tiles(sheet, images, columns, 32), expected)


def test_a_sheet_has_images_of_the_size_of_its_epoch(index: Index, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(image_sizes=[[0, 32], [1, 48]])
    for epoch, size in enumerate((32, 48)):
        sheet = contact_sheet(index, recipe, 8, epoch=epoch)
        [batch] = load_steps(index, recipe, 7 * epoch, 8)
        assert np.array_equal(tiles(sheet, 8, 4, size), batch.images)
    last = contact_sheet(index, recipe, 16, step=6)  # the step after it has other images
    assert last.size == contact_sheet(index, recipe, 8).size


@pytest.mark.parametrize(("epoch", "step"), [(0, 7), (2, 0)])
def test_a_step_that_the_run_does_not_have_is_refused(
    epoch: int, step: int, index: Index, tiny_recipe: Recipe
) -> None:
    with pytest.raises(DataError, match=f"no step {step + 1} of epoch {epoch + 1}.* 2 epochs of 7"):
        contact_sheet(index, tiny_recipe, 8, epoch=epoch, step=step)


@pytest.mark.parametrize("cutmix_alpha", [0.0, 1.0])
def test_mixed_images_are_labelled(index: Index, tiny_recipe: Recipe, cutmix_alpha: float) -> None:
    recipe = tiny_recipe.replace(
        mixup_alpha=1.0, cutmix_alpha=cutmix_alpha, mixup_coefficient="sample"
    )
    plain = tiles(contact_sheet(index, tiny_recipe, 8), 8, 4, 32).astype(np.float64)
    sheet = np.asarray(contact_sheet(index, recipe, 8))
    [batch] = load_steps(index, recipe, 0, 8)
    assert batch.coefficients is not None
    assert batch.partners is not None
    row = 32 + MARGIN + 2 * LINE
    for i, (own, partner) in enumerate(zip(batch.coefficients, batch.partners, strict=True)):
        top = MARGIN + i // 4 * row
        left = MARGIN + i % 4 * (32 + MARGIN)
        mixed = own * plain[i] + (1 - own) * plain[partner]
        if batch.boxes is not None:
            y, x, height, width = batch.boxes[i]
            box = np.s_[y : y + height, x : x + width]
            mixed[box] = plain[partner][box]
        assert np.abs(sheet[top : top + 32, left : left + 32] - mixed).max() <= 0.501
        two_labels = batch.labels[i] != batch.labels[partner]
        below = sheet[top + 32 + LINE : top + 32 + 2 * LINE, left : left + 32]
        assert (below < 128).any() == two_labels


def test_an_evaluations_sheet_has_its_first_images(index: Index, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(eval_resize=50, eval_crop=40, eval_antialias=True)
    sheet = contact_sheet(index, recipe, 8, evaluation=True)
    plan = next(evaluation_plans(recipe, index.sizes, 8))
    with HostLoader(index, antialias=True) as loader:
        batch = next(loader.batches([plan]))
    assert plan.samples.tolist() == list(range(8))
    assert np.array_equal(tiles(sheet, 8, 4, 40), batch.images)


def test_a_sheet_shows_no_more_images_than_exist(tmp_path: Path, tiny_recipe: Recipe) -> None:
    index = open_index(image_folder(tmp_path, {f"a/{i}.jpg": jpeg() for i in range(3)}))
    for evaluation in (False, True):
        sheet = contact_sheet(index, tiny_recipe, 1000, evaluation=evaluation)
        assert sheet.size == (3 * (32 + MARGIN) + MARGIN, 32 + MARGIN + LINE + MARGIN)


@pytest.mark.parametrize(
    "name",
    [
        "cat",
        "an owl with a name that is much too long",
        "フクロウ",
        "two\nlines",
        os.fsdecode(b"\xff"),
    ],
    ids=ascii,
)
def test_names_stand_below_their_images(name: str, tmp_path: Path, tiny_recipe: Recipe) -> None:
    index = open_index(image_folder(tmp_path, {f"{name}/1.jpg": jpeg(), f"{name}/2.jpg": jpeg()}))
    pixels = np.asarray(contact_sheet(index, tiny_recipe, 2))
    below = pixels[MARGIN + 32 : MARGIN + 32 + LINE]
    for left in (MARGIN, MARGIN + 32 + MARGIN):
        assert (below[:, left : left + 32] < 128).any()
    assert (below[:, 2 * MARGIN + 2 * 32 + 2 :] == 255).all()


def test_captions_wrap_and_lose_nothing_but_the_end_of_a_long_text() -> None:
    """At word ends where there are some; the font of the sheet says what fits."""
    font = ImageFont.truetype(find_font("a"), 11)
    texts = ("val/birds/an owl with a name that is too long.jpg", "x" * 60, "", "w" * 1000)
    lines = wrap_lines(texts, 160)
    assert max(map(font.getlength, lines)) <= 160
    assert "".join(lines).startswith("".join(texts[:2]))
    assert lines[0].endswith(" ")
    assert font.getlength("".join(lines[-4:])) > 4 * 150, "four full lines of the last text"
    assert len(lines) < 13


def test_letters_that_differ_look_different(tmp_path: Path, tiny_recipe: Recipe) -> None:
    names = "?ößłЖΩע"
    data = image_folder(tmp_path, {f"{name}/1.jpg": jpeg() for name in names})
    pixels = np.asarray(contact_sheet(open_index(data), tiny_recipe, len(names), evaluation=True))
    texts = {
        pixels[top : top + LINE, left : left + 32].tobytes()
        for top in range(MARGIN + 32, len(pixels) - LINE + 1, 32 + MARGIN + LINE)
        for left in range(MARGIN, pixels.shape[1] - 32, 32 + MARGIN)
    }
    assert len(texts - {b"\xff" * LINE * 32 * 3}) == len(names)


def test_a_letter_that_the_usual_font_lacks_is_drawn_in_another() -> None:
    usual = get_font(find_font("a")).get_charmap()
    other = next(
        letter
        for letter in get_font(findfont("STIXGeneral")).get_charmap()
        if letter not in usual and not chr(letter).isspace()
    )
    assert other in get_font(find_font(chr(other))).get_charmap()
    assert "Last" not in find_font("\U0010fffd")  # a font of boxes for everything
    assert list_families(["a"])[0] == "DejaVu Sans"
    assert len(list_families(["a", chr(other)])) == 2


def test_a_sheet_is_written_as_png_into_a_new_folder(tmp_path: Path) -> None:
    sheet = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8))
    write_sheet(sheet, tmp_path / "new" / "sheet", "<images>")
    with Image.open(tmp_path / "new" / "sheet") as written:
        assert written.format == "PNG"
        assert np.array_equal(np.asarray(written), np.asarray(sheet))
    write_sheet(sheet, tmp_path / "sheet.html", "<images>")
    page = (tmp_path / "sheet.html").read_text("utf-8")
    (picture,) = re.findall(r"base64,([^\"]+)", page)
    assert base64.b64decode(picture) == (tmp_path / "new" / "sheet").read_bytes()
    assert page.count("&lt;images&gt;") == 3


FILES = {
    "owl/a.jpg": jpeg(20, 30),
    "owl/b.jpg": jpeg(16, 24),
    "owl/c.jpg": jpeg(50, 40),
    "cat/z.jpg": jpeg(40, 10),
}


def test_facts_are_counts_bytes_and_sizes(tmp_path: Path) -> None:
    index = open_index(
        image_folder(tmp_path, FILES | {"cat/bad.jpg": b"text"}), classes=("ant", "cat", "owl")
    )
    assert facts(index) == {
        "format": "folder",
        "files": 4,
        "images": 4,
        "bytes": sum(map(len, FILES.values())),
        "quarantined": 1,
        "shorter_side": {"least": 10, "median": 18, "most": 40},
        "images_by_class": {"ant": 0, "cat": 1, "owl": 3},
        "digest": index.digest,
    }


@pytest.mark.parametrize("format", CONTAINERS)
def test_facts_differ_by_format_and_files_alone(format: str, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "folder", FILES)
    about = facts(open_index(pack_as(folder, tmp_path / "packed", format, shards=2)))
    assert about == facts(open_index(folder)) | {"format": format, "files": 2}
