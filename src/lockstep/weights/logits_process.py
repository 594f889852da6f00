"""Compute logits in a process of its own: `python -m lockstep.weights.logits_process FOLDER BACKEND NAME...`.

FOLDER holds `images.npy` (uint8 [N, size, size, 3]), and for every NAME the weights `NAME.safetensors` and their recipe
`NAME.json`. The process writes `NAME.npy`: the logits, float32 [N, logits], in fp32. It also writes `BACKEND.txt`: the
version of the framework. Two frameworks cannot share a process.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lockstep import backends
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.initial_weights import zero_momentum
from lockstep.system.workers import end_with_parent, tell


def logits(folder: Path, backend: str, names: list[str]) -> None:
    """Write the logits of the weights with these names."""
    images = np.load(folder / "images.npy")
    execution = Execution(backend=backend, reference_dtype="float32", compile="off")
    module = backends.load(backend)
    world = module.world(execution)
    for done, name in enumerate(names, start=1):
        recipe = Recipe.of(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
        with module.engine(recipe, np.zeros(1), world, execution) as engine:
            engine.write(State(0, load_file(folder / f"{name}.safetensors"), zero_momentum(recipe)))
            np.save(folder / f"{name}.npy", engine.predict(images))
        tell(done, len(names))
    (folder / f"{backend}.txt").write_text(str(backends.FRAMEWORKS[backend].version()), encoding="utf-8")
    world.close()


if __name__ == "__main__":
    end_with_parent()
    logits(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
