"""The kernels of the update, compiled for GPUs that are not there."""

import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from lockstep.backends.torch.kernels import update
from tests.soak import SOAK


@pytest.mark.parametrize("capability", (80, 90, 100) if SOAK else (90,))
def test_the_kernels_of_the_update_compile_for_gpus(capability: int) -> None:
    types = {"counts": "*i32", "owners": "*i32", "firsts": "*i32", "momentum": "fp32"}
    types |= dict.fromkeys(
        ("gradients", "weights", "velocities", "averages", "masks", "number"), "*i64"
    )
    types |= dict.fromkeys(("decays", "factors", "rates", "changes", "scale", "overflow"), "*fp32")
    for function in (update._update, update._find_overflow):
        fixed = {
            name: value
            for name, value in {"NESTEROV": True, "SIZE": 1024}.items()
            if name in function.arg_names
        }
        signature = {name: types.get(name, "constexpr") for name in function.arg_names}
        source = ASTSource(
            function,
            signature,
            {(function.arg_names.index(name),): value for name, value in fixed.items()},
        )
        compiled = compile(source, GPUTarget("cuda", capability, 32), update.OPTIONS)
        assert f"sm_{capability}" in compiled.asm["ptx"]
        # One rounding for each operation, in one order.
        assert not re.search(r"\b(fma|atom|red)\.", compiled.asm["ptx"])
