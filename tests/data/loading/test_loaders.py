"""The loaders execute the same plans: order, labels, crops and flips are equal; pixels differ by
rounding when resized."""

import io
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lockstep.data import Batch
from lockstep.data.index import Index, open_index, subset
from lockstep.data.loading.dali import DaliLoader, Lent
from lockstep.data.loading.host import HostLoader
from lockstep.data.loading.loaders import Loader, SyntheticLoader, make_loader
from lockstep.data.packing import Packing, pack
from lockstep.data.sources import FORMATS, find_split
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.order import BatchPlan, evaluation_plans, training_plans
from lockstep.system.errors import DataError, RecipeError

SIZE = 32
ROUNDING = 1
"""The difference of DALI's resizing, in levels of 255. DALI rounds once, OpenCV computes in fixed
point, and Pillow rounds after each direction."""
ROUNDING_AT_BORDERS = 24
"""The difference in the outermost pixels with antialiasing: outside the image, DALI repeats the
border, Pillow does not."""


@pytest.fixture(scope="module")
def index(textures: Path) -> Index:
    return open_index(textures / "train")


@pytest.fixture(scope="module")
def mixup_recipe(tiny_recipe: Recipe) -> Recipe:
    return tiny_recipe.replace(mixup_alpha=0.2)


def training(recipe: Recipe, index: Index) -> list[BatchPlan]:
    return list(islice(training_plans(recipe, index.sizes, 0), 6))


def batches(loader: Loader, plans: list[BatchPlan]) -> list[Batch]:
    with loader:
        return list(loader.batches(plans))


def apart(a: list[Batch], b: list[Batch]) -> np.ndarray:
    differences = [
        np.abs(x.images.astype(int) - y.images).ravel() for x, y in zip(a, b, strict=True)
    ]
    return np.concatenate(differences)


def dali(index: Index, *, antialias: bool = False, ahead: int = 2) -> DaliLoader:
    return DaliLoader(index, antialias=antialias, threads=2, ahead=ahead)


def host(index: Index, *, antialias: bool = False) -> HostLoader:
    return HostLoader(index, antialias=antialias, threads=2)


def test_dali_cuts_and_mirrors_as_the_host_loader(index: Index, mixup_recipe: Recipe) -> None:
    plans = training(mixup_recipe.replace(vertical_flip_probability=0.5), index)
    assert apart(batches(dali(index), plans), batches(host(index), plans)).max() <= ROUNDING


def test_dali_refuses_crops_that_reflect_the_border(index: Index, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(crop="random")
    with pytest.raises(RecipeError, match="crop_padding: 0, or use the host loader"):
        make_loader(index, recipe, Execution(loader="dali"))
    plans = training(recipe.replace(crop_padding=0), index)
    assert apart(batches(dali(index), plans), batches(host(index), plans)).max() <= ROUNDING


def test_images_that_dali_lends_are_the_same_and_stay_while_they_are_kept(
    index: Index, mixup_recipe: Recipe
) -> None:
    # On a CPU. Where DALI decodes on a GPU, images are lent in the same way.
    plans = training(mixup_recipe, index)
    lent = batches(DaliLoader(index, antialias=False, threads=2, lends=True), plans)
    assert {type(batch.images) for batch in lent} == {Lent}
    borrowed = [torch.from_dlpack(batch.images) for batch in lent]
    assert [batch.images.shape for batch in lent] == [tuple(image.shape) for image in borrowed]
    assert [len(batch.images) for batch in lent] == [len(plan.samples) for plan in plans]
    pixels = [batch.pixels for batch in lent]
    for expected, copy, image in zip(batches(dali(index), plans), pixels, borrowed, strict=True):
        assert np.array_equal(copy, expected.pixels)
        assert np.array_equal(image.numpy(), expected.pixels)


def test_padded_batches_are_not_lent(index: Index, tiny_recipe: Recipe) -> None:
    plans = list(evaluation_plans(tiny_recipe, index.sizes, 32))
    assert (plans[-1].samples < 0).any()
    lent = batches(DaliLoader(index, antialias=False, threads=2, lends=True), plans)
    assert [type(batch.images) for batch in lent] == [Lent] * (len(plans) - 1) + [np.ndarray]


def test_dali_antialiases_where_the_recipe_says_so(index: Index, mixup_recipe: Recipe) -> None:
    plans = training(mixup_recipe, index)
    smooth = batches(dali(index, antialias=True), plans)
    expected = batches(host(index, antialias=True), plans)
    assert apart(inner(smooth), inner(expected)).max() <= ROUNDING
    assert apart(smooth, expected).max() <= ROUNDING_AT_BORDERS
    assert apart(inner(smooth), inner(batches(dali(index), plans))).max() > 5 * ROUNDING


def test_dali_filters_bicubically_where_the_recipe_says_so(
    index: Index, mixup_recipe: Recipe, tmp_path: Path
) -> None:
    # Half the contrast: a cubic overshoots, and Pillow clips after each direction, where DALI clips
    # once.
    (tmp_path / "images").mkdir()
    for i in range(8):
        pixels = np.asarray(Image.open(index.path(i)).convert("RGB"))
        Image.fromarray(pixels // 2 + 64).save(tmp_path / "images" / f"{i}.png")
    grey = open_index(tmp_path)
    recipe = mixup_recipe.replace(antialias=True)
    made = {}
    for loader, kernel in product(("dali", "host"), ("bilinear", "bicubic", "random")):
        changed = recipe.replace(training_interpolation=kernel)
        plans = training(changed, grey)
        one = make_loader(grey, changed, Execution(loader=loader))
        made[loader, kernel] = inner(batches(one, plans), 6)
    for kernel in ("bicubic", "random"):
        assert apart(made["dali", kernel], made["host", kernel]).max() <= ROUNDING
        assert apart(made["dali", "bilinear"], made["host", kernel]).max() > 5 * ROUNDING
    assert apart(made["dali", "bicubic"], made["dali", "random"]).max() > 5 * ROUNDING


def test_dali_refuses_another_bicubic_kernel(index: Index, mixup_recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=r"antialias: true.* host loader"):
        make_loader(index, mixup_recipe.replace(interpolation="bicubic"), Execution(loader="dali"))


def inner(whole: list[Batch], width: int = 2) -> list[Batch]:
    """Return the images without the outermost pixels: two, which the borders of an image three
    times as large influence."""
    return [Batch(batch.images[:, width:-width, width:-width], batch.labels) for batch in whole]


def test_plain_windows_are_equal(index: Index) -> None:
    # Without resizing, only decoding is left.
    samples = np.arange(len(index))
    windows = np.array(
        [(height // 3, width // 3, SIZE, SIZE) for height, width in index.sizes.tolist()], np.int32
    )
    plan = BatchPlan(
        samples=samples,
        windows=windows,
        resized=np.full((len(index), 2), SIZE, np.int32),
        offsets=np.zeros((len(index), 2), np.int32),
        flips=samples % 2 == 0,
        size=SIZE,
    )
    assert apart(batches(dali(index), [plan]), batches(host(index), [plan])).max() == 0


@pytest.mark.parametrize(("rank", "batch"), [(0, 16), (1, 50)])
def test_dali_evaluates_every_image_and_pads_with_black(
    index: Index, tiny_recipe: Recipe, rank: int, batch: int
) -> None:
    # With 60 images in batches of 50 over three ranks, the last rank gets none and the second gets
    # ten.
    plans = list(evaluation_plans(tiny_recipe, index.sizes, batch, rank=rank, ranks=3))
    actual = batches(dali(index), plans)
    expected = batches(host(index), plans)
    result = [batch.labels.tolist() for batch in actual]
    assert result == [batch.labels.tolist() for batch in expected]
    assert apart(actual, expected).max() <= ROUNDING


def test_dali_makes_batches_of_padding_alone(index: Index, tiny_recipe: Recipe) -> None:
    plans = list(evaluation_plans(tiny_recipe, index.sizes, 50, rank=2, ranks=3))
    [batch] = batches(dali(index), plans)
    assert (batch.labels == -1).all()
    assert not batch.images.any()


@pytest.mark.parametrize(
    "make", [dali, host, lambda index: SyntheticLoader(index)], ids=["dali", "host", "synthetic"]
)
def test_labels_and_mixing_are_the_plans(make: object, index: Index, mixup_recipe: Recipe) -> None:
    plans = training(
        mixup_recipe.replace(dropout=0.3, stochastic_depth=0.5, cutmix_alpha=1.0), index
    )
    for plan, batch in zip(plans, batches(make(index), plans), strict=True):
        assert batch.labels.tolist() == index.rows["label"][plan.samples].tolist()
        assert batch.labels.dtype == np.int64
        for name, column in plan.batch_columns().items():
            assert getattr(batch, name) is column is not None


@pytest.mark.parametrize("make", [dali, host, SyntheticLoader], ids=["dali", "host", "synthetic"])
def test_batches_have_the_size_of_their_plan(
    make: Callable[[Index], Loader], index: Index, tiny_recipe: Recipe
) -> None:
    recipe = tiny_recipe.replace(image_sizes=[[0, 32], [1, 48]])
    plans = list(training_plans(recipe, index.sizes, 5))[:4]
    made = batches(make(index), plans)
    assert [batch.images.shape[1:] for batch in made] == [(32, 32, 3)] * 2 + [(48, 48, 3)] * 2
    result = [batch.labels.tolist() for batch in made]
    assert result == [index.labels(plan.samples).tolist() for plan in plans]
    if make is dali:
        assert apart(made, batches(host(index), plans)).max() <= ROUNDING


@pytest.mark.parametrize("ahead", [1, 5])
def test_dali_is_not_too_far_ahead(ahead: int, index: Index, tiny_recipe: Recipe) -> None:
    samples: list[int] = []

    def plans() -> Iterator[BatchPlan]:
        for number, plan in enumerate(training_plans(tiny_recipe, index.sizes, 0)):
            samples.append(number)
            yield plan

    with dali(index, ahead=ahead) as loader:
        made = loader.batches(plans())
        for count in range(1, 5):
            next(made)
            assert len(samples) <= count + ahead + 1
        made.close()


def test_nothing_is_made_of_no_plans(index: Index) -> None:
    assert batches(dali(index), []) == []


def odd_files() -> dict[str, bytes]:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (5, 6, 3), dtype=np.uint8).repeat(9, 0).repeat(9, 1)
    kinds = {
        "png.jpg": ("RGB", "PNG"),
        "grey.jpg": ("L", "JPEG"),
        "cmyk.jpg": ("CMYK", "JPEG"),
        "alpha.png": ("RGBA", "PNG"),
    }
    files = {}
    for name, (mode, kind) in kinds.items():
        file = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(file, kind)
        files[name] = file.getvalue()
    return files


@pytest.fixture
def odd(tmp_path: Path) -> Index:
    """A PNG with the name of a JPEG, a grey and a CMYK JPEG, and an image with transparency."""
    (tmp_path / "images").mkdir()
    for name, data in odd_files().items():
        (tmp_path / "images" / name).write_bytes(data)
    return open_index(tmp_path)


def test_dali_decodes_other_kinds_as_the_host_loader(odd: Index, tiny_recipe: Recipe) -> None:
    plans = list(evaluation_plans(tiny_recipe, odd.sizes, 4))
    assert apart(batches(dali(odd), plans), batches(host(odd), plans)).max() <= ROUNDING


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, Index]:
    """Photos of every orientation as JPEG, PNG and WEBP, and what Pillow shows of them, stored
    upright."""
    stored, upright = (tmp_path_factory.mktemp(name) for name in ("stored", "upright"))
    (stored / "train" / "photos").mkdir(parents=True)
    (upright / "photos").mkdir()
    pixels = (
        np.random.default_rng(1)
        .integers(0, 256, (13, 17, 3), dtype=np.uint8)
        .repeat(4, 0)
        .repeat(4, 1)
    )
    for orientation, kind in product(range(1, 9), ("jpg", "png", "webp")):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = stored / "train" / "photos" / f"{orientation}.{kind}"
        Image.fromarray(pixels).save(path, exif=exif)
        ImageOps.exif_transpose(Image.open(path)).save(upright / "photos" / f"{path.name}.png")
    return open_index(stored / "train"), open_index(upright)


def plans_of(recipe: Recipe, index: Index) -> list[BatchPlan]:
    """Return plans of an epoch of training and of an evaluation."""
    sizes = index.sizes_for(recipe)
    recipe = recipe.replace(epochs=1)
    return [*training_plans(recipe, sizes, 0), *evaluation_plans(recipe, sizes, 8)]


@pytest.mark.parametrize("turns", [False, True])
def test_dali_turns_photos_if_the_host_loader_does(
    turns: bool, photos: tuple[Index, Index], tiny_recipe: Recipe
) -> None:
    recipe = tiny_recipe.replace(exif_orientation=turns)
    plans = plans_of(recipe, photos[0])
    made = [
        batches(make_loader(photos[0], recipe, Execution(loader=name)), plans)
        for name in ("dali", "host")
    ]
    assert apart(*made).max() <= ROUNDING


@pytest.mark.parametrize("format", FORMATS)
def test_turned_photos_are_planned_and_loaded_as_if_they_were_stored_upright(
    format: str, photos: tuple[Index, Index], tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe, (stored, upright) = tiny_recipe.replace(exif_orientation=True), photos
    pack(stored.root.parent, tmp_path, Packing(format, shards=0 if format == "folder" else 1))
    index = open_index(find_split(tmp_path, "train"))
    pairs = zip(plans_of(recipe, index), plans_of(tiny_recipe, upright), strict=True)
    assert all(
        np.array_equal(a.windows, b.windows) and np.array_equal(a.samples, b.samples)
        for a, b in pairs
    )
    plans = plans_of(recipe, index)
    turned = batches(make_loader(index, recipe, Execution()), plans)
    assert not apart(turned, batches(make_loader(upright, tiny_recipe, Execution()), plans)).any()
    result = subset(index, np.arange(3)).sizes_for(recipe)[:].tolist()
    assert result == index.sizes_for(recipe)[:3].tolist()


@pytest.mark.parametrize("name", ["grey.jpg", "png.jpg"])
def test_a_changed_image_is_named(name: str, odd: Index, tiny_recipe: Recipe) -> None:
    path = odd.root / "images" / name
    sound = path.read_bytes()
    path.write_bytes(b"no image")
    plans = list(evaluation_plans(tiny_recipe, odd.sizes, 4))
    with pytest.raises(DataError, match=f"{name} is not the image that was indexed"):
        batches(dali(odd), plans)
    path.write_bytes(sound)
    assert len(batches(dali(open_index(odd.root, anew=True)), plans)) == 1


def test_the_synthetic_loader_holds_one_batch(index: Index, tiny_recipe: Recipe) -> None:
    made = batches(SyntheticLoader(index), training(tiny_recipe, index))
    assert all(batch.is_held and batch.images is made[0].images for batch in made)
    assert made[0].images.shape == (8, SIZE, SIZE, 3)
    assert 100 < made[0].images.mean() < 155


@pytest.mark.parametrize(
    ("name", "kind"), [("host", HostLoader), ("dali", DaliLoader), ("synthetic", SyntheticLoader)]
)
def test_loaders_have_names(name: str, kind: type, index: Index, tiny_recipe: Recipe) -> None:
    assert isinstance(make_loader(index, tiny_recipe, Execution(loader=name)), kind)


def test_another_name_is_refused() -> None:
    with pytest.raises(RecipeError, match="loader"):
        Execution.of({"loader": "disk"})


def test_dct_scaling_is_the_host_loaders_alone(index: Index, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(dct_scaling=True)
    plans = training(recipe, index)
    scaled = batches(make_loader(index, recipe, Execution()), plans)
    plain = batches(host(index), plans)
    assert apart(scaled, plain).any()
    result = scaled[0].images.mean(axis=(1, 2))
    assert result == pytest.approx(plain[0].images.mean(axis=(1, 2)), abs=8)
    with pytest.raises(RecipeError, match="dct_scaling"):
        make_loader(index, recipe, Execution(loader="dali"))


def test_augmentations_are_of_training_alone(index: Index, tiny_recipe: Recipe) -> None:
    recipe = tiny_recipe.replace(
        augmentations=["solarise", {"name": "solarise", "probability": 1.0, "threshold": 0}]
    )
    plans = training(recipe, index)
    changed = batches(make_loader(index, recipe, Execution()), plans)
    for plan, batch, plain in zip(plans, changed, batches(host(index), plans), strict=True):
        assert plan.augmentations is not None
        drawn = plan.augmentations[:, 0].astype(bool)[:, None, None, None]
        solarised = np.where(drawn & (plain.images >= 128), 255 - plain.images, plain.images)
        np.testing.assert_array_equal(batch.images, 255 - solarised)
    plans = list(islice(evaluation_plans(recipe, index.sizes, 8), 1))
    loader = make_loader(index, recipe, Execution(), evaluation=True)
    assert not apart(batches(loader, plans), batches(host(index), plans)).any()
