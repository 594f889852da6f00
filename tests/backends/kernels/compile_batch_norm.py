"""The kernels of batch norm, compiled for GPUs that are not there."""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from lockstep.backends.torch.kernels import batch_norm
from tests.soak import SOAK

POINTERS = {"weight", "bias", "statistics", "partials", "gradients"}
ACTIVATIONS = {"x", "residual", "y", "dy", "dz", "dx"}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("_statistics", {}),
    ("_finish_statistics", {}),
    ("_apply", {"ADDS": False, "RELU": False}),
    ("_apply", {"ADDS": False, "RELU": True}),
    ("_apply", {"ADDS": True, "RELU": True}),
    ("_gradient_sums", {"ADDS": False, "RELU": True}),
    ("_gradient_sums", {"ADDS": True, "RELU": True}),
    ("_finish_gradient_sums", {}),
    ("_input_gradient", {"RELU": True}),
    # Triton makes arguments that are 1 constants, such as the number of blocks of 64 channels.
    ("_statistics", {"blocks": 1}),
    ("_statistics", {"programs": 1}),
    ("_finish_statistics", {"programs": 1}),
    ("_apply", {"ADDS": True, "RELU": True, "blocks": 1}),
    ("_gradient_sums", {"ADDS": False, "RELU": True, "blocks": 1, "programs": 1}),
    ("_finish_gradient_sums", {"programs": 1}),
    ("_input_gradient", {"RELU": True, "blocks": 1}),
]
TYPES, ARCHITECTURES = (("bf16", "fp16", "fp32"), (80, 90, 100)) if SOAK else (("bf16",), (90,))


def compile_kernel(name: str, constants: dict[str, Any], dtype: str, architecture: int) -> str:
    """Return a kernel's code for a GPU, as it is launched for a tensor whose channels are a
    multiple of 16."""
    kernel = getattr(batch_norm, name)
    tiling = batch_norm.Tiling()
    width = tiling.sums_channels if name.startswith("_finish") else tiling.channels
    known = constants | {"ROWS": tiling.rows, "CHANNELS": width, "PROGRAMS": tiling.sums}
    signature = {}
    attributes = {}
    fixed = {}
    for number, argument in enumerate(kernel.arg_names):
        if argument in known:
            signature[argument], fixed[(number,)] = "constexpr", known[argument]
        elif argument in ACTIVATIONS | POINTERS:
            signature[argument] = f"*{dtype}" if argument in ACTIVATIONS else "*fp32"
        else:
            signature[argument] = "fp32" if argument == "eps" else "i32"
        if argument in ACTIVATIONS | POINTERS | {"channels"}:
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constexprs=fixed, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    options = {"num_warps": tiling.warps} | batch_norm.OPTIONS
    return str(triton.compile(source, target=target, options=options).asm["ptx"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_compile_for_gpus(dtype: str, architecture: int) -> None:
    for name, constants in VARIANTS:
        code = compile_kernel(name, constants, dtype, architecture)
        # Atomic operations would add up in any order.
        assert not re.search(r"\b(atom|red)\.", code), name
        loads = re.findall(r"ld\.global\S*", code)
        assert any(".v4.b32" in load for load in loads), (name, loads)  # 16 bytes at a time
        assert ".local" not in code, name  # values that do not fit into registers
        if "RELU" in constants and not constants.get("ADDS") and constants["RELU"]:
            # ReLU's mask is computed again with the same rounding.
            assert "fma.rn.f32" in code, name
