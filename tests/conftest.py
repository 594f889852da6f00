"""A model, a recipe and images that are small enough to train in a second."""

import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from tests.processes import ONE_THREAD

# Libraries read these when they are loaded or first compute, here and in processes that tests
# start.
os.environ.update(ONE_THREAD | dict(os.environ))

from lockstep import backends
from lockstep.data.textures import draw_data_set
from lockstep.models.architectures import ModelSpec
from lockstep.recipes import Recipe
from tests.soak import PROFILE

settings.register_profile("lockstep", PROFILE)
settings.load_profile("lockstep")

# JAX reads this when it is imported. What it compiles in tests does not belong to the user's cache.
COMPILED = TemporaryDirectory(prefix="lockstep-compiled-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", COMPILED.name)

# Runs of tests are not remembered as the user's own.
REMEMBERED = TemporaryDirectory(prefix="lockstep-state-")
os.environ["XDG_STATE_HOME"] = REMEMBERED.name

# A shell that starts tests in the background makes them, and all processes that they start, ignore
# Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTED = os.environ.get("LOCKSTEP_BACKENDS", "paddle").split(",")
if "paddle" in TESTED and backends.FRAMEWORKS["paddle"].version() is not None:
    # before any test imports TensorFlow: Paddle cannot be imported after it
    backends.load("paddle")

TINY_MODEL = ModelSpec(
    block="bottleneck",
    layers=(1, 1, 1, 1),
    stem_width=8,
    widths=(8, 8, 16, 16),
    groups=2,
    expansion=2,
)

TINY = Recipe(
    model=TINY_MODEL,
    logits=10,
    epochs=2,
    global_batch_images=8,
    lr=0.05,
    lr_scaling="none",
    warmup_epochs=1.0,
    precision="fp32",
    image_size=32,
    eval_resize=36,
    eval_crop=32,
)


@pytest.fixture(scope="session")
def tiny_recipe() -> Recipe:
    """Two epochs of a narrow model at 32 px in float32."""
    return TINY


@pytest.fixture(scope="session")
def textures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder of 60 training and 20 validation images of ten classes. Tests must only read
    it."""
    root = tmp_path_factory.mktemp("textures")
    draw_data_set(root, train_images=60, val_images=20)
    return root
