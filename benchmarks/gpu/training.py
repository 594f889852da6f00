"""Part: training steps of Lockstep's engine against the loops of `baselines`, alternately in one
process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.baselines import EAGER, OPTIMIZERS, Loop, Network
from benchmarks.gpu.bits import same_bits
from benchmarks.gpu.engines import Lockstep, recipe_of
from benchmarks.gpu.parts import DETERMINISTIC, FUSED, GRAPH, PLAIN
from benchmarks.gpu.timing import (
    Contender,
    Ground,
    Say,
    Turns,
    in_turns,
    interval,
    ratio_row,
    step_sec,
)
from lockstep.models.architectures import model_spec
from lockstep.models.operations import work
from lockstep.recipes import Recipe

MODES = {
    "default": (EAGER, "compile"),
    "max-autotune": ("max-autotune",),
    "reduce-overhead": ("reduce-overhead",),
    "precisions": (),
}
"""Which networks are compared with Lockstep, by the part's mode."""
GRAPHS = "reduce-overhead"
"""The mode in which captured steps are compared. They keep their memory, so few contenders are in
their part."""
AMONG_OURS = (GRAPHS, "precisions")
"""Modes in which engines of Lockstep are compared with each other, too."""
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """GPU memory that a contender took when it was built and warmed up, in GiB."""

    peak_gib: float | None
    reserved_gib: float | None


def measure(ground: Ground, say: Say, model: str, precision: str, batch: int, mode: str) -> None:
    """Write a row for every contender when it is built, then for its turns, for every ratio, and
    for the engines' bits."""
    recipe = recipe_of(ground, model, precision, batch)
    batch = recipe.global_batch_images
    same = {
        "model": model,
        "precision": precision,
        "batch": batch,
        "size": recipe.image_size,
        "mode": mode,
    }
    built: list[Contender] = []
    figures: dict[str, dict[str, Any]] = {}
    for name, build in _builders(recipe, ground, mode):
        try:
            made, about = _warmed_up(build, ground)
        except (
            Exception
        ) as error:  # too little memory, or a compiler's own errors: the others are still measured
            say(
                {
                    "what": "train",
                    "contender": name,
                    "status": "failed",
                    "reason": f"{type(error).__name__}: {error}"[:600],
                }
                | same
            )
            _forget(ground)
            continue
        for contender in made:
            built.append(contender)
            figures[contender.name] = about
            alone = contender.images / step_sec(contender, ground, 1 if ground.tiny else 10)
            say(
                {"what": "built", "contender": contender.name, "images_per_sec_alone": alone}
                | same
                | about
            )
    if not built:
        raise RuntimeError("no contender could be built; the rows say why")
    turns = Turns(most=2, seconds=0.05) if ground.tiny else Turns()
    rates = in_turns(built, ground, turns)
    for contender in built:
        say(_row(contender, rates[contender.name], ground) | figures[contender.name] | same)
    for ours in (name for name in rates if name.startswith("lockstep")):
        for other in (
            name
            for name in rates
            if name != ours and (mode in AMONG_OURS or not name.startswith("lockstep"))
        ):
            say(ratio_row(rates, ours, other) | same)
    for contender in built:
        if isinstance(
            contender, Lockstep
        ):  # those that are not deterministic may differ; whether they do is written, too
            say(
                {"what": "same bits", "contender": contender.name, "same": same_bits(contender, 5)}
                | same
            )


def _builders(
    recipe: Recipe, ground: Ground, mode: str
) -> list[tuple[str, Callable[[], list[Contender]]]]:
    """Return what builds the contenders, by name. Those that share a network are built together."""
    if mode == "precisions":
        names = ("bf16", "fp32") if ground.tiny else ("bf16", "tf32", "fp32")
        return [
            (f"lockstep {name}", lambda name=name: [_in_precision(recipe, ground, name)])
            for name in names
        ]  # type: ignore[misc]
    ours: list[tuple[str, Callable[[], list[Contender]]]] = [
        (PLAIN, lambda: [Lockstep(recipe, ground, name=PLAIN, deterministic=False)]),
    ]
    if mode == GRAPHS and ground.device == "cuda":
        ours.append(
            (
                GRAPH,
                lambda: [
                    Lockstep(recipe, ground, name=GRAPH, deterministic=False, cuda_graph="on")
                ],
            )
        )
    if mode == "default":
        ours.append(
            (
                DETERMINISTIC,
                lambda: [Lockstep(recipe, ground, name=DETERMINISTIC, deterministic=True)],
            )
        )
    if (
        mode == "default" and not ground.tiny
    ):  # on a CPU, Triton's interpreter takes many seconds for a step
        ours.append(
            (FUSED, lambda: [Lockstep(recipe, ground, name=FUSED, deterministic=False, fused="on")])
        )
    kinds = [("traced" if ground.tiny and kind == "compile" else kind) for kind in MODES[mode]]
    return ours + [(kind, lambda kind=kind: _loops(recipe, ground, kind)) for kind in kinds]


def _loops(recipe: Recipe, ground: Ground, kind: str) -> list[Contender]:
    network = Network(recipe, recipe.global_batch_images, ground.device, kind)
    return [Loop(network, optimizer) for optimizer in OPTIMIZERS]


def _in_precision(recipe: Recipe, ground: Ground, precision: str) -> Lockstep:
    changed = recipe.replace(precision=precision)
    return Lockstep(changed, ground, name=f"lockstep {precision}", deterministic=False)


def _warmed_up(
    build: Callable[[], list[Contender]], ground: Ground
) -> tuple[list[Contender], dict[str, Any]]:
    """Return contenders that have taken some steps, with the seconds of the first one, and their
    memory.

    A graph is captured, and kernels are chosen, in the first few steps.
    """
    before = _reset(ground)
    began = time.perf_counter()
    made = build()
    made[0].run(1)
    ground.wait()
    first = time.perf_counter() - began
    for contender in made:
        contender.run(1 if ground.tiny else 4)
    ground.wait()
    memory = _memory(ground, before)
    return made, {
        "first_step_sec": round(first, 2),
        "peak_gib": memory.peak_gib,
        "reserved_gib": memory.reserved_gib,
    }


def _reset(ground: Ground) -> tuple[int, int]:
    """Give unused memory back; return the bytes that other contenders hold: allocated, and
    reserved."""
    if ground.device != "cuda":
        return 0, 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _memory(ground: Ground, before: tuple[int, int]) -> Memory:
    if ground.device != "cuda":
        return Memory(None, None)
    peak = torch.cuda.max_memory_allocated() - before[0]
    reserved = torch.cuda.max_memory_reserved() - before[1]
    return Memory(round(peak / GIB, 2), round(reserved / GIB, 2))


def _forget(ground: Ground) -> None:
    if ground.device == "cuda":
        torch.cuda.empty_cache()


def _row(contender: Contender, rates: list[float], ground: Ground) -> dict[str, Any]:
    row: dict[str, Any] = {
        "what": "train",
        "contender": contender.name,
        "images_per_sec": sum(rates) / len(rates),
        "interval": list(interval(rates)),
        "turns": [round(rate, 2) for rate in rates],
    }
    if isinstance(contender, Lockstep):
        recipe = contender.recipe
        spec = model_spec(recipe.model)
        count = recipe.global_batch_images
        of_image = work(
            spec,
            recipe.image_size,
            recipe.logits,
            precision=recipe.precision,
            batch=count,
            training=True,
        )
        row |= {
            "flop_an_image": of_image.flops,
            "bytes_an_image": of_image.bytes,
            "computes_in": recipe.precision,
        }
        row |= contender.host_times(2 if ground.tiny else 10, 2 if ground.tiny else 5)
    return row
