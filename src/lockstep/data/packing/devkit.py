"""Read the labels of ImageNet's validation images from its development kit: a file of numbers, and
`meta.mat`, a MATLAB file that explains the numbers."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.data.decoding.image_formats import is_image_name
from lockstep.system.errors import BackendError, DataError
from lockstep.system.regular_files import (
    RECORDS,
    TEXT,
    check_regular,
    explain_failure,
    read_regular_text,
)
from lockstep.system.strict_json import parsed

_READ = """
import json, resource, signal, sys
from scipy.io import loadmat
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
signal.alarm(60)
synsets = loadmat(sys.argv[1], variable_names=["synsets"])["synsets"].ravel()
classes = {str(item["ILSVRC2012_ID"].item()): item["WNID"].item() for item in synsets}
print(json.dumps(classes))
"""
"""SciPy reads a MATLAB file in a process with limits: a few bytes can claim to need any amount of
memory. Nothing in the file is executed."""


def read_ground_truth(
    path: Path, folder: Path, classes: Mapping[str, str], names: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield place, path and class of each image of a folder, in the order of their names. `classes`
    are those of `read_kit_classes`.

    Raises `DataError` if there are more or fewer numbers than images, or `meta.mat` does not name a
    number.
    """
    numbers = read_regular_text(path, RECORDS, errors="replace").split()
    images = sorted(item.name for item in folder.glob("[!.]*") if is_image_name(item.name))
    if len(images) != len(numbers):
        raise DataError(
            f"{path} has {len(numbers)} numbers for {len(images)} images in {folder}; expected one"
            " for each. Name the folder of the validation images: --images FOLDER"
        )
    for line, (image, number) in enumerate(zip(images, numbers, strict=True), 1):
        place = f"{path}, line {line}"
        if number not in classes:
            raise DataError(f"{place}: meta.mat next to it has no class {number:.20}")
        yield place, {"path": image, "label": classes[number]}


def read_kit_classes(path: Path) -> dict[str, str]:
    """Return the names of ImageNet's classes (`n01440764`) by their numbers. Raises `DataError` if
    the file is missing or something else."""
    if importlib.util.find_spec("scipy") is None:
        raise BackendError(f"{path} needs the package scipy: pip install scipy==1.17.1")
    try:
        check_regular(path, TEXT)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {explain_failure(error)}") from None
    command = [sys.executable, "-P", "-c", _READ, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        reason = ended.stderr.strip().rpartition("\n")[2] or "it needs too much time or memory"
        raise DataError(f"{path} cannot be read as ImageNet's meta.mat: {reason:.200}")
    classes: dict[str, str] = parsed(ended.stdout)
    return classes
