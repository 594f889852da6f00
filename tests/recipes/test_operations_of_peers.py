"""RandAugment and its relatives, bit for bit as torchvision and timm do them with Pillow.

These tests need both: they are skipped where torchvision or timm is missing. What they compare with
is also recorded in test_operations.py, as numbers.
"""

import random
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.recipes.augmentations.autoaugment import AutoAugment
from lockstep.recipes.augmentations.randaugment import RandAugment
from lockstep.recipes.augmentations.trivialaugment_wide import TrivialAugmentWide
from lockstep.recipes.operations import LARGEST, LARGEST_WIDE, number_of_timm, number_of_torchvision
from lockstep.recipes.pixel_operators import OPERATORS, Resampling
from tests.recipes.cases import make_photo

torch: Any = pytest.importorskip("torch")
# A torchvision for another build of PyTorch raises RuntimeError.
peers: Any = pytest.importorskip(
    "torchvision.transforms.autoaugment", exc_type=(ImportError, RuntimeError)
)
timm: Any = pytest.importorskip("timm.data.auto_augment")

NAMED_BY_BOTH = {
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "rotate": "Rotate",
    "brightness": "Brightness",
    "colour": "Color",
    "contrast": "Contrast",
    "sharpness": "Sharpness",
    "posterise": "Posterize",
    "solarise": "Solarize",
    "autocontrast": "AutoContrast",
    "equalise": "Equalize",
    "invert": "Invert",
}
TORCHVISION = NAMED_BY_BOTH | {
    "identity": "Identity",
    "move_x": "TranslateX",
    "move_y": "TranslateY",
    "move_x_by_share": "TranslateX",
    "move_y_by_share": "TranslateY",
}
TIMM = NAMED_BY_BOTH | {
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
    "solarise_add": "SolarizeAdd",
}
INCREASING = ("posterise", "solarise", "colour", "contrast", "brightness", "sharpness")
FILL = (124, 116, 104)


@pytest.fixture(autouse=True)
def posterising(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm posterises to 0 bits too, which Pillow 13 refuses."""
    posterise = timm.ImageOps.posterize
    monkeypatch.setattr(
        timm.ImageOps,
        "posterize",
        lambda image, bits: posterise(image, bits) if bits else Image.new("RGB", image.size),
    )


MODES = {"nearest": 0, "bilinear": 2, "bicubic": 3}


@pytest.mark.parametrize("is_wide", [False, True], ids=["RandAugment", "TrivialAugmentWide"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("last", [30, 9])
def test_an_operation_is_torchvisions(is_wide: bool, interpolation: Any, last: int) -> None:
    photo = make_photo(size=50)
    how = Resampling(interpolation, FILL)
    mode = peers.InterpolationMode(interpolation)
    largest = LARGEST_WIDE if is_wide else LARGEST
    if is_wide:
        space = peers.TrivialAugmentWide()._augmentation_space(last + 1)
    else:
        space = peers.RandAugment()._augmentation_space(last + 1, (50, 50))
    assert [TORCHVISION[operator] for operator in largest] == list(space)
    for operator, end in largest.items():
        magnitudes, is_signed = space[TORCHVISION[operator]]
        for index in range(last + 1 if magnitudes.ndim else 1):
            for negative in (False, True) if is_signed else (False,):
                magnitude = float(magnitudes[index]) if magnitudes.ndim else 0.0
                signed = -magnitude if negative else magnitude
                expected = peers._apply_op(
                    Image.fromarray(photo), TORCHVISION[operator], signed, mode, list(FILL)
                )
                number = number_of_torchvision(operator, end, index, last, negative=negative)
                pixels = OPERATORS[operator](photo, number, how)
                assert np.array_equal(pixels, np.asarray(expected)), (operator, index, negative)


def test_moves_by_a_share_are_torchvisions_at_every_size() -> None:
    for size in range(32, 1025):
        end = torch.linspace(0.0, 150.0 / 331.0 * size, 31).tolist()
        for index, magnitude in enumerate(end):
            share = number_of_torchvision("move_x_by_share", 150 / 331, index, 30, negative=True)
            assert int(float(np.float32(share * size))) == -int(magnitude)


@pytest.mark.parametrize("is_increasing", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_an_operation_is_timms(
    is_increasing: bool, interpolation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = make_photo(size=50)
    how = Resampling(interpolation, FILL)
    for operator, name in TIMM.items():
        full_name = f"{name}Increasing" if is_increasing and operator in INCREASING else name
        for magnitude in (0, 0.3, 1, 3, 5, 7.7, 9, 10):
            for negative in (False, True):
                monkeypatch.setattr(random, "random", lambda n=negative: float(n))
                settings = {"img_mean": FILL, "interpolation": MODES[interpolation]}
                change = timm.AugmentOp(full_name, prob=1.0, magnitude=magnitude, hparams=settings)
                expected = np.asarray(change(Image.fromarray(photo)))
                number = number_of_timm(
                    operator, magnitude / 10, negative=negative, increasing=is_increasing
                )
                pixels = OPERATORS[operator](photo, number, how)
                assert np.array_equal(pixels, expected), (operator, magnitude, negative)


def test_the_policies_are_torchvisions_and_timms() -> None:
    def list_pairs(policy: str) -> list[Any]:
        augmentation = AutoAugment(policy=policy)
        pairs = []
        for pair in range(25):
            drawn = augmentation.draw([(pair + 0.5) / 25, *[0.0, 0.5, 0.0, 0.0] * 2])
            pairs.append([operation.operator for operation in drawn])
        return pairs

    expected = [
        [TORCHVISION_NAMES[name] for name, probability, _ in pair if probability]
        for pair in peers.AutoAugment().policies
    ]
    assert list_pairs("torchvision") == expected
    for policy in ("original", "originalr", "v0", "v0r"):
        expected = []
        for pair in timm.auto_augment_policy(policy):
            names = [re.sub("Increasing|Original", "", step.name) for step in pair if step.prob]
            expected.append([TIMM_NAMES[name] for name in names])
        assert list_pairs(policy) == expected


TORCHVISION_NAMES = {name: operator for operator, name in TORCHVISION.items()}
TIMM_NAMES = {name: operator for operator, name in TIMM.items()}


@pytest.mark.parametrize("policy", ["original", "originalr", "v0", "v0r"])
def test_timms_pairs_give_their_pixels(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = make_photo(size=50)
    augmentation = AutoAugment(policy=policy, interpolation="bicubic", fill=FILL)
    monkeypatch.setattr(random, "random", lambda: 0.0)  # every operation, no sign is changed
    settings = {"img_mean": FILL, "interpolation": MODES["bicubic"]}
    for number, pair in enumerate(timm.auto_augment_policy(policy, settings)):
        image = Image.fromarray(photo)
        for step in pair:
            if step.prob:
                image = step(image)
        drawn = augmentation.draw([(number + 0.5) / 25, *[0.0, 0.5, 0.9, 0.0] * 2])
        assert np.array_equal(augmentation.apply(photo, drawn), np.asarray(image)), number


def test_a_pair_of_torchvisions_policy_gives_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    photo = make_photo(size=50)
    augmentation = AutoAugment(fill=FILL)
    chances = torch.full((2,), 1e-9)
    for number in range(25):
        for sign in (0, 1):
            peer = peers.AutoAugment(fill=list(FILL))
            parameters = (number, chances, torch.tensor([sign, sign]))
            monkeypatch.setattr(peer, "get_params", lambda _, drawn=parameters: drawn)
            drawn = augmentation.draw([(number + 0.5) / 25, *[0.0, 0.5, 0.6 * sign, 0.0] * 2])
            expected = np.asarray(peer(Image.fromarray(photo)))
            assert np.array_equal(augmentation.apply(photo, drawn), expected), (number, sign)


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    """Check that two lists of values are from one distribution: the counts of each value by
    chi-square, at a level of about 1e-4."""
    values = sorted(set(ours) | set(theirs), key=str)
    counts = np.array([[sample.count(value) for value in values] for sample in (ours, theirs)])
    shares = counts.sum(axis=1, keepdims=True) / counts.sum()
    expected = shares * counts.sum(axis=0)
    distance = ((counts - expected) ** 2 / expected).sum()
    freedom = len(values) - 1
    assert distance < freedom + 4 * np.sqrt(2 * freedom) + 12


def sign_of(operation: Any) -> tuple[str, bool]:
    neutral = 1 if operation[0] in ("brightness", "colour", "contrast", "sharpness") else 0
    return operation[0], operation[1] > neutral


@pytest.mark.parametrize("kind", [RandAugment, TrivialAugmentWide])
def test_operations_have_torchvisions_shares(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = []

    def record(image: Any, name: str, magnitude: float, **_: Any) -> Any:
        number = 0.0 if name in ("Posterize", "Solarize") else magnitude
        theirs.append((TORCHVISION_NAMES[name].removesuffix("_by_share"), number > 0))
        return image

    monkeypatch.setattr(peers, "_apply_op", record)
    torch.manual_seed(3)
    peer = peers.RandAugment() if kind is RandAugment else peers.TrivialAugmentWide()
    image = Image.fromarray(make_photo(size=32))
    for _ in range(4000):
        peer(image)
    augmentation = kind()
    ours = []
    for row in np.random.default_rng(3).random((4000, augmentation.numbers)).tolist():
        for operator, number, _ in augmentation.draw(row):
            changes_one_way = operator in ("posterise", "solarise")
            name = operator.removesuffix("_by_share")
            ours.append(sign_of((name, 0 if changes_one_way else number)))
    assert_alike(ours, theirs)


def test_timms_operations_come_as_often_with_the_same_numbers() -> None:
    theirs = []
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    peer = timm.rand_augment_transform("rand-m7-n3-mstd1-inc1", {})
    for step in peer.ops:
        name = TIMM_NAMES[step.name.removesuffix("Increasing")]

        def record(image: Any, *numbers: float, name: str = name, **_: Any) -> Any:
            theirs.append((name, numbers[0] if numbers else 0.0))
            return image

        step.aug_fn = record
    for _ in range(8000):
        peer(None)
    augmentation = RandAugment(
        dialect="timm", operations=3, magnitude=7, magnitude_std=1, increasing=True
    )
    ours = []
    for row in np.random.default_rng(5).random((8000, augmentation.numbers)).tolist():
        ours += [(operator, number) for operator, number, _ in augmentation.draw(row)]
    assert_alike(*([name for name, _ in sample] for sample in (ours, theirs)))
    for operator in TIMM:
        samples = [
            np.sort([number for name, number in sample if name == operator])
            for sample in (ours, theirs)
        ]
        # Kolmogorov and Smirnov: 2.2 is exceeded once in 8,000 cases
        places = np.concatenate(samples)
        below = [np.searchsorted(sample, places, side="right") / len(sample) for sample in samples]
        count = len(samples[0]) * len(samples[1]) / len(places)
        assert np.abs(below[0] - below[1]).max() * np.sqrt(count) < 2.2, operator
