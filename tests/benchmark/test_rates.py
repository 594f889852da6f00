"""The machine's rates, by every framework that is here."""

import numpy as np
import pytest

from lockstep import backends
from lockstep.benchmark import rates

HERE = [name for name in rates.ARITHMETIC if backends.FRAMEWORKS[name].version() is not None]


def test_there_is_an_arithmetic_for_every_backend() -> None:
    assert set(rates.ARITHMETIC) == set(backends.FRAMEWORKS)


@pytest.mark.parametrize("name", HERE)
def test_what_is_timed_is_a_matrix_product(name: str) -> None:
    arithmetic = rates.ARITHMETIC[name](False)
    a, b = (np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32) for seed in (0, 1))
    found = arithmetic.product(arithmetic.tensor(a, "fp32"), arithmetic.tensor(b, "fp32"))
    arithmetic.wait(found)
    values = found.asnumpy() if hasattr(found, "asnumpy") else np.asarray(found)
    np.testing.assert_allclose(values, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-5)


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_fastest", lambda work: 0.5)
    monkeypatch.setitem(rates.PRODUCT_SIZE, "cpu", 64)
    monkeypatch.setitem(rates.COPY_BYTES, "cpu", 2**20)
    assert rates.gemm_gflops("reference", "fp32", on_gpu=False) == 2 * 64**3 / 0.5 / 1e9
    assert rates.copy_gb_per_sec("reference", on_gpu=False) == 2 * 2**20 / 0.5 / 1e9  # read once and written once


def test_a_copy_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = np.copyto
    monkeypatch.setattr(rates.np, "copyto", lambda target, source: (real(target, source), copied.append(source.nbytes))[0])
    monkeypatch.setattr(rates, "SECONDS", 0.0)
    monkeypatch.setitem(rates.COPY_BYTES, "cpu", 2**20)
    rates.copy_gb_per_sec("torch", on_gpu=False)
    assert sum(copied) == 2 * 2**20  # once to warm up, once timed
