"""Small weights of every format that `open_weights` reads, and how they are damaged (see
`fuzz_weights`)."""

import hashlib
import io
import json
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from lockstep.inference import onnx_model
from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights import checkpoint
from lockstep.weights.formats import (
    keras_file,
    mxnet_params,
    nvidia_mxnet,
    nvidia_paddle,
    nvidia_tensorflow,
    tensor_bundle,
    tensorflow_graph,
    timm_config,
    timm_folder,
    torch_file,
    torch_writing,
)
from tests.weights.formats import fuzz_damage
from tests.weights.formats.cases import state_of
from tests.weights.formats.fuzz_damage import (
    Damage,
    Files,
    damage_bytes,
    damage_json,
    damage_message,
    damage_value,
    odd_arrays,
)

LOGITS = 3
CLASSES = ("a", "b", "c")


@dataclass(frozen=True)
class Sample:
    """Whole weights."""

    files: Files
    paths: tuple[str, ...]
    """The paths inside the folder by which they are opened."""
    damages: tuple[Damage, ...]


def shrink_models() -> None:
    """Leave four models, for this process, all of them small, so that files have some tens of KB
    and are read fast."""

    def small(block: Any, **other: Any) -> ModelSpec:
        return ModelSpec(
            block=block, layers=(1, 1, 1, 1), stem_width=4, widths=(2, 4, 6, 8), **other
        )

    kept = {
        "resnet18": small("basic", expansion=1),
        "resnet50": small("bottleneck", expansion=2),
        "resnet50-v1": small("bottleneck", expansion=2, stride_in="1x1"),
        "resnext101-32x4d": small("bottleneck", expansion=2, groups=2),
    }
    for table in (MODELS, keras_file._MODELS):
        for name in [name for name in table if name not in kept]:
            del table[name]
    for name in [name for name, model in timm_config._ARCHITECTURES.items() if model not in kept]:
        del timm_config._ARCHITECTURES[name]
    MODELS.update(kept)


def _recipe(model: str = "resnet50", **changes: Any) -> Recipe:
    return Recipe(model=model, logits=LOGITS, precision="fp32").replace(**changes)


def _written(write: Callable[[Path], object]) -> Files:
    """Return the files that a function writes into an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }


def _in(name: str, change: Callable[[np.random.Generator, bytes], bytes]) -> Damage:
    """Return a damage of one file."""
    return lambda rng, files: files | {name: change(rng, files[name])}


def _anywhere(rng: np.random.Generator, files: Files) -> Files:
    """Damage the bytes of any file; seldom remove one."""
    name = str(rng.choice(sorted(files)))
    if rng.integers(300) == 0:
        return {other: data for other, data in files.items() if other != name}
    return files | {name: damage_bytes(rng, files[name], None if rng.integers(2) else 4096)}


def keras_h5(name: str) -> list[Sample]:
    """Return weights, and for the older layout also a whole model."""
    recipe = _recipe("resnet50-v1")
    files = _written(lambda folder: keras_file.write_keras(folder / name, recipe, state_of(recipe)))
    files[name[0]] = files.pop(name)
    damages = (_anywhere, _anywhere, _in(name[0], fuzz_damage.of_hdf5))
    samples = [Sample(files, (name[0],), damages)]
    if not name.endswith(".weights.h5"):
        samples.append(Sample({name[0]: _add_config(files[name[0]])}, (name[0],), damages))
    return samples


def _config() -> dict[str, Any]:
    """Return the configuration of a model, shortened."""
    conv = [
        {
            "class_name": "Conv2D",
            "config": {"name": f"conv3_block1_{i}_conv", "strides": [3 - i, 3 - i]},
        }
        for i in (1, 2)
    ]
    norm = {"class_name": "BatchNormalization", "config": {"name": "conv1_bn", "epsilon": 1.001e-5}}
    return {"class_name": "Functional", "config": {"name": "resnet50", "layers": [*conv, norm]}}


def _add_config(data: bytes) -> bytes:
    """Return a file of weights as that of a whole model."""
    import h5py

    memory = io.BytesIO()
    with h5py.File(io.BytesIO(data), "r") as weights, h5py.File(memory, "w") as file:
        file.attrs["model_config"] = json.dumps(_config())
        group = file.create_group("model_weights")
        for name in weights:
            weights.copy(name, group)
    return memory.getvalue()


def keras_archive() -> list[Sample]:
    recipe = _recipe("resnet50-v1")
    [weights] = _written(
        lambda folder: keras_file.write_keras(folder / "a.weights.h5", recipe, state_of(recipe))
    ).values()
    members = {
        "config.json": json.dumps(_config()).encode(),
        "metadata.json": b"{}",
        "model.weights.h5": weights,
    }

    def inside(rng: np.random.Generator, files: Files) -> Files:
        """Damage members, with right checksums; the last time their names."""
        changed = dict(members)
        match rng.integers(5):
            case 0:
                changed["config.json"] = damage_json(rng, changed["config.json"])
            case 1:
                changed["model.weights.h5"] = fuzz_damage.of_hdf5(rng, weights)
            case 2:
                changed[str(rng.choice(["/a", "../a", "C:/a", "a\\..\\b", "config.json/"]))] = (
                    changed.pop(str(rng.choice(list(members))))
                )
            case _:
                changed["model.weights.h5"] = damage_bytes(rng, weights)
        return {"model": _zip(changed, int(rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])))}

    return [Sample({"model": _zip(members)}, ("model",), (_anywhere, _ends_of_zip, inside, inside))]


def _ends_of_zip(rng: np.random.Generator, files: Files) -> Files:
    """Damage the directory at the end of an archive."""
    [(name, data)] = files.items()
    at = data.rfind(b"PK\x01\x02", 0, data.rfind(b"PK\x01\x02"))
    return {name: data[:at] + damage_bytes(rng, data[at:])}


def _zip(members: Files, how: int = zipfile.ZIP_STORED) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", how) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return memory.getvalue()


def onnx() -> list[Sample]:
    """Return a model of `lockstep export`, alone and with its constants in another file."""
    import onnx

    recipe = _recipe()
    model = onnx_model.build_model(recipe, state_of(recipe).tensors, CLASSES)
    whole = {"a/model.onnx": model.SerializeToString()}

    def outside(folder: Path) -> None:
        copied = onnx.load_model_from_string(whole["a/model.onnx"])
        path = str(folder / "model.onnx")
        onnx.save(copied, path, save_as_external_data=True, location="weights", size_threshold=0)

    split = _written(outside)

    def damage_model(whole: Any) -> Damage:
        def change(rng: np.random.Generator, files: Files) -> Files:
            copied = onnx.ModelProto()
            copied.CopyFrom(whole)
            damage_message(rng, copied)
            return files | {"model.onnx": copied.SerializeToString()}

        return change

    single = {"model.onnx": whole["a/model.onnx"]}
    return [
        Sample(single, ("model.onnx", ""), (_anywhere, damage_model(model))),
        Sample(
            split,
            ("model.onnx",),
            (_anywhere, damage_model(onnx.load_model_from_string(split["model.onnx"]))),
        ),
    ]


def _header(rng: np.random.Generator, data: bytes) -> bytes:
    """Damage the header of a safetensors file: its text, its values, or its length."""
    length = int.from_bytes(data[:8], "little")
    match rng.integers(4):
        case 0:
            return damage_bytes(rng, data, 8 + length)
        case 1:
            return damage_bytes(rng, data[:8]) + data[8:]
        case _:
            header = damage_json(rng, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _metadata(rng: np.random.Generator, data: bytes) -> bytes:
    """Damage the metadata of Lockstep in the header of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["lockstep"] = damage_json(
        rng, header["__metadata__"]["lockstep"]
    ).decode()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _about(recipe: Recipe) -> dict[str, Any]:
    return {"recipe": recipe.fields(), "classes": list(CLASSES)}


def safetensors() -> list[Sample]:
    """Return files of another program and of Lockstep."""
    recipe = _recipe()
    arrays = state_of(recipe).tensors
    metadata = {"lockstep": json.dumps(_about(recipe))}

    def odd(rng: np.random.Generator, files: Files) -> Files:
        return {name: save(odd_arrays(rng, arrays)) for name in files}

    def odd_of_lockstep(rng: np.random.Generator, files: Files) -> Files:
        return {name: save(odd_arrays(rng, arrays), metadata=metadata) for name in files}

    return [
        Sample({"a": save(arrays)}, ("a",), (_anywhere, _in("a", _header), odd)),
        Sample(
            {"a": save(arrays, metadata=metadata)},
            ("a",),
            (_anywhere, _in("a", _header), _in("a", _metadata), odd_of_lockstep),
        ),
    ]


def timm() -> list[Sample]:
    recipe = _recipe()
    paths = ("", "config.json")
    files = _written(
        lambda folder: timm_folder.write(folder / "a", recipe, state_of(recipe), CLASSES)
    )
    safe = {name.removeprefix("a/"): data for name, data in files.items()}
    arrays = timm_folder._build_state_dict(recipe, state_of(recipe))
    config = _in("config.json", damage_json)

    def odd(rng: np.random.Generator, files: Files) -> Files:
        return files | {"model.safetensors": save(odd_arrays(rng, arrays))}

    def odd_pickle(rng: np.random.Generator, files: Files) -> Files:
        return files | {"pytorch_model.bin": _convert_to_torch(damage_value(rng, arrays))}

    pickled = {"config.json": safe["config.json"], "pytorch_model.bin": _convert_to_torch(arrays)}
    header = _in("model.safetensors", _header)
    return [
        Sample(safe, (*paths, "model.safetensors"), (_anywhere, config, config, header, odd)),
        Sample(pickled, (*paths, "pytorch_model.bin"), (_anywhere, config, odd_pickle)),
    ]


def _convert_to_torch(value: Any) -> bytes:
    """Return values as PyTorch saves them, arrays as tensors."""
    import torch

    def convert(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            return torch.from_numpy(
                part.astype(np.int32) if part.dtype == np.uint16 else part.copy()
            )
        if isinstance(part, dict):
            return {key: convert(inner) for key, inner in part.items()}
        return [convert(inner) for inner in part] if isinstance(part, list) else part

    file = io.BytesIO()
    torch.save(convert(value), file)
    return file.getvalue()


def pytorch() -> list[Sample]:
    """Return a checkpoint of NVIDIA's code, and a whole one of torchvision's script with a moving
    average."""
    recipe = _recipe()
    state = state_of(recipe)
    files = _written(
        lambda folder: torch_writing.write_nvidia_pytorch(folder / "a.pth", recipe, state, epochs=3)
    )
    files = {"a": files["a.pth"]}

    def values(folder: Path) -> Any:
        (folder / "a").write_bytes(files["a"])
        return torch_file.load(folder / "a")

    with tempfile.TemporaryDirectory() as folder:
        nvidia = values(Path(folder))
    scaler = {"scale": 128.0, "_growth_tracker": 3}
    vision = {
        "model": state.tensors,
        "model_ema": state.tensors,
        "epoch": 7,
        "args": {},
        "scaler": scaler,
    }

    def odd(rng: np.random.Generator, files: Files) -> Files:
        return {"a": _convert_to_torch(damage_value(rng, nvidia if rng.integers(2) else vision))}

    return [
        Sample(files, ("a",), (_anywhere, odd)),
        Sample({"a": _convert_to_torch(vision)}, ("a",), (_anywhere, odd)),
    ]


def paddle() -> list[Sample]:
    recipe = _recipe()
    scaler = {"scale": 128.0, "good_steps": 3.0, "bad_steps": 0.0}
    state = state_of(recipe)
    state = State(7, state.tensors, state.momentum, {}, scaler)
    files = _written(lambda folder: nvidia_paddle.write(folder / "3" / "resnet", recipe, state))
    values = {name: pickle.loads(data) for name, data in files.items()}

    def odd(rng: np.random.Generator, files: Files) -> Files:
        name = str(rng.choice(sorted(values)))
        return files | {
            name: pickle.dumps(damage_value(rng, values[name]), int(rng.integers(2, 5)))
        }

    return [Sample(files, ("", "3", "3/resnet", "3/resnet.pdparams"), (_anywhere, odd))]


def tensorflow() -> list[Sample]:
    recipe = _recipe(padding="same")
    state = state_of(recipe)
    prefix = "model.ckpt-7"
    files = _written(lambda folder: nvidia_tensorflow.write(folder / prefix, recipe, state))
    [index] = [name for name in files if name.endswith(".index")]
    with tempfile.TemporaryDirectory() as name:
        for file, data in files.items():
            (Path(name) / file).write_bytes(data)
        bundle = tensor_bundle.Bundle(Path(name) / prefix)
        arrays = {name: bundle.read(name) for name in bundle.entries}
        pairs = list(tensor_bundle._pairs(tensor_bundle.Places(Path(name) / index)))

    def entry(rng: np.random.Generator, files: Files) -> Files:
        """Damage the entries of tensors, with right checksums."""
        changed = list(pairs)
        for _ in range(int(rng.integers(1, 3))):
            at = int(rng.integers(len(changed)))
            name, value = pairs[at]
            message = tensor_bundle._message("Entry" if name else "Header").FromString(value)
            damage_message(rng, message)
            changed[at] = (
                name,
                damage_bytes(rng, value)
                if rng.integers(2) and value
                else message.SerializeToString(),
            )
        return files | {index: tensor_bundle._table(changed)}

    def odd(rng: np.random.Generator, files: Files) -> Files:
        values = {
            name: value
            for name, value in odd_arrays(rng, arrays).items()
            if value.dtype.str[1:] in _TENSORFLOWS
        }
        return files | _written(lambda folder: tensor_bundle.write(folder / prefix, values))

    return [Sample(files, (prefix, "", index), (_anywhere, _in(index, damage_bytes), entry, odd))]


_TENSORFLOWS = ("f2", "f4", "f8", "i4", "i8")


def tensorflow_graphs() -> list[Sample]:
    """Return the exports of Lockstep: a frozen graph, and a SavedModel."""
    from lockstep.backends.tensorflow import export

    recipe = _recipe()
    tensors = state_of(recipe).tensors
    samples = []
    for write, name, kind in (
        (export.export_frozen_graph, "a/frozen_graph.pb", "Graph"),
        (export.export, "a/saved_model.pb", "SavedModel"),
    ):
        files = _written(lambda folder, write=write: write(recipe, tensors, CLASSES, folder / "a"))  # type: ignore[misc]
        whole = tensorflow_graph.message(kind).FromString(files[name])

        def damage_model(
            rng: np.random.Generator, files: Files, name: str = name, whole: Any = whole
        ) -> Files:
            copied = type(whole)()
            copied.CopyFrom(whole)
            damage_message(rng, copied)
            return files | {name: copied.SerializeToString()}

        samples.append(
            Sample(
                files, ("a", name), (_anywhere, _in(name, damage_bytes), damage_model, damage_model)
            )
        )
    return samples


def mxnet() -> list[Sample]:
    recipe = _recipe()
    paths = ("model", "", "model-0003.params")
    state = state_of(recipe)
    files = _written(lambda folder: nvidia_mxnet.write(folder / "model-0003.params", recipe, state))
    expected = nvidia_mxnet.fitting(MODELS["resnet50"], LOGITS, state)
    arrays = nvidia_mxnet._stored(expected, nvidia_mxnet.names(MODELS["resnet50"]), state.tensors)

    def odd(rng: np.random.Generator, files: Files) -> Files:
        values = {
            name: value
            for name, value in odd_arrays(rng, arrays).items()
            if value.size and value.ndim
        }
        values = {
            name: value for name, value in values.items() if value.dtype.str[1:] not in ("c8", "u2")
        }
        return files | _written(
            lambda folder: mxnet_params.dump(folder / "model-0003.params", values)
        )

    symbol = _in("model-symbol.json", damage_json)
    return [
        Sample(
            files, paths, (_anywhere, _in("model-0003.params", damage_bytes), symbol, symbol, odd)
        ),
        Sample({"model-0003.params": files["model-0003.params"]}, paths, (_anywhere, odd)),
    ]


def lockstep() -> list[Sample]:
    """Return a checkpoint's folder."""
    recipe = _recipe(ema_decay=0.9)
    state = state_of(recipe)
    scaler = {"scale": 128.0, "good_steps": 3.0, "bad_steps": 0.0}
    whole = State(7, state.tensors, state.momentum, state.tensors, scaler)
    files = _written(
        lambda folder: checkpoint.save(folder, whole, data_digest="", about=_about(recipe))
    )
    files = {Path(name).name: data for name, data in files.items()}

    def digests(files: Files) -> Files:
        about = json.loads(files["state.json"])
        about["sha256"] = {
            name: hashlib.sha256(data).hexdigest()
            for name, data in files.items()
            if name != "state.json"
        }
        return files | {"state.json": _sign(json.dumps(about).encode())}

    def damage_about(rng: np.random.Generator, files: Files) -> Files:
        about = json.loads(files["state.json"])
        del about["own_sha256"]
        return files | {"state.json": _sign(damage_json(rng, json.dumps(about).encode()))}

    def damage_part(rng: np.random.Generator, files: Files) -> Files:
        name = str(rng.choice([name for name in files if name != "state.json"]))
        change = _metadata if name == "model.safetensors" and rng.integers(2) else _header
        return digests(files | {name: change(rng, files[name])})

    def odd(rng: np.random.Generator, files: Files) -> Files:
        name = str(rng.choice([name for name in files if name != "state.json"]))
        values = state.momentum if name == "momentum.safetensors" else state.tensors
        metadata = {"lockstep": json.dumps(_about(recipe))}
        return digests(files | {name: save(odd_arrays(rng, values), metadata=metadata)})

    return [Sample(files, ("",), (_anywhere, damage_about, damage_part, odd))]


def _sign(text: bytes) -> bytes:
    """Return the text of `state.json` with its digest, as docs/checkpoints.md describes it."""
    try:
        about = json.loads(text)
        about.pop("own_sha256", None)
        digest = hashlib.sha256(
            json.dumps(about, sort_keys=True, allow_nan=False).encode()
        ).hexdigest()
        return json.dumps(about | {"own_sha256": digest}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text


SAMPLES: dict[str, Callable[[], list[Sample]]] = {
    "keras-h5": partial(keras_h5, "a.h5"),
    "keras-weights-h5": partial(keras_h5, "a.weights.h5"),
    "keras-archive": keras_archive,
    "onnx": onnx,
    "safetensors": safetensors,
    "timm": timm,
    "tensorflow": tensorflow,
    "tensorflow-graphs": tensorflow_graphs,
    "mxnet": mxnet,
    "lockstep": lockstep,
    "pytorch": pytorch,
    "paddle": paddle,
}
