"""Files that claim more than they hold, or point outside of themselves: a message, and little
memory."""

import hashlib
import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import save

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, open_weights
from lockstep.weights.formats import keras_variables
from tests.weights.formats.cases import state_of

DEEP = "[" * 100_000
MOST_BYTES = 32 * 2**20


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Fail a test in which Python and NumPy allocate more than 32 MiB."""
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MOST_BYTES


def hdf5(change: Callable[[Any], object]) -> bytes:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file.create_dataset(
            "conv1_conv/conv1_conv/kernel:0", data=np.zeros((7, 7, 3, 64), np.float32)
        )
        change(file)
    return memory.getvalue()


def huge(file: Any) -> None:
    file.create_dataset("fc/fc/kernel:0", (2**20, 2**20), np.float32, chunks=(1024, 1024))


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((64,), np.float32)
    layout[:] = h5py.VirtualSource("/etc/passwd", "a", (64,))
    file.create_virtual_dataset("fc/fc/kernel:0", layout)


def packed(file: Any) -> None:
    file.create_dataset("fc/k", (2048, 2**20), np.float32, chunks=(2048, 64), compression="gzip")


def elsewhere(file: Any) -> None:
    file.create_dataset("fc/fc/kernel:0", (64,), np.float32, external=[("/etc/passwd", 0, 256)])


def linked_array(file: Any) -> None:
    file["fc/fc/kernel:0"] = h5py.ExternalLink("/etc/passwd", "/a")


def empty(file: Any) -> None:
    file["fc/fc/kernel:0"] = h5py.Empty("f4")


def name_type(file: Any) -> None:
    file["fc/fc/kernel:0"] = np.dtype("f4")


def no_group(file: Any) -> None:
    file["model_weights"] = np.zeros(3)


def soft_link(file: Any) -> None:
    file["fc"] = h5py.SoftLink("/conv1_conv")


def external_link(file: Any) -> None:
    file["fc"] = h5py.ExternalLink("/etc/passwd", "/")


def circle(file: Any) -> None:
    file["conv1_conv/again"] = file["conv1_conv"]


HDF5: dict[str, tuple[Callable[[Any], object], str]] = {
    "4 TiB that were never written": (
        huge,
        r"its arrays have 4,398,\d+,\d+,\d+ bytes, but the file has",
    ),
    "packed": (packed, r"8,589,9\d\d,\d\d\d bytes.* \d\d,\d\d\d"),
    "virtual": (virtual, "are in another file"),
    "values in another file": (elsewhere, "/fc/fc/kernel:0 .* another file"),
    "an array in another file": (linked_array, "kernel:0 is a link"),
    "without a shape": (empty, "/fc/fc/kernel:0 has no values, not even a shape"),
    "a type instead of an array": (name_type, "/fc/fc/kernel:0 is a Datatype; expected a group"),
    "an array instead of the weights": (no_group, "/model_weights is a Dataset; expected a group"),
    "a soft link": (soft_link, "is a link to another place"),
    "an external link": (external_link, "is a link to another place"),
    "a group inside itself": (circle, "nested deeper than 12"),
}


@pytest.mark.parametrize(("change", "reason"), HDF5.values(), ids=HDF5)
def test_an_hdf5_file_that_weights_never_are_is_refused(
    change: Callable[[Any], object], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "a.h5").write_bytes(hdf5(change))
    with pytest.raises(CheckpointError, match=reason):
        open_weights(tmp_path / "a.h5")


ARCHIVES: dict[str, tuple[dict[str, int], str]] = {
    "10 GB from a few bytes": (
        {"file_size": 10**10},
        "its members unpack to far more bytes than weights need",
    ),
    "10 GB in the file": (
        {"file_size": 10**10, "compress_size": 10**10},
        "its members claim to take more bytes than the file has",
    ),
    "two members at one place": ({"header_offset": 0}, "File name in directory .* differ"),
    "a place outside": ({"header_offset": 2**40}, r"a\.keras is damaged or not a Keras file"),
    "a newer kind of archive": (
        {"extract_version": 99},
        r"a\.keras is damaged or not a Keras file",
    ),
    "another compression": ({"compress_type": 77}, r"a\.keras is damaged or not a Keras file"),
}
"""What the directory of an archive says about the file with the weights."""


@pytest.mark.parametrize(("sizes", "reason"), ARCHIVES.values(), ids=ARCHIVES)
def test_a_lying_archive_is_refused(sizes: dict[str, int], reason: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as file:
        file.writestr("config.json", "{}")
        file.writestr("model.weights.h5", hdf5(lambda _: None))
        for name, value in sizes.items():
            setattr(file.filelist[-1], name, value)
    with pytest.raises(CheckpointError, match=reason):
        open_weights(tmp_path / "a.keras")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("name", ["config.json", "model.weights.h5"])
def test_a_growing_member_takes_little_memory(name: str, compression: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.keras", "w", compression) as file:
        file.writestr({"config.json", "model.weights.h5"}.difference({name}).pop(), b"{}")
        with file.open(name, "w") as member:
            for _ in range(2 * MOST_BYTES // 2**20):
                member.write(bytes(2**20))
        file.filelist[-1].file_size = 2**20
    with (
        pytest.raises(CheckpointError, match=r"a\.keras is damaged or not a Keras file"),
        keras_variables.open_variables(tmp_path / "a.keras"),
    ):
        pass


def build_safetensors(header: Any, length: int | None = None, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS = {
    "a header of 4 EiB": build_safetensors({}, 2**62),
    "overlapping tensors": build_safetensors({"a": tensor(0, 64, 16), "b": tensor(32, 64, 8)}),
    "offsets beyond the end": build_safetensors({"a": tensor(2**60, 2**60 + 64, 16)}),
    "more numbers than bytes": build_safetensors({"a": tensor(0, 64, 2**40)}),
    "sizes whose product is 0 in 64 bits": build_safetensors({"a": tensor(0, 64, 2**32, 2**32)}),
    "65 axes": build_safetensors({"a": tensor(0, 4, *[1] * 65)}, data=bytes(4)),
    "an empty array of 2**65 rows": build_safetensors(
        {"a": tensor(0, 0, 0, 2**63 - 1, 4)}, data=b""
    ),
    "a size beyond 64 bits": build_safetensors({"a": tensor(0, 0, 0, 2**64 - 1)}, data=b""),
    "a deep header": build_safetensors(b"{" + DEEP.encode()),
    "deep metadata": build_safetensors(
        {"__metadata__": {"lockstep": DEEP}, "a": tensor(0, 64, 16)}
    ),
}


@pytest.mark.parametrize("data", SAFETENSORS.values(), ids=SAFETENSORS)
def test_a_safetensors_file_whose_header_lies_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a\.safetensors is not a safetensors file"):
        open_weights(tmp_path / "a.safetensors")


@pytest.mark.parametrize("location", ["x" * 300, "a\0b", "../../etc/passwd", "/etc/passwd"])
def test_external_data_in_impossible_places_is_refused(location: str, tmp_path: Path) -> None:
    kernel = onnx.TensorProto(
        name="w", dims=[1, 3, 1, 1], data_type=1, data_location=onnx.TensorProto.EXTERNAL
    )
    kernel.external_data.add(key="location", value=location)
    images = onnx.helper.make_tensor_value_info("x", 1, [1, 3, 8, 8])
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"])
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "a", [images], [onnx.ValueInfoProto(name="y")], [kernel])
    )
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=r"a\.onnx .*: ('w' is in the file|.*null byte)"):
        open_weights(tmp_path / "a.onnx")


def timm_folder(folder: Path, value: Any) -> None:
    torch.save(value, folder / "pytorch_model.bin")
    (folder / "config.json").write_text('{"architecture": "resnet18"}')


@pytest.mark.parametrize("value", [[1], {"fc.bias": 3}, {1: torch.zeros(2)}])
def test_timms_pickled_weights_must_be_tensors_by_name(value: Any, tmp_path: Path) -> None:
    timm_folder(tmp_path, value)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds no state_dict"):
        open_weights(tmp_path)


def header(key: str, entries: int, metadata: str) -> bytes:
    """Return a safetensors file of this many arrays without values, whose places are at `key`."""
    arrays = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],{key}:[0,0]}}' for i in range(entries))
    text = f'{{"__metadata__":{{{metadata}}}{"," if arrays else ""}{arrays}}}'.encode()
    return struct.pack("<Q", len(text)) + text


HEADERS: dict[str, tuple[bytes, str]] = {
    "many arrays": (
        header('"data_offsets"', 30_000, ""),
        "has 30,000 arrays; expected at most 20,000",
    ),
    "many arrays, spelled with escapes": (
        header('"data_\\u006fffsets"', 40_001, ""),
        "more entries than weights have",
    ),
    "much metadata": (
        header("", 0, ",".join(['"":0'] * (2**18 + 1))),
        "more entries than weights have",
    ),
    "a long header": (
        struct.pack("<Q", 2**25 + 1) + b"{",
        "can be read: its header has 33,554,433 bytes",
    ),
}


@pytest.mark.parametrize(("data", "reason"), HEADERS.values(), ids=HEADERS)
def test_a_header_with_more_than_weights_have_is_refused_before_it_is_parsed(
    data: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "deserialize", None)
    monkeypatch.setattr(checkpoint, "safe_open", None)
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(data)
        file.truncate(8 + int.from_bytes(data[:8], "little"))
    with pytest.raises(CheckpointError, match=rf"a\.safetensors .*{reason}"):
        open_weights(tmp_path / "a.safetensors")


def test_more_arrays_than_weights_have_are_refused_before_they_are_compared(tmp_path: Path) -> None:
    kernel = torch.zeros(1, 1, 1, 1)
    torch.save({str(i): kernel for i in range(20_001)}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match=r"a\.pth has 20,001 arrays.* 20,000"):
        open_weights(tmp_path / "a.pth")


def save_checkpoint(folder: Path, recipe: Recipe) -> Path:
    state = state_of(recipe)
    about = {"recipe": recipe.fields(), "classes": ["a"]}
    return checkpoint.save(
        folder, State(7, state.tensors, state.momentum), data_digest="", about=about
    )


def sign(text: str) -> str:
    """Return `state.json` with the digest that its content has."""
    about = json.loads(text)
    about.pop("own_sha256", None)
    return json.dumps(
        about
        | {"own_sha256": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}
    )


FIELDS: list[tuple[str, Any]] = [
    *(("step", value) for value in (None, -1, "a")),
    *(
        ("scaler", value)
        for value in (None, [], {"scale": 1.0}, {"scale": "1", "good_steps": 0, "bad_steps": 0})
    ),
    *(("data_digest", value) for value in (None, 3)),
    *(("sha256", value) for value in (None, "a", {}, {"model.safetensors": "", "../../a": ""})),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_field_of_state_json_of_another_kind_is_refused(
    field: str, value: Any, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    file = save_checkpoint(tmp_path, tiny_recipe) / "state.json"
    file.write_text(sign(json.dumps(json.loads(file.read_text()) | {field: value})))
    with pytest.raises(CheckpointError, match=rf"state\.json: {field} is .*; expected"):
        open_weights(file.parent)


@pytest.mark.parametrize(
    "read", [checkpoint.load, lambda folder: open_weights(folder, momentum=True)]
)
def test_velocities_with_a_right_digest_that_are_no_safetensors_are_refused(
    read: Callable[[Path], object], tiny_recipe: Recipe, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, tiny_recipe)
    (folder / "momentum.safetensors").write_bytes(b"{}")
    about = json.loads((folder / "state.json").read_text())
    about["sha256"]["momentum.safetensors"] = hashlib.sha256(b"{}").hexdigest()
    (folder / "state.json").write_text(sign(json.dumps(about)))
    with pytest.raises(CheckpointError, match=r"momentum\.safetensors is not"):
        read(folder)


def test_a_state_json_that_is_nested_deep_is_damaged(tiny_recipe: Recipe, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_recipe)
    (folder / "state.json").write_text(DEEP)
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        open_weights(folder)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fc.bias": np.zeros(4096, np.float32)}, r"weights: fc\.bias is \(4096,\), expected"),
        ({"fc.bias": np.zeros(10, np.int8)}, r"weights: fc\.bias is int8, expected float32"),
        ({"more": np.zeros(1, np.float32)}, r"weights: missing nothing, unknown \['more'\]"),
    ],
)
def test_weights_of_lockstep_that_do_not_fit_their_recipe_are_refused(
    changes: dict[str, np.ndarray], reason: str, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    write_lockstep(tmp_path / "a.safetensors", tiny_recipe, [], **changes)
    with pytest.raises(CheckpointError, match=reason):
        open_weights(tmp_path / "a.safetensors")


def write_lockstep(path: Path, recipe: Recipe, classes: list[str], **changes: np.ndarray) -> None:
    """Write weights of Lockstep, some of them others than the recipe's."""
    about = {"lockstep": json.dumps({"recipe": recipe.fields(), "classes": classes})}
    path.write_bytes(save(state_of(recipe).tensors | changes, metadata=about))


def test_too_many_names_of_classes_are_refused(tiny_recipe: Recipe, tmp_path: Path) -> None:
    write_lockstep(tmp_path / "a.safetensors", tiny_recipe, list("abcdefghijk"))
    with pytest.raises(CheckpointError, match="11 classes, but its recipe has 10"):
        open_weights(tmp_path / "a.safetensors")


def test_an_unencodable_name_of_a_class_is_escaped(tiny_recipe: Recipe, tmp_path: Path) -> None:
    write_lockstep(tmp_path / "a.safetensors", tiny_recipe, ["a", "\ud800"])
    assert open_weights(tmp_path / "a.safetensors").classes == ("a", "\\ud800")
