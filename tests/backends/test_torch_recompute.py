"""Activation recomputation on PyTorch: the same bits from less memory."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lockstep.backends.torch.batch_norm import synchronise
from lockstep.backends.torch.recomputation import recompute_block
from lockstep.models.architectures import MODELS, ModelSpec, narrow_model
from lockstep.recipes import Recipe
from tests.backends.cases import BASIC, all_bits
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import draw_batch, draw_batches

backend = make_backend_fixture("torch")


@pytest.mark.parametrize(
    ("changes", "mixup", "parts"),
    [
        ({}, "none", 1),
        ({"ema_decay": 0.9, "stochastic_depth": 0.6}, "sample", 2),
        ({"precision": "bf16", "stochastic_depth": 0.6}, "none", 1),
        ({"precision": "fp16", "loss_scaling": "dynamic"}, "none", 1),
        ({"quantisation": "int8", "precision": "bf16"}, "sample", 1),
        ({"model": BASIC, "padding": "same"}, "none", 1),
    ],
    ids=["fp32", "moving average in two parts", "bf16", "fp16", "int8", "basic blocks"],
)
def test_a_run_that_computes_activations_twice_has_the_same_bits(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], mixup: str, parts: int
) -> None:
    # The state has the running statistics, which would be others if the second pass moved them,
    # too.
    recipe = tiny_recipe.replace(**changes)
    ends = []
    for recompute in ("off", "blocks"):
        engine = start(recipe, accumulation_steps=parts, recompute=recompute)
        losses = engine.fetch(engine.train(draw_batches(recipe, 3, mixup=mixup), 0)).losses
        scores = engine.evaluate([draw_batch(recipe)])
        ends.append((losses.tobytes(), all_bits(engine.read()), scores.losses.tobytes()))
    assert ends[0] == ends[1]


def test_blocks_are_computed_twice(start: Start, tiny_recipe: Recipe) -> None:
    passes = []
    for recompute in ("off", "blocks"):
        engine: Any = start(tiny_recipe, recompute=recompute, new=True)
        seen: list[str] = []
        for name, module in engine.model.named_modules():
            module.register_forward_pre_hook(
                lambda module, inputs, name=name, seen=seen: seen.append(name)
            )
        engine.train([draw_batch(tiny_recipe)], 0)
        passes.append(
            [
                seen.count(name)
                for name in ("conv1", "layer1.0.conv1", "layer1.0.conv3", "layer4.0.bn3", "fc")
            ]
        )
    assert passes == [[1, 1, 1, 1, 1], [1, 2, 2, 2, 1]]


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_batch_norm_over_ranks_moves_its_statistics_once(alone_in_a_group: None) -> None:
    x = torch.arange(48.0).reshape(2, 3, 2, 4)
    ends = []
    for twice in (False, True):
        block = synchronise(torch.nn.Sequential(torch.nn.BatchNorm2d(3)), torch.device("cpu"))
        y = recompute_block(block, x) if twice else block(x)
        (y * x).sum().backward()
        ends.append({name: value.tolist() for name, value in block.state_dict().items()})
        ends[-1] |= {
            f"{name}.grad": np.asarray(value.grad).tolist()
            for name, value in block.named_parameters()
        }
    assert ends[0] == ends[1]
    assert ends[1]["0.running_mean"] != [0.0, 0.0, 0.0]


def test_a_compiled_step_has_the_same_bits_and_keeps_less(
    start: Start, tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the compiler's last stage, which makes code of the graphs.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    recipe = tiny_recipe.replace(model=replace(BASIC, layers=(1, 1, 1, 1)), stochastic_depth=0.6)
    batch = draw_batch(recipe, mixup="sample")
    ends = []
    kept = []
    for recompute in ("off", "blocks"):
        engine = start(recipe, new=True, compile="on", recompute=recompute)
        kept.append(count_kept_bytes(engine, batch))
        engine.fetch(engine.train([batch], 1))
        ends.append(all_bits(engine.read()))
    torch.compiler.reset()
    assert ends[0] == ends[1]
    assert kept[1] < 0.85 * kept[0]


# Memory


def count_kept_bytes(engine: Any, batch: Any) -> int:
    """Return the bytes of what a step keeps for its backward pass, without parameters and running
    statistics."""
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*engine.model.parameters(), *engine.model.buffers())
    }
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.train([batch], 0)
    return sum(kept.values())


def count_kept_values(spec: ModelSpec, size: int, logits: int, *, recompute: bool) -> int:
    """Return how many float32 values a training step keeps of an image, from the model's shapes
    alone.

    A convolution keeps its input and a batch norm its input. A ReLU works in place, so its result
    is the input of the next convolution. A residual block adds in place to its last batch norm, so
    the batch norm of its shortcut is not kept.
    """
    [first] = spec.list_stem()
    side = size // first.stride
    stem_values = 3 * size**2 + 2 * first.outputs * side**2  # image, convolution, ReLU
    side //= 2
    pooled = first.outputs * side**2
    # The pool's result, and an int64 index for each of its values.
    values = stem_values + 3 * pooled
    for block in spec.list_blocks():
        inside = 0
        for conv in block.convs:
            side //= conv.stride
            inside += 2 * conv.outputs * side**2
        output = block.convs[-1].outputs * side**2
        shortcut = output if block.shortcut is not None else 0
        values += output if recompute else inside + shortcut
    # Of the last block's output only the mean is needed. Then log-softmax, and the label of 8
    # bytes.
    return values - (output if recompute else 0) + spec.features + logits + 2


@pytest.mark.parametrize("model", ["resnet50", "resnext101-32x4d", "resnet18"])
def test_kept_memory_is_that_of_the_shapes(start: Start, tiny_recipe: Recipe, model: str) -> None:
    recipe = tiny_recipe.replace(model=narrow_model(MODELS[model]), label_smoothing=0.0)
    for recompute in ("off", "blocks"):
        engine = start(recipe, recompute=recompute, new=True)
        # The difference of two batches: what does not grow with the batch, such as means and
        # deviations, falls out.
        few, many = (
            count_kept_bytes(engine, draw_batch(recipe, count, size=64)) for count in (2, 4)
        )
        expected = 4 * count_kept_values(
            recipe.spec, 64, recipe.logits, recompute=recompute == "blocks"
        )
        assert (many - few) / 2 == expected
