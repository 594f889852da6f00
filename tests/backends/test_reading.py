"""Tests for every framework: it reads what Lockstep writes for its programs, for the certificate of
a conversion."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lockstep.backends import LoadedBackend
from lockstep.recipes import Recipe
from lockstep.weights import Weights
from lockstep.weights.fingerprints import compute_fingerprints
from lockstep.weights.target_formats import TARGETS
from tests.backends.conftest import for_frameworks
from tests.backends.drawing import draw_state


@for_frameworks
def test_a_framework_reads_the_bits_that_were_written(
    backend: LoadedBackend, native: ModuleType, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    to, target, parts = native.FACTS.weights
    state = draw_state(tiny_recipe)
    weights = Weights(tiny_recipe, state, (), tmp_path, "Lockstep")
    written = TARGETS[to].write(tmp_path / target, weights, True, tmp_path)
    read: Any = importlib.import_module(f"lockstep.backends.{backend.name}.certificate").read
    stored: set[str] = set()
    for path in written.arrays:
        prints = compute_fingerprints(read(path, tiny_recipe))
        assert prints == compute_fingerprints(TARGETS[to].read_arrays(path))
        stored |= set(prints.values())
    for part in parts:
        bias = getattr(state, part)["fc.bias"]
        assert compute_fingerprints([np.array(bias)])["0"] in stored
