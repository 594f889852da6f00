"""Weights that are known by name: the rows of `known_weights.yaml`, such as
`torchvision/resnet50.IMAGENET1K_V2` or `timm/resnet50.a1_in1k`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit

from lockstep.system.plain_yaml import read_yaml

PUBLISHERS = ("torchvision/", "timm/")
"""How names of known weights begin."""
ROWS = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class KnownWeights:
    """Weights that a publisher offers for download, trained for ImageNet's 1,000 classes."""

    model: str
    """The name in `lockstep.models.architectures`."""
    image_size: int
    """Side of the images in training, in pixels."""
    eval_resize: int
    """Shorter side to which evaluation resizes, in pixels."""
    eval_crop: int
    """Side of the crop that evaluation uses, in pixels."""
    interpolation: Literal["bilinear", "bicubic"]
    top1_percent: float
    """Accuracy on ImageNet's validation images as published, in percent."""
    licence: str
    """The licence of the weights, as an SPDX identifier."""
    address: str
    """Where the file is: an `https://` address."""

    @property
    def file_name(self) -> str:
        """Name of the file, such as `resnet50-11ad3fa6.pth`."""
        return PurePosixPath(urlsplit(self.address).path).name

    @property
    def sha256_start(self) -> str:
        """The first eight hexadecimal digits of the file's SHA-256, which end its name."""
        return PurePosixPath(self.file_name).stem.rpartition("-")[2]

    @property
    def is_free(self) -> bool:
        """Whether the licence allows commercial use."""
        return "NC" not in self.licence.split("-")

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Those fields of a recipe in which the preprocessing of publishers differs."""
        names = ("image_size", "eval_resize", "eval_crop", "interpolation")
        return {name: getattr(self, name) for name in names}


@cache
def read_known_weights() -> dict[str, KnownWeights]:
    """Return all known weights by name."""
    table = read_yaml(ROWS.read_text(encoding="utf-8"))
    known = {}
    for name, values in table["rows"].items():
        row = dict(zip(table["columns"], values, strict=True))
        folder = table["folders"][row.pop("folder")]
        row["address"] = folder["address"] + row.pop("file_name")
        known[name] = KnownWeights(**(folder | row))
    return known
