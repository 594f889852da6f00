"""The parts of the campaign, the most valuable ones first. A part is a function `measure` in a
module and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

PLAIN = "lockstep, not deterministic"
"""Lockstep's engine as the loops run that it is compared with: with kernels that may sum in any
order."""
DETERMINISTIC = "lockstep, deterministic"
"""Lockstep's engine as it is by default."""
FUSED = "lockstep, fused"
"""`PLAIN` with fused kernels. Whether it is faster decides what `fused: auto` uses."""
GRAPH = "lockstep, CUDA graph"
"""`PLAIN` with a step that is captured. Whether it is faster decides what `cuda_graph: auto` does.
"""


@dataclass(frozen=True)
class Part:
    """One part of the campaign."""

    name: str
    module: str
    """The module whose function `measure(ground, say, **settings)` measures it."""
    what: str
    """What is measured, in a line."""
    expected_sec: float
    """Seconds that it is expected to need. It is not begun if fewer are left."""
    limit_sec: float
    """Seconds after which its process is killed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """Packages without which it is `missing`."""

    def missing(self) -> str:
        """Return what the part needs and this Python does not have; "" if nothing is missing."""
        absent = [name for name in self.needs if not _is_there(name)]
        return f"needs {', '.join(absent)}" if absent else ""


def _training(
    model: str, precision: str, batch: int, expected_sec: float, *, mode: str = "default"
) -> Part:
    more = "" if mode == "default" else f"-{mode}"
    return Part(
        f"train-{model}-{precision}-{batch}{more}",
        "benchmarks.gpu.training",
        f"training {model} in {precision} at batch {batch}: Lockstep, eager and torch.compile"
        f" ({mode})",
        expected_sec,
        2.5 * expected_sec,
        {"model": model, "precision": precision, "batch": batch, "mode": mode},
    )


RESNET = "resnet50"
RESNEXT = "resnext101-32x4d"


def _others() -> list[Part]:
    """Return the parts of frameworks and loaders that are measured where they are installed."""
    arguments = ["--model", RESNET, "--dtype", "bf16", "-b", "128", "-i", "30"]
    data = [
        "--data",
        "DRAWN",
        "--set",
        "loader=dali-gpu",
        "--dtype",
        "bf16",
        "-b",
        "128",
        "-i",
        "20",
    ]
    rows = {
        "tensorflow": (
            "tensorflow",
            ["--backend", "tensorflow", "--compile", "off,on", *arguments],
        ),
        "paddle": ("paddle", ["--backend", "paddle", *arguments]),
        "mxnet": ("mxnet", ["--backend", "mxnet", *arguments]),
        "dali-gpu": ("nvidia.dali", data),
    }
    return [
        Part(
            name,
            "benchmarks.gpu.others",
            f"lockstep benchmark train, {name}",
            90,
            280,
            {"arguments": found},
            (package,),
        )
        for name, (package, found) in rows.items()
    ]


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def all_parts() -> list[Part]:
    """Return the parts of a campaign on a GPU."""
    return [
        Part(
            "machine",
            "benchmarks.gpu.machine",
            "doctor, versions, rates of copies and matrix products",
            15,
            90,
        ),
        _training(RESNET, "bf16", 256, 170),
        Part(
            "repeated",
            "benchmarks.gpu.exact",
            "the same bits twice and after a resume; GPU against CPU",
            100,
            270,
        ),
        Part(
            "profile-resnet50",
            "benchmarks.gpu.profiling",
            "gaps between kernels, and the longest kernels",
            40,
            150,
        ),
        Part(
            "conformance",
            "benchmarks.gpu.conformance",
            "the conformance suite",
            60,
            280,
            needs=("pytest",),
        ),
        Part(
            "verify",
            "benchmarks.gpu.verifying",
            "lockstep verify on GPU and CPU, in every precision",
            90,
            280,
        ),
        Part(
            "killed",
            "benchmarks.gpu.killed",
            "lockstep train, killed and resumed, bit for bit",
            100,
            280,
        ),
        _training(RESNET, "fp16", 256, 140),
        Part(
            "precisions",
            "benchmarks.gpu.training",
            "training resnet50 in bf16, tf32 and fp32",
            100,
            240,
            {"model": RESNET, "precision": "bf16", "batch": 128, "mode": "precisions"},
        ),
        _training(RESNET, "bf16", 256, 150, mode="reduce-overhead"),
        Part(
            "jpegs",
            "benchmarks.gpu.jpegs",
            "the loader with 1 to 16 threads, and training from JPEGs",
            140,
            300,
        ),
        _training(RESNET, "bf16", 256, 200, mode="max-autotune"),
        _training(RESNEXT, "bf16", 128, 200),
        _training(RESNEXT, "bf16", 128, 240, mode="max-autotune"),
        Part("memory", "benchmarks.gpu.memory", "what is said when memory is short", 20, 120),
        Part(
            "inference",
            "benchmarks.gpu.inferring",
            "inference at batch 1 to 256, engines that are installed",
            90,
            280,
        ),
        Part(
            "kernels",
            "benchmarks.gpu.kernels",
            "fused kernels against their plain path",
            120,
            280,
            needs=("triton",),
        ),
        Part(
            "ranks",
            "benchmarks.gpu.ranks",
            "two processes on one GPU by gloo; NCCL with more GPUs",
            40,
            150,
        ),
        Part(
            "profile-resnext101",
            "benchmarks.gpu.profiling",
            "the same for ResNeXt",
            80,
            200,
            {"model": RESNEXT},
        ),
        _training(RESNEXT, "fp16", 128, 200),
        _training(RESNET, "fp16", 256, 200, mode="max-autotune"),
        _training(RESNET, "bf16", 128, 140),
        _training(RESNEXT, "bf16", 256, 200),
        *_others(),
        _training(RESNEXT, "fp16", 128, 240, mode="max-autotune"),
        _training(RESNET, "fp16", 128, 140),
        _training(RESNEXT, "fp16", 256, 200),
    ]


TINY = (
    "machine",
    "repeated",
    "conformance",
    "verify",
    "killed",
    "memory",
    "inference",
    "kernels",
    "ranks",
)


def tiny_parts() -> list[Part]:
    """Return parts that try every module on a CPU, in fp32, which every CPU multiplies."""
    parts = [part for part in all_parts() if part.name in TINY]
    parts.insert(1, _training(RESNET, "fp32", 4, 120))
    for name in ("profiling", "jpegs"):
        part = next(part for part in all_parts() if part.module.endswith(name))
        parts.append(replace(part, settings={"precisions": ("fp32",)}))
    return parts
