"""Compare the JAX engine's step with one that is written with Flax and Optax (`flax_step.py`), and
with the PyTorch engine's, in fp32 on a CPU.

    python benchmarks/jax_step.py --contender-python VENV/bin/python

Flax and Optax are in an environment of their own, with the same version of jax. Every contender is
a process that compiles once and then takes single steps, alternately with the others, so that other
work on the machine affects all of them. On a busy machine the seconds of processor time say more.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.recipes import Execution
from measuring import describe_load, engine, make_batch, median, recipe, record, round_all, seconds

WARMUP = 2
RESNET = "resnet50"
RESNEXT = "resnext101-32x4d"


class Contender:
    """A process that takes a step for every line of its input, and prints its seconds and those of
    processor time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, steps: int = 1) -> None:
        """Let it take steps."""
        assert self._process.stdin
        self._process.stdin.write(steps * "\n")
        self._process.stdin.flush()

    def read(self) -> tuple[float, float]:
        """Wait for a step, and return its seconds and those of processor time."""
        assert self._process.stdout
        sec, processor_sec = map(float, self._process.stdout.readline().split())
        return sec, processor_sec

    def close(self) -> None:
        """Wait for the process to end."""
        self._process.communicate()


def take_steps(backend: str, model: str, batch: int, size: int) -> None:
    """For every line of the input, take a step of an engine and print its seconds."""
    held = replace(make_batch(size, batch), is_held=True)
    changes = {"model": model, "precision": "fp32", "global_batch_images": batch}
    built, _ = engine(recipe(**changes), Execution.of({"backend": backend}))
    for step, _ in enumerate(sys.stdin):
        began = time.process_time()
        sec = seconds(lambda: built.fetch(built.train([held], step)))  # noqa: B023
        print(sec, time.process_time() - began, flush=True)


def compare(commands: dict[str, list[str]], rounds: int) -> dict[str, Any]:
    """Return the seconds of steps that are taken alternately, and the medians of the ratios of the
    second contender to the first."""
    contenders = {name: Contender(command) for name, command in commands.items()}
    for contender in contenders.values():
        contender.begin(WARMUP)
    for contender in contenders.values():
        for _ in range(WARMUP):
            contender.read()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            contender.begin()
            times[name].append(contender.read())
            print(name, *times[name][-1], flush=True)
    for contender in contenders.values():
        contender.close()
    result: dict[str, Any] = {}
    for column, what in enumerate(("sec", "processor_sec")):
        listed = {name: [turn[column] for turn in turns] for name, turns in times.items()}
        first, second = listed.values()
        result |= {f"{name}_{what}": round_all(values) for name, values in listed.items()}
        result[f"ratio_{what}"] = round(
            median(b / a for a, b in zip(first, second, strict=True)), 3
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender-python", default=sys.executable)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps-of", nargs=2, metavar=("BACKEND", "MODEL"))
    arguments = parser.parse_args()
    shape = [arguments.batch, arguments.size]
    if arguments.steps_of:
        take_steps(*arguments.steps_of, *shape)
        return

    def ours(backend: str, model: str) -> list[str]:
        options = ["--batch", str(shape[0]), "--size", str(shape[1])]
        return [sys.executable, __file__, *options, "--steps-of", backend, model]

    flax = [arguments.contender_python, str(Path(__file__).with_name("flax_step.py"))]
    flax += map(str, shape)
    result = {
        "what": (
            f"seconds of a training step in fp32, {shape[1]} px, batch {shape[0]}; ratios are"
            " medians over steps taken alternately"
        ),
        "load": describe_load(),
        f"{RESNET}: flax over jax": compare(
            {"jax": ours("jax", RESNET), "flax": flax}, arguments.rounds
        ),
        f"{RESNEXT}: jax over torch": compare(
            {"torch": ours("torch", RESNEXT), "jax": ours("jax", RESNEXT)}, arguments.rounds
        ),
    }
    record("jax_step", result, backend="jax")


if __name__ == "__main__":
    main()
