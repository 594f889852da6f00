"""Part: the same bits twice, after a resume and from a CUDA graph; and a step on the GPU against
one on the CPU.

The models are narrow ones of the published kinds. Fused kernels come last.
"""

from typing import Any

import torch

from benchmarks.gpu.bits import digest_of_state
from benchmarks.gpu.engines import PRECISIONS, held_batch, open_engine, recipe_of
from benchmarks.gpu.timing import Ground, Say
from lockstep.backends import Engine
from lockstep.data import Batch
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_state
from lockstep.verification.bounds import BOUNDS, angle, distance

STEPS = 6
BATCH = 16
SIZE = 64
CAPTURED = ("bf16", "fp16 dynamic")
"""Precisions in which captured steps are compared with plain ones."""


def measure(ground: Ground, say: Say) -> None:
    """Write a row for every model and precision, and one for a step on the GPU against the CPU."""
    cells = [("resnet50", precision) for precision in PRECISIONS] + [("resnext101-32x4d", "bf16")]
    for model, precision in [("resnet50", "fp32")] if ground.tiny else cells:
        recipe = _small(recipe_of(ground, model, precision, BATCH), model)
        say(
            {"what": "repeated", "model": f"narrow {model}", "precision": precision}
            | _repeated(recipe, ground)
        )
        # an engine is a module of its own to the compiler, which keeps few of a kind
        torch.compiler.reset()
    single = _small(recipe_of(ground, "resnet50", "fp32", BATCH), "resnet50")
    say({"what": "gpu against cpu"} | _against_cpu(single, ground))
    for precision in CAPTURED if ground.device == "cuda" else ():
        recipe = _small(recipe_of(ground, "resnet50", precision, BATCH, ema_decay=0.99), "resnet50")
        say(
            {"what": "captured", "model": "narrow resnet50", "precision": precision}
            | _captured(recipe, ground)
        )
    if not ground.tiny:  # on a CPU, Triton's interpreter takes many seconds for a step
        mixed = _small(recipe_of(ground, "resnet50", "bf16", BATCH), "resnet50")
        row = {"what": "repeated", "model": "narrow resnet50, fused", "precision": "bf16"}
        say(row | _repeated(mixed, ground, fused="on"))
        torch.compiler.reset()
        row |= {"what": "captured"}
        say(row | _captured(mixed, ground, fused="on"))
        say({"what": "gpu against cpu", "fused": True} | _against_cpu(single, ground, fused="on"))


def _small(recipe: Recipe, model: str) -> Recipe:
    size = min(recipe.image_size, SIZE)
    return recipe.replace(
        model=narrow_model(MODELS[model]), image_size=size, eval_crop=size, eval_resize=size
    )


def _run(engine: Engine, state: State, batches: list[Batch]) -> tuple[State, bytes]:
    """Return the state and the bytes of the losses after steps from a state."""
    engine.write(state)
    losses = engine.fetch(engine.train(batches, state.step)).losses
    return engine.read(), losses.tobytes()


def _repeated(recipe: Recipe, ground: Ground, **how: Any) -> dict[str, bool]:
    """Return whether a second run, and a run that is resumed half way, end with the same bits.

    All are in one engine, because compiling takes longest. The part `killed` resumes in another
    process.
    """
    batches = [held_batch(recipe, seed) for seed in range(STEPS)]
    start = initial_state(recipe)
    with open_engine(recipe, ground.device, **how) as engine:
        whole, losses = _run(engine, start, batches)
        half, _ = _run(engine, start, batches[: STEPS // 2])
        again, losses_again = _run(engine, start, batches)
        resumed, late = _run(engine, half, batches[STEPS // 2 :])
    moved = digest_of_state(whole) != digest_of_state(half)
    return {
        "same": moved
        and digest_of_state(whole) == digest_of_state(again)
        and losses == losses_again,
        "resumed": moved
        and digest_of_state(whole) == digest_of_state(resumed)
        and losses.endswith(late),
    }


def _captured(recipe: Recipe, ground: Ground, **how: Any) -> dict[str, bool]:
    """Return whether steps from a CUDA graph end with the bits of plain ones. The first three are
    not from the graph."""
    ends = []
    for asked in ("off", "on"):
        with open_engine(recipe, ground.device, cuda_graph=asked, **how) as engine:
            batches = [held_batch(recipe, seed) for seed in range(2 * STEPS)]
            state, losses = _run(engine, initial_state(recipe), batches)
        ends.append((digest_of_state(state), losses))
        torch.compiler.reset()
    return {"same": ends[0] == ends[1]}


def _against_cpu(recipe: Recipe, ground: Ground, **how: Any) -> dict[str, Any]:
    """Return how far a step in fp32 on the device is from one on the CPU, with the bounds of
    `lockstep verify`."""
    ends = {}
    for device, execution in (("cpu", {}), (ground.device, how)):
        with open_engine(recipe, device, **execution) as engine:
            ends[device] = _run(engine, initial_state(recipe), [held_batch(recipe)])[0]
    # At the initial weights, rounding switches some ReLUs, so the direction of the whole gradient
    # is compared.
    found = ends[ground.device].momentum
    expected = ends["cpu"].momentum
    off = angle(found, expected)
    bound = BOUNDS["direction"].value
    row = {"device": ground.device, "off": off, "bound": bound, "passed": off <= bound}
    return row | {"largest_difference": distance(found, expected)}
