"""Small weights of every format that `open_weights` reads, and how they are damaged (see
`fuzz_weights`)."""

import io
import json
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from lockstep.inference import onnx_model
from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.models.state import State
from lockstep.system.strict_json import to_json
from lockstep.weights.formats import (
    flax_file,
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
    torch_writer,
)
from lockstep.weights.formats.tensor_bundle import pack_table, read_pairs
from tests.weights.formats.cases import state_of
from tests.weights.formats.fuzz_damage import (
    Files,
    damage_bytes,
    damage_hdf5,
    damage_json,
    damage_message,
    damage_value,
    odd_arrays,
)
from tests.weights.formats.fuzz_lockstep_samples import lockstep, safetensors
from tests.weights.formats.fuzz_sample_files import (
    CLASSES,
    Sample,
    damage_anywhere,
    damage_file,
    damage_header,
    damage_model,
    small_recipe,
    write_files,
)


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


def keras_h5(name: str) -> list[Sample]:
    """Return weights, and for the older layout also a whole model."""
    recipe = small_recipe("resnet50-v1")
    files = write_files(
        lambda folder: keras_file.write_keras(folder / name, recipe, state_of(recipe))
    )
    files[name[0]] = files.pop(name)
    damages = (damage_anywhere, damage_anywhere, damage_file(name[0], damage_hdf5))
    samples = [Sample(files, (name[0],), damages)]
    if not name.endswith(".weights.h5"):
        samples.append(Sample({name[0]: _add_config(files[name[0]])}, (name[0],), damages))
    return samples


def _config() -> dict[str, Any]:
    """Return the configuration of a model."""
    recipe = small_recipe("resnet50-v1")
    return keras_file._describe_network(recipe.spec, "predictions", 1.001e-5)


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
    recipe = small_recipe("resnet50-v1")
    [weights] = write_files(
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
                changed["model.weights.h5"] = damage_hdf5(rng, weights)
            case 2:
                changed[str(rng.choice(["/a", "../a", "C:/a", "a\\..\\b", "config.json/"]))] = (
                    changed.pop(str(rng.choice(list(members))))
                )
            case _:
                changed["model.weights.h5"] = damage_bytes(rng, weights)
        return {"model": _zip(changed, int(rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])))}

    return [
        Sample(
            {"model": _zip(members)}, ("model",), (damage_anywhere, _ends_of_zip, inside, inside)
        )
    ]


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

    recipe = small_recipe()
    model = onnx_model.build_model(recipe, state_of(recipe).tensors, CLASSES)
    whole = {"a/model.onnx": model.SerializeToString()}

    def outside(folder: Path) -> None:
        copied = onnx.load_model_from_string(whole["a/model.onnx"])
        path = str(folder / "model.onnx")
        onnx.save(copied, path, save_as_external_data=True, location="weights", size_threshold=0)

    split = write_files(outside)

    single = {"model.onnx": whole["a/model.onnx"]}
    return [
        Sample(single, ("model.onnx", ""), (damage_anywhere, damage_model("model.onnx", model))),
        Sample(
            split,
            ("model.onnx",),
            (
                damage_anywhere,
                damage_model("model.onnx", onnx.load_model_from_string(split["model.onnx"])),
            ),
        ),
    ]


def timm() -> list[Sample]:
    recipe = small_recipe()
    paths = ("", "config.json")
    files = write_files(
        lambda folder: timm_folder.write(folder / "a", recipe, state_of(recipe), CLASSES)
    )
    safe = {name.removeprefix("a/"): data for name, data in files.items()}
    arrays = load(safe["model.safetensors"])
    config = damage_file("config.json", damage_json)

    def odd(rng: np.random.Generator, files: Files) -> Files:
        return files | {"model.safetensors": save(odd_arrays(rng, arrays))}

    def odd_pickle(rng: np.random.Generator, files: Files) -> Files:
        return files | {"pytorch_model.bin": _convert_to_torch(damage_value(rng, arrays))}

    pickled = {"config.json": safe["config.json"], "pytorch_model.bin": _convert_to_torch(arrays)}
    header = damage_file("model.safetensors", damage_header)
    return [
        Sample(safe, (*paths, "model.safetensors"), (damage_anywhere, config, config, header, odd)),
        Sample(pickled, (*paths, "pytorch_model.bin"), (damage_anywhere, config, odd_pickle)),
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
    recipe = small_recipe()
    state = state_of(recipe)
    files = write_files(
        lambda folder: torch_writer.write_nvidia_pytorch(folder / "a.pth", recipe, state, epochs=3)
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
        Sample(files, ("a",), (damage_anywhere, odd)),
        Sample({"a": _convert_to_torch(vision)}, ("a",), (damage_anywhere, odd)),
    ]


def paddle() -> list[Sample]:
    recipe = small_recipe()
    scaler = {"scale": 128.0, "good_steps": 3.0, "bad_steps": 0.0}
    state = state_of(recipe)
    state = State(7, state.tensors, state.momentum, {}, scaler)
    files = write_files(lambda folder: nvidia_paddle.write(folder / "3" / "resnet", recipe, state))
    values = {name: pickle.loads(data) for name, data in files.items()}

    def odd(rng: np.random.Generator, files: Files) -> Files:
        name = str(rng.choice(sorted(values)))
        return files | {
            name: pickle.dumps(damage_value(rng, values[name]), int(rng.integers(2, 5)))
        }

    return [Sample(files, ("", "3", "3/resnet", "3/resnet.pdparams"), (damage_anywhere, odd))]


def tensorflow() -> list[Sample]:
    recipe = small_recipe(padding="same")
    state = state_of(recipe)
    prefix = "model.ckpt-7"
    files = write_files(lambda folder: nvidia_tensorflow.write(folder / prefix, recipe, state))
    [index] = [name for name in files if name.endswith(".index")]
    with tempfile.TemporaryDirectory() as name:
        for file, data in files.items():
            (Path(name) / file).write_bytes(data)
        bundle = tensor_bundle.Bundle(Path(name) / prefix)
        arrays = {name: bundle.read(name) for name in bundle.entries}
        pairs = list(read_pairs(tensor_bundle.Places(Path(name) / index)))

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
        return files | {index: pack_table(changed)}

    def odd(rng: np.random.Generator, files: Files) -> Files:
        values = {
            name: value
            for name, value in odd_arrays(rng, arrays).items()
            if value.dtype.str[1:] in _TENSORFLOWS
        }
        return files | write_files(lambda folder: tensor_bundle.write(folder / prefix, values))

    return [
        Sample(
            files,
            (prefix, "", index),
            (damage_anywhere, damage_file(index, damage_bytes), entry, odd),
        )
    ]


_TENSORFLOWS = ("f2", "f4", "f8", "i4", "i8")


def tensorflow_graphs() -> list[Sample]:
    """Return the exports of Lockstep: a frozen graph, and a SavedModel."""
    from lockstep.backends.tensorflow import export

    recipe = small_recipe()
    tensors = state_of(recipe).tensors
    samples = []
    for write, name, kind in (
        (export.export_frozen_graph, "a/frozen_graph.pb", "Graph"),
        (export.export, "a/saved_model.pb", "SavedModel"),
    ):
        files = write_files(
            lambda folder, write=write: write(
                recipe, tensors, CLASSES, folder / "a", to_json(recipe.preprocessing())
            )
        )  # type: ignore[misc]
        whole = tensorflow_graph.message(kind).FromString(files[name])

        damage = damage_model(name, whole)
        samples.append(
            Sample(
                files,
                ("a", name),
                (damage_anywhere, damage_file(name, damage_bytes), damage, damage),
            )
        )
    return samples


def mxnet() -> list[Sample]:
    recipe = small_recipe()
    paths = ("model", "", "model-0003.params")
    state = state_of(recipe)
    files = write_files(
        lambda folder: nvidia_mxnet.write(folder / "model-0003.params", recipe, state)
    )
    arrays, _ = nvidia_mxnet._name_arrays(recipe, state)

    def odd(rng: np.random.Generator, files: Files) -> Files:
        values = {
            name: value
            for name, value in odd_arrays(rng, arrays).items()
            if value.size and value.ndim and value.dtype.str[1:] not in ("c8", "u2")
        }
        return files | write_files(
            lambda folder: mxnet_params.dump(folder / "model-0003.params", values)
        )

    symbol = damage_file("model-symbol.json", damage_json)
    return [
        Sample(
            files,
            paths,
            (damage_anywhere, damage_file("model-0003.params", damage_bytes), symbol, symbol, odd),
        ),
        Sample({"model-0003.params": files["model-0003.params"]}, paths, (damage_anywhere, odd)),
    ]


def flax() -> list[Sample]:
    """Return variables in MessagePack, and in an archive of NumPy."""
    recipe = small_recipe().replace(padding="flax")
    state = State(0, state_of(recipe).tensors, {})

    def write(folder: Path) -> None:
        for name in ("a.msgpack", "a.npz"):
            flax_file.write_flax(folder / name, recipe, state)

    files = write_files(write)
    samples = []
    for name, data in files.items():
        begin = damage_file(name, lambda rng, data: damage_bytes(rng, data, 400))
        samples.append(Sample({name: data}, (name,), (damage_anywhere, damage_anywhere, begin)))
    return samples


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
    "flax": flax,
    "lockstep": lockstep,
    "pytorch": pytorch,
    "paddle": paddle,
}
