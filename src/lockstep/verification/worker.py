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
    def __init__(self, backend: Backend, world: World, execution: Execution, workload: Workload, *, rules: bool) -> None:
        """With `rules`, also the quantities that are held against definitions; of the reference they are not needed."""
        self._backend, self._world, self._execution, self._workload = backend, world, execution, workload
        self._rules = rules
        self._done, self._total = 0, len(workload.batches) + (7 if rules else 4)
        self.train_sec = 0.0

    def arrays(self) -> Arrays:
        """Return everything that is compared, by quantity."""
        found = self._inference() | self._single_step() | self._free_run() | self._loading()
        if self._rules:
            found |= self._momentum() | self._decay(found) | self._update()
        return found

    def _advance(self) -> None:
        self._done += 1
        print(json.dumps({"done": self._done, "total": self._total}), flush=True)

    def _engine(self, recipe: Recipe, rates: np.ndarray, state: State | None = None) -> Engine:
        """Return an engine at the workload's initial state, or at another."""
        engine = self._backend.engine(recipe, rates, self._world, self._execution)
        engine.write(state or self._workload.state)
        return engine

    def _inference(self) -> Arrays:
        with self._engine(self._workload.recipe, self._workload.rates) as engine:
            logits = engine.predict(self._workload.batches[0].images)
            self._advance()
            scores = engine.evaluate(self._workload.evaluation)
            self._advance()
        return {"logits": logits, "evaluation": scores.losses}

    def _single_step(self) -> Arrays:
        """Loss, gradient and statistics of a step without decay, and the gradient where no ReLU switches."""
        with self._engine(self._workload.recipe.replace(weight_decay=0.0), np.zeros(1)) as engine:
            loss = engine.fetch(engine.train(self._workload.batches[:1], 0)).losses
            state = engine.read()
        with self._engine(self._workload.recipe.replace(weight_decay=0.0), np.zeros(1), self._workload.steady) as engine:
            engine.train(self._workload.batches[:1], 0)
            steady = engine.read().momentum
        self._advance()
        return (
            {"loss": loss}
            | _below("gradient", state.momentum)
            | _below("steady gradient", steady)
            | _below("statistics", _statistics(state))
        )

    def _decay(self, found: Arrays) -> Arrays:
        """What decay adds to the gradient."""
        with self._engine(self._workload.recipe.replace(weight_decay=DECAY), np.zeros(1)) as engine:
            engine.train(self._workload.batches[:1], 0)
            velocity = engine.read().momentum
        self._advance()
        return _below(
            "decay", {name: value.astype(np.float64) - found[f"gradient/{name}"] for name, value in velocity.items()}
        )

    def _momentum(self) -> Arrays:
        """What is left of a velocity: at rate 0 a second step on the same images has the same gradient g; v = m * v + g."""
        velocities = []
        with self._engine(self._workload.recipe.replace(weight_decay=0.0), np.zeros(2)) as engine:
            for step in range(2):
                engine.train(self._workload.batches[:1], step)
                velocities.append(engine.read().momentum)
        self._advance()
        first, second = velocities
        return _below("momentum", {name: second[name].astype(np.float64) - value for name, value in first.items()})

    def _free_run(self) -> Arrays:
        """All steps, one after the other: losses, and how far the weights went."""
        losses = []
        began = time.perf_counter()
        with self._engine(self._workload.recipe, self._workload.rates, self._workload.steady) as engine:
            for step, batch in enumerate(self._workload.batches):
                losses.append(engine.fetch(engine.train([batch], step)).losses[0])
                self._advance()
            self.train_sec = time.perf_counter() - began
            end = engine.read()
        return {"losses": np.array(losses)} | _below("weights", _moved(end, self._workload.steady))

    def _update(self) -> Arrays:
        """How one step at a large rate moves the weights, and the velocity it left."""
        step = self._workload.telling_step
        with self._engine(self._workload.recipe, self._workload.large_rates) as engine:
            engine.train(self._workload.batches[step : step + 1], step)
            end = engine.read()
        self._advance()
        return _below("update", _moved(end, self._workload.state)) | _below("velocity", end.momentum)

    def _loading(self) -> Arrays:
        training, validation = loaded(self._workload.recipe, self._workload.data)
        self._advance()
        found: Arrays = {}
        for name in ("samples", "windows", "flips"):
            found[f"loader {name}"] = np.concatenate([getattr(plan, name) for plan, _ in (*training, *validation)])
        found["loader pixels"] = np.concatenate([batch.images.reshape(-1) for _, batch in (*training, *validation)])
        return found


def _moved(end: State, start: State) -> Arrays:
    return {name: end.tensors[name].astype(np.float64) - start.tensors[name] for name in end.momentum}


def _below(quantity: str, arrays: Arrays) -> Arrays:
    return {f"{quantity}/{name}": value for name, value in arrays.items()}


def _statistics(state: State) -> Arrays:
    return {name: value for name, value in state.tensors.items() if name not in state.momentum}


def main(folder: Path, name: str) -> None:
    """Carry out the workload in `folder`."""
    execution = Execution(backend=name)
    backend = backends.load(name)
    world = backend.world(execution)
    worker = _Worker(backend, world, execution, load(folder), rules=name != "reference")
    arrays = worker.arrays()
    save_arrays(folder / f"{name}.npz", arrays)
    about = {"version": backends.FRAMEWORKS[name].version(), "device": world.device, "train_sec": worker.train_sec}
    (folder / f"{name}.json").write_text(json.dumps(about), encoding="utf-8")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
