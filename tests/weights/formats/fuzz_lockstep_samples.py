"""Small files of Lockstep and of safetensors, and how they are damaged (see `fuzz_weights`)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights import checkpoint
from tests.weights.formats.cases import state_of
from tests.weights.formats.fuzz_damage import Files, damage_json, odd_arrays
from tests.weights.formats.fuzz_sample_files import (
    CLASSES,
    Sample,
    damage_anywhere,
    damage_file,
    damage_header,
    small_recipe,
    write_files,
)


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
    recipe = small_recipe()
    arrays = state_of(recipe).tensors
    metadata = {"lockstep": json.dumps(_about(recipe))}

    def odd(rng: np.random.Generator, files: Files) -> Files:
        return {name: save(odd_arrays(rng, arrays)) for name in files}

    def odd_of_lockstep(rng: np.random.Generator, files: Files) -> Files:
        return {name: save(odd_arrays(rng, arrays), metadata=metadata) for name in files}

    return [
        Sample(
            {"a": save(arrays)}, ("a",), (damage_anywhere, damage_file("a", damage_header), odd)
        ),
        Sample(
            {"a": save(arrays, metadata=metadata)},
            ("a",),
            (
                damage_anywhere,
                damage_file("a", damage_header),
                damage_file("a", _metadata),
                odd_of_lockstep,
            ),
        ),
    ]


def lockstep() -> list[Sample]:
    """Return a checkpoint's folder."""
    recipe = small_recipe(ema_decay=0.9)
    state = state_of(recipe)
    scaler = {"scale": 128.0, "good_steps": 3.0, "bad_steps": 0.0}
    whole = State(7, state.tensors, state.momentum, state.tensors, scaler)
    files = write_files(
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
        change = _metadata if name == "model.safetensors" and rng.integers(2) else damage_header
        return digests(files | {name: change(rng, files[name])})

    def odd(rng: np.random.Generator, files: Files) -> Files:
        name = str(rng.choice([name for name in files if name != "state.json"]))
        values = state.momentum if name == "momentum.safetensors" else state.tensors
        metadata = {"lockstep": json.dumps(_about(recipe))}
        return digests(files | {name: save(odd_arrays(rng, values), metadata=metadata)})

    return [Sample(files, ("",), (damage_anywhere, damage_about, damage_part, odd))]


def _sign(text: bytes) -> bytes:
    """Return the text of `state.json` with its digest, as docs/reference/checkpoints.md describes
    it."""
    try:
        about = json.loads(text)
        about.pop("own_sha256", None)
        digest = hashlib.sha256(
            json.dumps(about, sort_keys=True, allow_nan=False).encode()
        ).hexdigest()
        return json.dumps(about | {"own_sha256": digest}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text
