"""Tests of the JAX engine alone: what is compiled once, and what is kept of it."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from lockstep.backends import World
from lockstep.backends.jax import compile_cache
from lockstep.backends.jax.programs import find_programs
from lockstep.backends.jax.update import drop_numbers
from lockstep.recipes import Execution, Recipe
from tests.backends.cases import BASIC, Step
from tests.backends.compiled_steps import check_compiled_step
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import draw_batches
from tests.soak import in_a_soak

backend = make_backend_fixture("jax")

OTHER_NUMBERS: dict[str, Any] = {
    "lr": 0.3,
    "lr_multipliers": {"fc": 10},
    "lr_depth_decay": 0.5,
    "weight_decay": 0.01,
    "weight_decay_roles": ("bn_scale",),
    "momentum": 0.5,
    "beta1": 0.5,
    "beta2": 0.5,
    "optimizer_epsilon": 1e-3,
    "loss_scale": 2.0,
    "loss_scale_growth": 4.0,
    "loss_scale_growth_steps": 7,
    "loss_scale_backoff": 0.25,
    "loss_scale_backoff_steps": 3,
}


def test_recipes_of_other_numbers_share_a_step(world: World, tiny_recipe: Recipe) -> None:
    programs: Any = find_programs(tiny_recipe, Execution(), world)  # type: ignore[arg-type]
    for name, value in OTHER_NUMBERS.items():
        other = tiny_recipe.replace(**{name: value})
        assert other != tiny_recipe
        assert find_programs(other, Execution(), world) is programs, name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{"nesterov": True}, {"clip_norm": 1.0}, {"ema_decay": 0.9}, {"frozen": ["layer1"]}],
    ids=lambda changes: next(iter(changes)),
)
def test_recipes_of_other_operations_do_not(tiny_recipe: Recipe, changes: dict[str, Any]) -> None:
    assert drop_numbers(tiny_recipe.replace(**changes)) != drop_numbers(tiny_recipe)


@in_a_soak
def test_a_step_that_xla_optimises_is_that_of_float64(start: Start, tiny_recipe: Recipe) -> None:
    step = Step({"model": replace(BASIC, layers=(1, 1, 1, 1))})
    check_compiled_step(start, tiny_recipe, step)


@jax.jit
def compute_first(products: int, values: Any) -> tuple[Any, jax.Array]:
    """Return the values, and the last of some products, all of which are computed first."""
    result = lax.fori_loop(0, products, lambda _, x: jnp.sin(x @ x), jnp.ones((256, 256)))
    return lax.optimization_barrier((values, result))


@in_a_soak  # it must be quicker than a fraction of a second of products
def test_training_waits_for_nothing(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe)
    batches = draw_batches(tiny_recipe, 3)
    engine.fetch(engine.train(batches, 0))  # compiles
    products = 100_000 if engine._world.on_gpu else 500  # a fraction of a second
    engine._values, before = compute_first(products, engine._values)
    handle = engine.train(batches, 3)
    assert not before.is_ready()
    assert len(engine.fetch(handle).losses) == 3
    assert before.is_ready()


# What is kept between runs


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of the user's cache, which is empty. JAX has no folder yet and keeps all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (None, 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_what_is_compiled_is_kept_for_this_user_and_processor(cache: Path) -> None:
    compile_cache.keep_compiled()
    jax.jit(lambda x: 3 * x + 1)(np.float32(2))
    (folder,) = (cache / "lockstep" / "jax").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert any(folder.iterdir())


def test_every_kind_of_processor_has_a_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for name in ("one", "another", "one"):
        monkeypatch.setattr(compile_cache, "processor", lambda name=name: name)
        jax.config.update("jax_compilation_cache_dir", None)
        compile_cache.keep_compiled()
        folders.add(jax.config.jax_compilation_cache_dir)
    assert len(folders) == 2


def test_a_folder_that_the_user_has_chosen_stays(cache: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(cache / "own"))
    compile_cache.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(cache / "own")
    assert not (cache / "lockstep").exists()


def test_a_link_in_the_place_of_the_cache_is_not_followed(cache: Path) -> None:
    compile_cache.keep_compiled()
    (folder,) = (cache / "lockstep" / "jax").iterdir()
    folder.rename(cache / "elsewhere")
    (cache / "elsewhere").chmod(0o755)
    folder.symlink_to(cache / "elsewhere")
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache.keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None
    assert (cache / "elsewhere").stat().st_mode & 0o777 == 0o755


def test_the_oldest_files_are_dropped_from_a_cache_that_is_too_large(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "older", "oldest")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "folder").mkdir()
    compile_cache.drop_oldest(tmp_path, 200)
    (tmp_path / "folder").rmdir()
    assert {file.name for file in tmp_path.iterdir()} == {"new", "older"}
