"""Fused kernels on a machine without a GPU: in Triton's interpreter, and compiled for GPUs that are
not there."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.backends.torch import kernels
from lockstep.backends.torch.fused_batch_norm import FusedBatchNorm, fuse_batch_norms
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from tests.backends.conftest import DEVICE
from tests.processes import run_module

CPU = torch.device("cpu")
FOLDER = Path(__file__).parent / "kernels"
ON_A_GPU = DEVICE != "cpu" and torch.cuda.is_available()


def run_kernels(*arguments: object, **more: str) -> None:
    """Run tests in a process that can import Triton."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--noconftest"]
    done = run_module("pytest", *options, *arguments, **more)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert re.search(r"\b(\d+) passed", done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(ON_A_GPU, reason="the tests in the folder kernels run on the GPU")
def test_kernels_are_right_in_tritons_interpreter() -> None:
    run_kernels(FOLDER, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_kernels_compile_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    # In another process, since the interpreter replaces the compiler. With an empty cache.
    run_kernels(*sorted(FOLDER.glob("compile_*.py")), TRITON_CACHE_DIR=str(tmp_path))


# Whether kernels are used


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton seem to be installed here."""
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)


def test_kernels_are_used_only_when_asked_for_until_a_gpu_has_shown_that_they_are_faster() -> None:
    assert not kernels.AUTO_USES_KERNELS
    for fused in ("auto", "off"):
        assert not kernels.uses_kernels(Execution.of({"fused": fused}), CPU)


def test_kernels_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = "fused is on, but the run computes on a CPU; use --set fused=auto"
    with pytest.raises(BackendError, match=message):
        kernels.uses_kernels(Execution(fused="on"), CPU)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="fused is on, but Triton is not installed"):
        kernels.uses_kernels(Execution(fused="on"), CPU)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, why in {(7, 5): "capability 8.0", (8, 0): "", (9, 0): ""}.items():
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, value=capability: value
        )
        assert why in kernels.obstacle(torch.device("cuda"))
        assert bool(kernels.obstacle(torch.device("cuda"))) == bool(why)


@pytest.mark.parametrize(
    ("recipe", "how", "ranks", "why"),
    [
        ({}, {"layout": "nchw"}, 1, "layout is nchw"),
        ({"batch_norm": "synchronised"}, {}, 2, "synchronised over ranks"),
        ({"quantisation": "int8"}, {}, 1, "quantises"),
    ],
    ids=["nchw", "synchronised", "quantised"],
)
def test_what_kernels_do_not_compute_is_refused_if_they_are_asked_for_and_left_alone_otherwise(
    recipe: dict[str, Any],
    how: dict[str, Any],
    ranks: int,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "AUTO_USES_KERNELS", True)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(2))
    with pytest.raises(BackendError, match=f"fused is on, but .*{why}"):
        fuse_batch_norms(model, Recipe(**recipe), Execution(fused="on", **how), CPU, ranks)
    fuse_batch_norms(model, Recipe(**recipe), Execution(**how), CPU, ranks)
    assert not isinstance(model[0], FusedBatchNorm)


def test_another_optimizer_is_refused_or_left_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "AUTO_USES_KERNELS", True)
    recipe = Recipe(optimizer="lamb")
    with pytest.raises(BackendError, match=r"fused is on, but .* SGD alone, not lamb"):
        kernels.uses_update_kernel(recipe, Execution(fused="on"), CPU)
    assert not kernels.uses_update_kernel(recipe, Execution(), CPU)
    assert kernels.uses_update_kernel(Recipe(), Execution(), CPU)


def test_only_modules_of_kernels_import_triton_and_they_are_imported_late() -> None:
    folder = Path(kernels.__file__).parent
    importers = set()
    late = {f"lockstep.backends.torch.kernels.{path.stem}" for path in folder.glob("*.py")}
    late.remove("lockstep.backends.torch.kernels.__init__")
    for path in sorted(folder.parent.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            modules = {f"{module}.{name}".lstrip(".") for name in names} | {module}
            if any(name.split(".")[0] == "triton" for name in modules) or modules & late:
                importers.add(path)
    assert {path.parent for path in importers} == {folder}
    assert folder / "__init__.py" not in importers
