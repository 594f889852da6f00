"""Compute logits in a separate process: `python -m lockstep.weights.logits_process FOLDER BACKEND
NAME...`.

For every NAME, FOLDER holds the weights `NAME.safetensors`, their recipe `NAME.json`, and the
images `NAME.images.npy`, uint8 [N, size, size, 3]. The process writes `NAME.npy`: the logits,
float32 [N, logits], in fp32. It also writes `BACKEND.txt`: the version of the framework. Two
frameworks cannot share a process.

FOLDER may hold `NAME.files.json`, a list of paths. Then the framework itself reads these files, and
`NAME.read.json` gets the fingerprints of what it read, by path; null for a file that this version
of the framework does not read.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lockstep import backends
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.system.workers import end_with_parent, tell
from lockstep.weights.fingerprints import compute_fingerprints


def compute_logits(folder: Path, backend: str, names: list[str]) -> None:
    """Write the logits of the weights with these names."""
    execution = Execution(backend=backend, reference_dtype="float32", compile="off")
    module = backends.load(backend)
    world = module.world(execution)
    for done, name in enumerate(names, start=1):
        recipe = Recipe.of(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
        if (folder / f"{name}.files.json").exists():
            _write_readings(folder, backend, name, recipe)
        with module.engine(recipe, np.zeros(1), world, execution) as engine:
            engine.write(initial_state(recipe, load_file(folder / f"{name}.safetensors")))
            images = np.load(folder / f"{name}.images.npy")
            np.save(folder / f"{name}.npy", engine.predict(images))
        tell(done, len(names))
    (folder / f"{backend}.txt").write_text(
        str(backends.FRAMEWORKS[backend].version()), encoding="utf-8"
    )
    world.close()


def _write_readings(folder: Path, backend: str, name: str, recipe: Recipe) -> None:
    """Write the fingerprints of what the framework reads from the files of `NAME.files.json`."""
    read = importlib.import_module(f"lockstep.backends.{backend}.certificate").read
    readings = {}
    for path in json.loads((folder / f"{name}.files.json").read_text(encoding="utf-8")):
        values = read(Path(path), recipe)
        readings[path] = None if values is None else compute_fingerprints(values)
    text = json.dumps(readings, allow_nan=False)
    (folder / f"{name}.read.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    end_with_parent()
    compute_logits(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
