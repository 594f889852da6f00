"""Named arrays of Keras files, by layer and variable: `conv1_conv/kernel`, `conv1_bn/moving_mean`.

| file | where the variables are |
|---|---|
| `.keras`, a zip archive | in `model.weights.h5`, which is as the next row |
| `.weights.h5` of Keras 3 | `layers/<class>_<count>/vars/<number>` |
| `.h5`, weights | `<layer>/<layer>/<variable>`, perhaps with `:0` at the end |
| `.h5`, a whole model | the same below `model_weights` |

`keras.applications.ResNet50` of 2015 to 2018 has other names, and another epsilon of batch norms:
`res<stage><block>_branch2{a,b,c}`, `bn<stage><block>_branch1` for a shortcut, `fc1000`, where
blocks are letters. Keras 1 put the layer's name into those of the variables too: `conv1_W`,
`bn_conv1_running_std`, which is a variance.

The group `vars` of newer versions has the layer's name as an attribute. The model is described by
the archive's `config.json`, or by the attribute `model_config` of a whole model.

HDF5 can say that its values are in other files, and both containers can claim more bytes than they
have. Such files are refused. An array is read only when it is asked for, with the shape that is
expected of it.

Sources: keras/src/saving/saving_lib.py, keras/src/legacy/saving/legacy_h5_format.py; HDF5 File
Format Specification.
"""

import io
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lockstep.system.errors import BackendError, CheckpointError
from lockstep.system.regular_files import WEIGHTS, check_regular, open_regular
from lockstep.system.strict_json import parsed
from lockstep.weights.formats import BFLOAT16, DAMAGE, dtype_name, naming_damage, widen_bfloat16
from lockstep.weights.formats.account import Part

INSTALL = "pip install h5py==3.14.0"
SIGNATURE = b"\x89HDF\r\n\x1a\n"
_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
_OPTIMIZER = ("optimizer", "optimizer_weights")
VARS = "vars"
_BY_POSITION = {
    4: ("gamma", "beta", "moving_mean", "moving_variance"),
    2: ("kernel", "bias"),
    1: ("kernel",),
}
"""Names of a layer's variables where files number them, by how many there are."""
_CLASSES = {("kernel", 4): "conv2d", ("kernel", 2): "dense", ("gamma", 1): "batch_normalization"}
"""Classes of layers by their first variable and the number of axes."""
_MOST_OBJECTS = 50_000
_MOST_DEPTH = 12
_MOST_GROWTH = 16
"""Values may have at most this many times the bytes that they take in the file. Weights hardly
shrink by compression."""
_MOST_CONFIG = 64 * 2**20
_PART = 2**20
"""A member of an archive is unpacked by at most this many bytes at a time."""
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""Keras stores its members. zipfile unpacks parts of members that are stored or deflated, and
others only whole."""
_GENERATORS = ("seed_generator", "seed_generator_state")
"""What Keras calls the states of layers' random numbers."""
OLD_EPSILON = 1e-3
"""What batch norms add to the variance in versions of Keras until 2018."""
_BRANCH = re.compile(r"(res|bn)([2-5])([a-z])_branch(1|2[abc])")
_PLACES = {"1": 0, "2a": 1, "2b": 2, "2c": 3}
_KINDS = {"res": "conv", "bn": "bn"}
_OTHERS = {"conv1": "conv1_conv", "bn_conv1": "conv1_bn", "fc1000": "predictions"}
_VARIABLES = {
    "W": "kernel",
    "b": "bias",
    "running_mean": "moving_mean",
    "running_std": "moving_variance",
}
"""Variables by Keras 1's names."""


@dataclass(frozen=True)
class Variables:
    """The variables of an open file, without those of an optimizer."""

    path: Path
    description: Any
    """The model's configuration in JSON; None if the file holds only weights."""
    datasets: Mapping[str, Any]
    """The datasets of HDF5 by their path below the weights, in the order of the file."""
    groups: Mapping[str, str]
    """The paths of all groups, with the layer's name that a group `vars` may have."""
    parts: tuple[Part, ...]
    """The optimizer, and the states of random numbers."""

    def read(self, path: str) -> np.ndarray:
        """Return an array of floats as a new float32 array. Raises `CheckpointError` if it holds
        something else."""
        dataset = self.datasets[path]
        values = dataset[...]
        if _is_bfloat16(dataset):
            values = widen_bfloat16(values.view(np.uint16))
        if values.dtype.kind != "f":
            raise CheckpointError(
                f"{self.path}: {path} is {values.dtype}, expected float32; save the model without"
                " quantization"
            )
        return np.array(values, np.float32, order="C")

    def describe_arrays(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield the path of every array in HDF5, its type and its shape."""
        for path, dataset in self.datasets.items():
            yield self.place(path), self.find_type(path), dataset.shape

    def place(self, path: str) -> str:
        """Return the path of an array in HDF5."""
        return str(self.datasets[path].name).lstrip("/")

    def find_type(self, path: str) -> str:
        """Return the type of an array's numbers."""
        dataset = self.datasets[path]
        return dtype_name(BFLOAT16 if _is_bfloat16(dataset) else dataset.dtype)

    def list_names(self) -> dict[str, str]:
        """Return the paths of the arrays by `<layer>/<variable>`. Raises `CheckpointError` if two
        have the same name."""
        counts = Counter(path.rpartition("/")[0] for path in self.datasets)
        names: dict[str, str] = {}
        for path in self.datasets:
            group, _, variable = path.rpartition("/")
            layer = group.rpartition("/")[2]
            if layer == VARS:
                layer = self.groups.get(group) or group.split("/")[-2:][0]
                variables = _BY_POSITION.get(counts[group], ())
                if variable in map(str, range(len(variables))):
                    variable = variables[int(variable)]
            name = f"{layer}/{variable.removesuffix(':0')}"
            if name in names:
                raise CheckpointError(f"{self.path} has two variables {name}")
            names[name] = path
        return names


def is_keras(head: bytes, path: Path) -> bool:
    """Return whether a file is one of HDF5, or a zip archive as Keras writes it."""
    if head.startswith(SIGNATURE):
        return True
    try:
        with open_regular(path, WEIGHTS) as file:
            if not zipfile.is_zipfile(file):
                return False
            with zipfile.ZipFile(file) as archive:
                return {_CONFIG, _WEIGHTS} <= set(archive.namelist())
    except (OSError, *DAMAGE):
        return False


@contextmanager
def open_variables(path: Path) -> Iterator[Variables]:
    """Yield the variables of a file; they can be read inside the block.

    Raises `CheckpointError` if it is damaged or asks for other files, and `BackendError` if h5py is
    missing.
    """
    h5py = require_h5py()
    # h5py raises OSError for damaged files, and TypeError for types that NumPy does not have.
    with naming_damage(path, "a Keras file", (OSError, *DAMAGE)):
        check_regular(path, WEIGHTS)
        source: Path | io.BytesIO = path
        description = None
        if zipfile.is_zipfile(path):
            source, description = _unpack(path, path.stat().st_size)
        with h5py.File(source, "r") as file:
            config = file.attrs.get("model_config")
            if description is None and isinstance(config, str | bytes):
                description = parsed(config)
            yield _list_variables(h5py, path, file, description)


def require_h5py() -> ModuleType:
    """Return the module h5py. Raises `BackendError` that says what to install if it is missing."""
    try:
        import h5py
    except ImportError:
        raise BackendError(f"Keras files need the package h5py: {INSTALL}") from None
    return h5py


def _unpack(path: Path, size: int) -> tuple[io.BytesIO, Any]:
    """Return the weights and the configuration in an archive, read into memory."""
    with open_regular(path, WEIGHTS) as opened_file, zipfile.ZipFile(opened_file) as archive:
        for member in archive.infolist():
            parts = member.filename.replace("\\", "/").split("/")
            if parts[0] == "" or ".." in parts or ":" in parts[0]:
                raise ValueError(
                    f"the member {member.filename!r} leaves the archive; expected relative names"
                )
        weights = archive.getinfo(_WEIGHTS)
        config = archive.getinfo(_CONFIG)
        if weights.compress_size > size or config.compress_size > size:
            raise ValueError("its members claim to take more bytes than the file has")
        if {weights.compress_type, config.compress_type} - _COMPRESSIONS:
            raise ValueError("its members are compressed in a way that Keras never uses")
        most = _MOST_GROWTH * weights.compress_size + 2**20
        if weights.file_size > most or config.file_size > _MOST_CONFIG:
            raise ValueError(
                "its members unpack to far more bytes than weights need; it may be malicious"
            )
        description = parsed(_read_member(archive, config).getvalue()) or {}
        return _read_member(archive, weights), description


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> io.BytesIO:
    """Return the bytes of a member, read in parts: zipfile's `read` unpacks it whole, however short
    it claims to be."""
    contents = io.BytesIO()
    with archive.open(member) as file:
        while part := file.read(_PART):
            contents.write(part)
    contents.seek(0)
    return contents


def _list_variables(h5py: ModuleType, path: Path, file: Any, description: Any) -> Variables:
    """Return the variables below a file's root."""
    contents = _Contents(h5py)
    root = file
    if "model_weights" in contents.list_children(file):
        root = file["model_weights"]
    for name in contents.list_children(root):
        if name not in _OPTIMIZER:
            contents.collect(root[name], name, 1)
    size = path.stat().st_size
    total = sum(dataset.size * dataset.dtype.itemsize for dataset in contents.datasets.values())
    if total > _MOST_GROWTH * size:
        raise ValueError(
            f"its arrays have {total:,} bytes, but the file has {size:,}; it may be malicious"
        )
    datasets = {}
    parts = [Part(name, "without effect", "the optimizer") for name in _OPTIMIZER if name in file]
    for place, dataset in contents.datasets.items():
        if any(name in _GENERATORS for name in place.split("/")):
            parts.append(Part(place, "without effect", "the state of random numbers"))
        else:
            datasets[place] = dataset
    return Variables(path, description, datasets, contents.groups, tuple(parts))


class _Contents:
    """The groups and datasets of a file, by path. What is not in the file raises `ValueError`."""

    def __init__(self, h5py: ModuleType) -> None:
        self.datasets: dict[str, Any] = {}
        self.groups: dict[str, str] = {}
        self._h5py = h5py
        self._objects = 0

    def list_children(self, group: Any) -> list[str]:
        """Return the names in a group, and count them."""
        if not isinstance(group, self._h5py.Group):
            raise ValueError(f"{group.name} is a {type(group).__name__}; expected a group")
        names = list(group)
        self._objects += len(names)
        if self._objects > _MOST_OBJECTS:
            raise ValueError(f"it has more than {_MOST_OBJECTS} objects")
        for name in names:
            if not isinstance(group.get(name, getlink=True), self._h5py.HardLink):
                raise ValueError(
                    f"{group.name}/{name} is a link to another place, which weights do not need;"
                    " nothing was read"
                )
        return names

    def collect(self, item: Any, path: str, depth: int) -> None:
        """Add what is below an object, which has a path."""
        path = path.replace("\\", "/")  # as Keras 2 wrote it on Windows
        if depth > _MOST_DEPTH:
            raise ValueError(f"its groups are nested deeper than {_MOST_DEPTH}")
        if isinstance(item, self._h5py.Dataset):
            if item.external or item.is_virtual:
                raise ValueError(
                    f"the values of {item.name} are in another file, which weights do not need;"
                    " nothing was read"
                )
            if item.shape is None:
                raise ValueError(f"{item.name} has no values, not even a shape")
            if path in self.datasets:
                raise ValueError(f"it has two arrays {path}")
            self.datasets[path] = item
            return
        children = self.list_children(item)
        is_layer = path.rpartition("/")[2] == VARS
        self.groups[path] = str(item.attrs.get("name", "")) if is_layer else ""
        for name in children:
            self.collect(item[name], f"{path}/{name}", depth + 1)


def _is_bfloat16(dataset: Any) -> bool:
    """Return whether values are bfloat16, which HDF5 stores as two bytes without a meaning."""
    return (
        dataset.dtype.kind == "V"
        and dataset.dtype.itemsize == 2
        and str(dataset.attrs.get("dtype", "")) == "bfloat16"
    )


def has_branches(names: Mapping[str, str]) -> bool:
    """Return whether variables, by `<layer>/<variable>`, have the names of these versions."""
    return any(_BRANCH.fullmatch(name.rpartition("/")[0]) for name in names)


def rename_variables(path: Path, places: Mapping[str, str]) -> dict[str, str]:
    """Return the paths of variables of these versions by later names. Raises `CheckpointError` if
    two get the same name."""
    renamed = {}
    for name, place in places.items():
        layer, _, variable = name.rpartition("/")
        renamed[f"{rename_layer(layer)}/{rename_variable(layer, variable)}"] = place
    if len(renamed) < len(places):
        raise CheckpointError(
            f"{path} has variables named by several versions of Keras; save the model again"
        )
    return renamed


def rename_variable(layer: str, variable: str) -> str:
    """Return the later name of a layer's variable."""
    variable = variable.removeprefix(f"{layer}_")
    return _VARIABLES.get(variable, variable)


def rename_layer(name: str) -> str:
    """Return the later name of a layer.

    >>> rename_layer("res4f_branch2a"), rename_layer("bn2a_branch1"), rename_layer("other")
    ('conv4_block6_1_conv', 'conv2_block1_0_bn', 'other')
    """
    match = _BRANCH.fullmatch(name)
    if match is None:
        return _OTHERS.get(name, name)
    kind, stage, block, branch = match.groups()
    return f"conv{stage}_block{ord(block) - ord('a') + 1}_{_PLACES[branch]}_{_KINDS[kind]}"


def store_named(
    h5py: ModuleType, path: Path, layers: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Write variables by layer and name as the older layout has them. Layers are listed in the
    order given."""
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [layer.encode() for layer in layers]
        file.attrs["backend"] = b"tensorflow"
        file.attrs["keras_version"] = b"2.15.0"
        for layer, variables in layers.items():
            group = file.create_group(layer)
            group.attrs["weight_names"] = [
                f"{layer}/{variable}:0".encode() for variable in variables
            ]
            for variable, values in variables.items():
                group.create_dataset(f"{layer}/{variable}:0", data=values)


def store_numbered(
    h5py: ModuleType, path: Path, layers: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Write variables as Keras 3 does: layers are numbered by class in the order given, variables
    in theirs."""
    counts = dict.fromkeys(_CLASSES.values(), 0)
    with h5py.File(path, "w") as file:
        for layer, variables in layers.items():
            first = next(variable for variable in variables if variable != "bias")
            axes = max(values.ndim for values in variables.values())
            kind = _CLASSES[first, axes]
            count = f"_{counts[kind]}" if counts[kind] else ""
            counts[kind] += 1
            group = file.create_group(f"layers/{kind}{count}/{VARS}")
            group.attrs["name"] = layer
            for i, values in enumerate(variables.values()):
                group.create_dataset(str(i), data=values)
