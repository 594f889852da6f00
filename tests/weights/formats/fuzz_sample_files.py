"""Whole weights in files, and ways to damage them that all formats share (see `fuzz_weights`)."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.recipes import Recipe
from tests.weights.formats.fuzz_damage import (
    Damage,
    Files,
    damage_bytes,
    damage_json,
    damage_message,
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


def small_recipe(model: str = "resnet50", **changes: Any) -> Recipe:
    return Recipe(model=model, logits=LOGITS, precision="fp32").replace(**changes)


def write_files(write: Callable[[Path], object]) -> Files:
    """Return the files that a function writes into an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }


def damage_file(name: str, change: Callable[[np.random.Generator, bytes], bytes]) -> Damage:
    """Return a damage of one file."""
    return lambda rng, files: files | {name: change(rng, files[name])}


def damage_anywhere(rng: np.random.Generator, files: Files) -> Files:
    """Damage the bytes of any file; seldom remove one."""
    name = str(rng.choice(sorted(files)))
    if rng.integers(300) == 0:
        return {other: data for other, data in files.items() if other != name}
    return files | {name: damage_bytes(rng, files[name], None if rng.integers(2) else 4096)}


def damage_header(rng: np.random.Generator, data: bytes) -> bytes:
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


def damage_model(name: str, whole: Any) -> Damage:
    """Return a damage of one file that holds a message of Protocol Buffers."""

    def change(rng: np.random.Generator, files: Files) -> Files:
        copied = type(whole)()
        copied.CopyFrom(whole)
        damage_message(rng, copied)
        return files | {name: copied.SerializeToString()}

    return change
