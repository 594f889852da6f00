"""Programs for ExecuTorch, which runs on phones: the model and softmax for one square, computed by
XNNPACK in fp32 or int8.

Where XNNPACK does not compute, as in the cast to float32, ExecuTorch's portable kernels do.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lockstep.backends.shared.import_side_effects import silence_output
from lockstep.backends.torch.export import SquareProgram
from lockstep.recipes import Recipe

with silence_output():  # torchao reports libraries for GPUs that it cannot load
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime
    from torchao.quantization.pt2e import MinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


def build_program(
    recipe: Recipe, tensors: dict[str, np.ndarray], squares: Iterable[np.ndarray] | None
) -> bytes:
    """Return the content of `model.pte`.

    The program takes a square, uint8 RGB [1, S, S, 3], and returns `classes`, int64 [1], and
    `probabilities`, float32 [1, logits]. With `squares`, uint8 [N, S, S, 3], it is quantised to
    int8 with the range of every value on them. Raises `CheckpointError` if the recipe computes in
    another precision than fp32, or if the tensors do not fit.
    """
    program = SquareProgram(recipe, tensors)
    example = (torch.zeros(1, recipe.eval_crop, recipe.eval_crop, 3, dtype=torch.uint8),)
    exported = torch.export.export(program, example)
    if squares is not None:
        exported = _quantise(exported, example, squares)
    with silence_output():
        lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        return bytes(lowered.to_executorch().buffer)


def _quantise(exported: Any, example: Any, squares: Iterable[np.ndarray]) -> Any:
    """Return a program in int8: weights with a scale for each output channel, values with one."""
    config = get_symmetric_quantization_config(is_per_channel=True)
    # The default, a histogram, takes many times as long as the model.
    observer = MinMaxObserver.with_args(eps=2**-12)
    values = replace(config.output_activation, observer_or_fake_quant_ctr=observer)
    config = replace(config, input_activation=values, output_activation=values)
    with silence_output():
        prepared = prepare_pt2e(exported.module(), XNNPACKQuantizer().set_global(config))
    with torch.no_grad():
        for batch in squares:
            for square in batch:
                prepared(torch.tensor(square[None]))
    with silence_output():
        return torch.export.export(convert_pt2e(prepared), example)


def load_program(data: bytes) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return a program in ExecuTorch's runtime: from a square, uint8 [1, S, S, 3], to classes and
    probabilities."""
    with silence_output():  # it reports files of phones' processors that it does not find
        program = Runtime.get().load_program(data)
        program.load_method("forward")

    def answer(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # The method itself does not keep its program in memory.
        method = program.load_method("forward")
        classes, probabilities = method.execute([torch.tensor(images)])
        return classes.numpy(), probabilities.numpy()

    return answer
