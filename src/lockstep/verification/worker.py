"""One engine at work: `python -m lockstep.verification.worker FOLDER BACKEND`.

Reads the workload from FOLDER, tells its progress as lines of JSON, and leaves BACKEND.npz (what is compared) and
BACKEND.json (what it ran on) there. A process of its own for every engine, since frameworks do not share one, and MXNet has
an environment of its own.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from lockstep import backends
from lockstep.backends import Backend, Engine, State, World
from lockstep.recipes import Execution, Recipe
from lockstep.verification.workload import DECAY, Arrays, Workload, load, loaded, save_arrays


class _Worker:
    def __init__(self, backend: Backend, world: World, execution: Execution, workload: Workload) -> None:
        self._backend, self._world, self._execution, self._workload = backend, world, execution, workload
        self._done, self._total = 0, len(workload.batches) + 7
        self.train_sec = 0.0

    def arrays(self) -> Arrays:
        """Return everything that is compared, by quantity."""
        found = self._inference() | self._single_step() | self._momentum() | self._free_run() | self._loading()
        return {name: np.asarray(value) for name, value in found.items()}

    def _advance(self) -> None:
        self._done += 1
        print(json.dumps({"done": self._done, "total": self._total}), flush=True)

    def _engine(self, recipe: Recipe, rates: np.ndarray) -> Engine:
        engine = self._backend.engine(recipe, rates, self._world, self._execution)
        engine.write(self._workload.state)
        return engine

    def _inference(self) -> Arrays:
        with self._engine(self._workload.recipe, self._workload.rates) as engine:
            logits = engine.predict(self._workload.batches[0].images)
            self._advance()
            scores = engine.evaluate(self._workload.evaluation)
            self._advance()
        return {"logits": logits, "evaluation": scores.losses}

    def _single_step(self) -> Arrays:
        """Loss, gradient and statistics of one step, and what decay adds to a velocity."""
        recipe, still = self._workload.recipe, np.zeros(1)
        first = self._workload.batches[:1]
        found: Arrays = {}
        with self._engine(recipe.replace(weight_decay=0.0), still) as engine:
            found["loss"] = engine.fetch(engine.train(first, 0)).losses
            plain = engine.read()
        self._advance()
        with self._engine(recipe.replace(weight_decay=DECAY), still) as engine:
            engine.train(first, 0)
            decayed = engine.read()
        self._advance()
        for name, gradient in plain.momentum.items():
            found[f"gradient/{name}"] = gradient
            found[f"decay/{name}"] = decayed.momentum[name].astype(np.float64) - gradient
        return found | {f"statistics/{name}": value for name, value in _statistics(plain).items()}

    def _momentum(self) -> Arrays:
        """What is left of a velocity: at rate 0 a second step on the same images has the same gradient g; v = m * v + g."""
        velocities = []
        with self._engine(self._workload.recipe.replace(weight_decay=0.0), np.zeros(2)) as engine:
            for step in range(2):
                engine.train(self._workload.batches[:1], step)
                velocities.append(engine.read().momentum)
                self._advance()
        first, second = velocities
        return {f"momentum/{name}": second[name].astype(np.float64) - value for name, value in first.items()}

    def _free_run(self) -> Arrays:
        """All steps, one after the other: losses, where the weights are in the end, and how the last step moved them."""
        losses = []
        began = time.perf_counter()
        with self._engine(self._workload.recipe, self._workload.rates) as engine:
            for step, batch in enumerate(self._workload.batches):
                losses.append(engine.fetch(engine.train([batch], step)).losses[0])
                self._advance()
            self.train_sec = time.perf_counter() - began
            end = engine.read()
        start = self._workload.state.tensors
        found = {f"weights/{name}": end.tensors[name].astype(np.float64) - start[name] for name in end.momentum}
        return found | self._update() | {"losses": np.array(losses)}

    def _update(self) -> Arrays:
        """How one step at a large rate moves the weights, and the velocity it left."""
        step, state = self._workload.telling_step, self._workload.state
        with self._engine(self._workload.recipe, self._workload.large_rates) as engine:
            engine.train(self._workload.batches[step : step + 1], step)
            end = engine.read()
        moved = {name: end.tensors[name].astype(np.float64) - state.tensors[name] for name in end.momentum}
        return {f"update/{name}": value for name, value in moved.items()} | {
            f"velocity/{name}": value for name, value in end.momentum.items()
        }

    def _loading(self) -> Arrays:
        training, validation = loaded(self._workload.recipe, self._workload.data)
        self._advance()
        found: Arrays = {}
        for name in ("samples", "windows", "flips"):
            found[f"loader {name}"] = np.concatenate([getattr(plan, name) for plan, _ in (*training, *validation)])
        found["loader pixels"] = np.concatenate([batch.images.reshape(-1) for _, batch in (*training, *validation)])
        return found


def _statistics(state: State) -> Arrays:
    return {name: value for name, value in state.tensors.items() if name not in state.momentum}


def main(folder: Path, name: str) -> None:
    """Carry out the workload in `folder`."""
    execution = Execution(backend=name)
    backend = backends.load(name)
    world = backend.world(execution)
    worker = _Worker(backend, world, execution, load(folder))
    arrays = worker.arrays()
    save_arrays(folder / f"{name}.npz", arrays)
    about = {"version": backends.FRAMEWORKS[name].version(), "device": world.device, "train_sec": worker.train_sec}
    (folder / f"{name}.json").write_text(json.dumps(about), encoding="utf-8")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
