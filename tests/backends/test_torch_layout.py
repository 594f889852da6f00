"""Tests for layout and precision on PyTorch: what each operator of a step gets and gives, forward
and backward."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.recipes import Recipe
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import draw_batch

backend = make_backend_fixture("torch")


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made_nchw: Counter[str] = Counter()
        """Operators with an activation as result that is not channels_last."""
        self.casts: Counter[tuple[torch.dtype, torch.dtype, tuple[int, ...]]] = Counter()
        """Casts, from and to which type, and the shape."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and is_activation(tensor)
                and not is_channels_last(tensor)
            ):
                self.made_nchw[name] += 1
        if name == "_to_copy" and result.dtype != args[0].dtype:
            self.casts[args[0].dtype, result.dtype, tuple(result.shape)] += 1
        return result


def is_activation(tensor: Tensor) -> bool:
    """Return whether a tensor [N, C, H, W] lies differently in both layouts, and is no image [N, H,
    W, 3] in bytes."""
    return (
        tensor.dim() == 4
        and min(tensor.shape[1], tensor.shape[2] * tensor.shape[3]) > 1
        and tensor.is_floating_point()
    )


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_changes_its_layout(start: Start, tiny_recipe: Recipe, precision: str) -> None:
    engine = start(tiny_recipe.replace(precision=precision))
    with _Seen() as seen:
        engine.train([draw_batch(tiny_recipe, mixup="sample", size=64)], 0)
    # The gradient of the mean over pixels has no layout of its own. The ReLU's gradient, which
    # reads it, is channels_last.
    assert seen.made_nchw == {"expand": 1, "div": 1}


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_are_cast_once_in_a_part(start: Start, tiny_recipe: Recipe, parts: int) -> None:
    recipe = tiny_recipe.replace(precision="bf16")
    engine = start(recipe, accumulation_steps=parts)
    with _Seen() as seen:
        engine.train([draw_batch(recipe)], 0)
    table = recipe.list_tensors()
    shapes = Counter(
        tensor.shape for tensor in table if len(tensor.shape) > 1 or tensor.name == "fc.bias"
    )
    for types in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        result = {shape: seen.casts[(*types, shape)] for shape in shapes}
        assert result == {shape: parts * n for shape, n in shapes.items()}
