"""The device that kernels run on in the tests of this folder, and a narrow recipe."""

import os

from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Recipe

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

NARROW = Recipe(
    model=ModelSpec(
        block="basic", layers=(1, 1, 1, 1), stem_width=4, widths=(4, 4, 4, 8), expansion=1
    ),
    logits=5,
    epochs=1,
    warmup_epochs=0,
    global_batch_images=4,
    precision="fp32",
)
