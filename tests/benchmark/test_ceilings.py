"""The machine's rates, with every framework that is installed."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from lockstep import backends
from lockstep.benchmark import ceilings

HERE = [name for name, framework in backends.FRAMEWORKS.items() if framework.version() is not None]


@pytest.mark.parametrize("name", HERE)
def test_what_is_timed_is_a_matrix_product(name: str) -> None:
    arithmetic = backends.load(name).products(False)
    a, b = (np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32) for seed in (0, 1))
    result = arithmetic.product(arithmetic.tensor(a, "fp32"), arithmetic.tensor(b, "fp32"))
    arithmetic.wait(result)
    values = result.asnumpy() if hasattr(result, "asnumpy") else np.asarray(result)
    np.testing.assert_allclose(values, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-5)


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_time", lambda work, ranks: 0.5)
    monkeypatch.setitem(ceilings.PRODUCT_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**20)
    assert ceilings.gemm_gflops("reference", "fp32", on_gpu=False, ranks=1) == 2 * 64**3 / 0.5 / 1e9
    # Each byte is read once and written once.
    assert ceilings.copy_gb_per_sec("reference", on_gpu=False, ranks=1) == 2 * 2**20 / 0.5 / 1e9


def test_a_copy_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = np.copyto
    monkeypatch.setattr(
        ceilings.np,
        "copyto",
        lambda target, source: (real(target, source), copied.append(source.nbytes))[0],
    )
    monkeypatch.setattr(ceilings, "SECONDS", 0.0)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**20)
    ceilings.copy_gb_per_sec("torch", on_gpu=False, ranks=1)
    assert sum(copied) == 2 * 2**20  # one call to warm up, one that is timed


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 1.0), (2, 3.0)])
def test_of_several_ranks_the_median_counts(
    ranks: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = [9.0, 4.0, 1.0, 3.0, 2.0]  # the first is left out
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(ceilings, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(ceilings, "SECONDS", 7.5)
    worked: list[float] = []

    def work() -> None:
        worked.append(passing[len(worked) % 5])
        clock.now += worked[-1]

    assert ceilings._time(work, ranks) == seconds
    assert worked[:4] == passing[:4]


def test_mxnets_products_are_of_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[object] = []
    array = SimpleNamespace(astype=lambda dtype: None)
    mx = SimpleNamespace(
        gpu=lambda index: f"GPU {index}",
        nd=SimpleNamespace(array=lambda values, context: (placed.append(context), array)[1]),
    )
    loading = SimpleNamespace(threads="1")
    package = ModuleType("lockstep.backends.mxnet")
    package.__path__ = [str(Path(backends.__file__).parent / "mxnet")]
    package.loading = loading  # type: ignore[attr-defined]
    modules = {
        "mxnet": mx,
        "lockstep.backends.mxnet": package,
        "lockstep.backends.mxnet.framework_import": loading,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delitem(sys.modules, "lockstep.backends.mxnet.instruments", raising=False)
    importlib.import_module("lockstep.backends.mxnet.instruments").products(True).tensor(
        np.zeros((2, 2)), "fp32"
    )
    monkeypatch.delitem(sys.modules, "lockstep.backends.mxnet.instruments")
    assert placed == ["GPU 3"]
