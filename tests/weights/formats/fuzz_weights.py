"""A fuzzer of the readers of weights: `python -m tests.weights.formats.fuzz_weights --files 10000`
(see `make fuzz`).

It damages small weights of every format, and reads them: the bytes of their files, and also values
below right checksums and lengths, such as the configuration inside a `.keras` archive.
`open_weights` must raise a `LockstepError`, or return weights that fit the model. The containers of
PyTorch and Paddle are read alone, too (`fuzz_pickles`).

Each format is read in a process that may take 1 GiB more memory than for whole files and 20 seconds
for a file. If it dies, that is a wrong answer, and another process continues with the next file.
The separate process in which `open_weights` reads files of Keras first is left out, and started
only for files on which HDF5's library died: then it must refuse them.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import Tensor
from lockstep.system.errors import LockstepError
from lockstep.weights import LOCKSTEP, Weights, open_weights
from lockstep.weights.formats import keras_process
from tests.weights.formats import fuzz_samples
from tests.weights.formats.fuzz_damage import damage_bytes
from tests.weights.formats.fuzz_samples import SAMPLES, Sample

MOST_MEMORY = 2**30
MOST_SECONDS = 20
PICKLES = ("pth-zip", "pth-old", "pdparams")
KINDS = (*SAMPLES, *PICKLES)
UNWRITABLE = (
    *(ValueError, TypeError, KeyError, IndexError, RuntimeError, OSError, AttributeError),
    LockstepError,
)
"""What libraries raise if a random value cannot be written at all. The file is then read whole."""
Judge = Callable[[np.random.Generator, Path], str]
"""Writes a damaged file into an empty folder and reads it; returns "refused", "read" or "wrong"
with a reason."""


def unlike(actual: Weights) -> str:
    """Return what does not fit in weights; "" if they are what users of `open_weights` rely on."""
    recipe = actual.recipe
    state = actual.state
    expected = list(recipe.list_tensors())
    if "fc.bias" not in state.tensors and actual.origin != LOCKSTEP:
        expected = [tensor for tensor in expected if not tensor.name.startswith("fc.")]
    trained = [tensor for tensor in expected if tensor.is_trained]
    parts = {
        "tensors": (expected, state.tensors),
        "momentum": (trained, state.momentum),
        "ema": (expected, state.ema),
    }
    for part, (fitting, arrays) in parts.items():
        if (arrays or part == "tensors") and not _fit(fitting, arrays):
            return part
    if type(state.step) is not int or state.step < 0:
        return "step"
    if not isinstance(state.scaler, dict) or not all(
        isinstance(value, float | int) and math.isfinite(value) for value in state.scaler.values()
    ):
        return "scaler"
    if len(actual.classes) > recipe.logits or not all(
        isinstance(name, str) for name in actual.classes
    ):
        return "classes"
    try:
        "".join(
            (
                *actual.classes,
                *actual.remarks,
                actual.origin,
                *(array.name + array.dtype for array in actual.stored),
            )
        ).encode()
    except (TypeError, UnicodeEncodeError):
        return "texts"
    if not {name for array in actual.stored for name in array.tensors} <= state.tensors.keys():
        return "stored"
    return "" if isinstance(actual.epochs, int | None) else "epochs"


def _fit(expected: list[Tensor], arrays: dict[str, np.ndarray]) -> bool:
    shapes = {
        name: value.shape
        for name, value in arrays.items()
        if isinstance(value, np.ndarray) and value.dtype == "f4"
    }
    return len(shapes) == len(arrays) and shapes == {
        tensor.name: tensor.shape for tensor in expected
    }


def judge(path: Path, *, momentum: bool = True) -> str:
    try:
        weights = open_weights(path, momentum=momentum, needs_classifier=False)
    except LockstepError as error:
        str(error).encode(errors="backslashreplace")  # as on the terminal's stderr
        return "refused"
    odd = unlike(weights)
    return f"wrong: {odd} do not fit" if odd else "read"


def judge_samples(kind: str) -> Judge:
    """Return the judge of a format. Raises `AssertionError` if whole weights are not read."""
    fuzz_samples.shrink_models()
    keras_process.check = lambda path: None
    samples = SAMPLES[kind]()
    for sample in samples:
        for path in sample.paths:
            with tempfile.TemporaryDirectory() as folder:
                _store(Path(folder), sample)
                assert judge(Path(folder) / path) == "read", (kind, path)

    def judge_one(rng: np.random.Generator, folder: Path) -> str:
        sample = samples[int(rng.integers(len(samples)))]
        damage = sample.damages[int(rng.integers(len(sample.damages)))]
        try:
            files = damage(rng, sample.files)
        except UNWRITABLE:
            files = sample.files | {"damage": b""}
        _store(folder, Sample(files, sample.paths, ()))
        return judge(folder / str(rng.choice(sample.paths)), momentum=rng.random() < 0.7)

    return judge_one


def _store(folder: Path, sample: Sample) -> None:
    for name, data in sample.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def judge_pickles(kind: str) -> Judge:
    """Return the judge of a container of PyTorch or Paddle."""
    import torch

    from tests.weights.formats import fuzz_pickles

    draw, judge_value = fuzz_pickles.KINDS[kind]

    def judge_one(rng: np.random.Generator, folder: Path) -> str:
        torch.manual_seed(int(rng.integers(2**31)))
        whole = draw(rng)
        (folder / "any").write_bytes(damage_bytes(rng, whole))
        return judge_value(folder / "any", whole)

    with tempfile.TemporaryDirectory() as folder:
        judge_one(np.random.default_rng(0), Path(folder))
    return judge_one


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(kind: str, seed: int, numbers: range, keep: Path) -> None:
    """Read files; print a line before each one and one with the answer. The last line is the growth
    of memory in bytes."""
    warnings.simplefilter("ignore")  # PyTorch's, about odd pickles
    judge = judge_pickles(kind) if kind in PICKLES else judge_samples(kind)
    before = peak()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY, mapped + MOST_MEMORY))
    for number in numbers:
        print(json.dumps({"number": number}), flush=True)
        # A library may hang outside of Python: the process is killed.
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        folder = keep / f"{kind}-{seed}-{number}"
        folder.mkdir(parents=True)
        try:
            verdict = judge(np.random.default_rng([seed, KINDS.index(kind), number]), folder)
        except Exception as error:
            frames = [
                frame
                for frame in traceback.extract_tb(error.__traceback__)
                if "/src/lockstep/" in frame.filename
            ]
            if not frames:
                raise
            verdict = (
                f"wrong: {type(error).__name__} in"
                f" {Path(frames[-1].filename).name}:{frames[-1].lineno}"
            )
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not verdict.startswith("wrong"):
            shutil.rmtree(folder)
        print(json.dumps({"verdict": verdict}), flush=True)
    print(json.dumps({"grown": peak() - before}), flush=True)


def again(folder: Path, died: str) -> str:
    """Read the file of a process that died, with all protection."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    command = [sys.executable, "-m", "tests.weights.formats.fuzz_weights", "--again", str(files[0])]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=10 * MOST_SECONDS, check=False
    )
    is_refused = len(files) == 1 and done.stdout.strip() == "refused"
    return f"refused after {died}" if is_refused else f"wrong: {died}"


def answers(kind: str, seed: int, files: int, keep: Path) -> Iterator[tuple[str, int]]:
    """Yield the verdict of each file, and growths of memory, each with the other empty."""
    begin = 0
    while begin < files:
        command = [
            sys.executable,
            "-m",
            "tests.weights.formats.fuzz_weights",
            "--child",
            kind,
            "--keep",
            str(keep),
        ]
        command += ["--seed", str(seed), "--begin", str(begin), "--files", str(files)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            number = -1
            for line in process.stdout:
                answer = json.loads(line)
                number = answer.get("number", number)
                if "verdict" in answer or "grown" in answer:
                    yield answer.get("verdict", ""), answer.get("grown", 0)
        if process.returncode == 0:
            return
        if process.returncode > 0 or number < begin:
            raise RuntimeError(f"the process of {kind} ended with {process.returncode}")
        yield again(keep / f"{kind}-{seed}-{number}", signal.Signals(-process.returncode).name), 0
        begin = number + 1


def campaign(kind: str, seed: int, files: int, keep: Path) -> dict[str, Any]:
    """Return a format's row of the table."""
    begin = time.monotonic()
    counts = Counter[str]()
    grown = 0
    for verdict, growth in answers(kind, seed, files, keep):
        counts.update([verdict] if verdict else [])
        grown = max(grown, growth)
    row = {"format": kind, "files": counts.total(), "refused": counts.pop("refused", 0)}
    wrong = {verdict: count for verdict, count in counts.items() if verdict.startswith("wrong")}
    dead = {
        verdict: count for verdict, count in counts.items() if verdict.startswith("refused after")
    }
    row |= {
        "read": counts.total() - sum(wrong.values()) - sum(dead.values()),
        "wrong": wrong,
        "library died": dead,
    }
    return row | {"memory_mib": grown // 2**20, "seconds": round(time.monotonic() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--files", type=int, default=10_000, help="Number of damaged files of each format."
    )
    parser.add_argument("--formats", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="Formats that are read at the same time."
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("build/fuzz"),
        help="Where files with a wrong answer are written.",
    )
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--again", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.again:
        keras_process.LEAST_SECONDS = MOST_SECONDS
        print(judge(options.again))
        return
    if options.child:
        child(options.child, options.seed, range(options.begin, options.files), options.keep)
        return
    for kind in options.formats:
        for folder in options.keep.glob(f"{kind}-{options.seed}-*"):
            shutil.rmtree(folder)
    is_right = True
    with ThreadPoolExecutor(options.jobs) as pool, contextlib.suppress(BrokenPipeError):
        for row in pool.map(
            lambda kind: campaign(kind, options.seed, options.files, options.keep), options.formats
        ):
            print(json.dumps(row), flush=True)
            is_right &= not row["wrong"]
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
