"""What a rank does with an engine: this engine records its calls and has its own clock."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep import backends
from lockstep.benchmark import ceilings, measurement
from lockstep.benchmark.cells import Cell, Plan, grid
from lockstep.data import Batch

SMALL = {"image_size": 32, "eval_crop": 32, "eval_resize": 36, "logits": 10}
PLAN = Plan(iterations=2, epochs=2, warmup_epochs=1, changes=SMALL)


class Clock:
    """A clock that advances only if a test says that something takes time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Device:
    """A backend and engine. Its device works through a queue: a step takes 2 s, and handing one
    over takes 0.5 s."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls = []
        self.free_at = clock.now
        self.images: list[np.ndarray] = []

    def world(self, execution: object) -> "Device":
        self.rank = 0
        self.ranks = 1
        self.device = "a device"
        self.on_gpu = False
        return self

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.calls.append("close")

    def engine(
        self, recipe: object, ceilings: np.ndarray, world: object, execution: object
    ) -> "Device":
        self.rates = ceilings
        return self

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *error: object) -> None: ...

    def write(self, state: object) -> None: ...

    def train(self, batches: Iterable[Batch], first: int) -> SimpleNamespace:
        (batch,) = batches
        self.images.append(batch.images)
        self.rates[first]  # there is a rate for every step
        self.calls.append(f"train {first}")
        self.clock.now += 0.5
        self.free_at = max(self.free_at, self.clock.now) + 2
        return SimpleNamespace(first=first, done_at=self.free_at)

    def fetch(self, handle: SimpleNamespace) -> SimpleNamespace:
        self.calls.append(f"fetch {handle.first}")
        self.clock.now = max(self.clock.now, handle.done_at)
        return SimpleNamespace(finished_at=handle.done_at)

    def predict(self, images: np.ndarray) -> None:
        self.calls.append("predict")
        self.images.append(images)
        self.clock.now += 3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    clock = Clock()
    made = Device(clock)
    monkeypatch.setattr(measurement, "time", clock)
    monkeypatch.setattr(backends, "load", lambda name: made)
    monkeypatch.setattr(ceilings, "gemm_gflops", lambda name, dtype, on_gpu, ranks: 7.0)
    monkeypatch.setattr(ceilings, "copy_gb_per_sec", lambda name, on_gpu, ranks: 5.0)
    return made


def measure(
    what: str, plan: Plan = PLAN, data: str = "synthetic", batch: int = 4
) -> measurement.Measured:
    cell: Cell = grid((what,), batches=(batch,), models=("resnet18",), data=data)[0]
    return measurement.measure(
        cell, plan, plan.make_recipe(cell), plan.make_execution(cell), lambda done, total: None
    )


def times(timeline: measurement.Timeline) -> list[float]:
    return np.diff([timeline.began, *timeline.ends]).tolist()


def test_a_step_is_enqueued_before_the_one_before_is_fetched(device: Device) -> None:
    measure("train")
    # Warm-up ends before the measurement begins.
    assert device.calls[:4] == ["train 0", "train 1", "fetch 0", "fetch 1"]
    assert device.calls[4:] == [
        *(
            "train 2",
            "train 3",
            "fetch 2",
            "train 4",
            "fetch 3",
            "train 5",
            "fetch 4",
            "fetch 5",
            "close",
        )
    ]


def test_the_device_is_never_without_work_so_that_steps_take_what_it_takes(device: Device) -> None:
    measured = measure("train")
    assert times(measured.warmup) == [2.5, 2.0]
    # Only the first one shows the time to hand over.
    assert times(measured.counted) == [2.5, 2.0, 2.0, 2.0]


def test_inference_is_done_one_after_the_other(device: Device) -> None:
    measured = measure("inference")
    assert device.calls == ["predict"] * 6 + ["close"]
    assert times(measured.counted) == [3.0] * 4


def test_synthetic_data_are_one_batch_of_the_steps_size(device: Device) -> None:
    measured = measure("train", batch=3)
    assert {id(images) for images in device.images} == {id(device.images[0])}
    assert device.images[0].shape == (3, 32, 32, 3)
    assert measured.compute_only is None is measured.loader_only


def test_a_folder_is_loaded_before_the_ceilings(device: Device, textures: Path) -> None:
    measured = measure("train", data=str(textures))
    assert measured.compute_only is not None
    assert measured.loader_only is not None
    # Never more than were measured.
    assert len(measured.compute_only.ends) == len(measured.loader_only.ends) == 4
    held = {id(images) for images in device.images[6:]}
    assert len(held) == 1
    assert len({images.tobytes() for images in device.images[:6]}) == 6
    assert times(measured.compute_only) == [2.5, 2.0, 2.0, 2.0]


def test_waiting_for_a_batch_is_counted_apart(
    device: Device, textures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def __init__(self, *arguments: object, **more: object) -> None: ...
        def __enter__(self) -> "Slow":
            return self

        def __exit__(self, *error: object) -> None: ...

        def batches(self, plans: Iterable[Any]) -> Iterable[Batch]:
            for plan in plans:
                device.clock.now += 4
                yield Batch(np.zeros((len(plan.samples), 32, 32, 3), np.uint8), plan.samples)

    monkeypatch.setattr(measurement, "make_loader", Slow)
    measured = measure("train", data=str(textures))
    assert measured.counted.waited_sec == [4.0] * 4
    assert measured.warmup.waited_sec == [4.0] * 2
    assert measured.loader_only is not None
    assert times(measured.loader_only) == [4.0] * 4


@pytest.mark.parametrize("what", ["train", "inference"])
def test_so_many_examples_are_gone_through_again_and_again_without_padding(
    device: Device, textures: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []
    real = measurement.make_loader

    def noting(*arguments: Any, **more: Any) -> Any:
        loader = real(*arguments, **more)
        batches = loader.batches
        monkeypatch.setattr(loader, "batches", lambda plans: batches(note(plan) for plan in plans))
        return loader

    def note(plan: Any) -> Any:
        seen.append(plan.samples)
        return plan

    monkeypatch.setattr(measurement, "make_loader", noting)
    measure(what, dataclasses.replace(PLAN, num_examples=5), str(textures))
    samples = np.concatenate(seen)
    images = 60 if what == "train" else 20
    # Evenly spread, and therefore of several classes.
    assert set(samples.tolist()) == {images * i // 5 for i in range(5)}
    assert len(samples) > 5


def test_a_missing_product_is_a_remark(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str, dtype: str, on_gpu: bool, ranks: int) -> float:
        raise RuntimeError("no kernel for this type\nand much more")

    monkeypatch.setattr(ceilings, "gemm_gflops", lacking)
    measured = measure("train")
    assert measured.gemm_gflops is None
    assert measured.remarks == [
        "torch has no matrix product in fp32 here, so no limit is known: no kernel for this type"
    ]


def test_a_failed_copy_leaves_the_figures(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, on_gpu: bool, ranks: int) -> float:
        raise MemoryError("Unable to allocate 256. MiB")

    monkeypatch.setattr(ceilings, "copy_gb_per_sec", failing)
    measured = measure("train")
    assert (measured.copy_gb_per_sec, measured.gemm_gflops) == (None, 7.0)
    assert times(measured.counted) == [2.5, 2.0, 2.0, 2.0]
    result = measured.remarks
    assert result == ["torch has no copy here, so no limit is known: Unable to allocate 256. MiB"]


def test_ranks_begin_ceilings_together(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(device, "wait", lambda: calls.append("together"))
    monkeypatch.setattr(
        ceilings, "gemm_gflops", lambda name, dtype, on_gpu, ranks: calls.append("products") or 7.0
    )
    monkeypatch.setattr(
        ceilings, "copy_gb_per_sec", lambda name, on_gpu, ranks: calls.append("copies") or 5.0
    )
    measure("train")
    assert calls[-4:] == ["together", "products", "together", "copies"]


def test_progress_is_seldom_and_at_the_end(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[tuple[int, int]] = []
    cell = grid(("inference",), batches=(1,), models=("resnet18",))[0]

    def predict(images: object) -> None:
        device.clock.now += 0.05

    monkeypatch.setattr(device, "predict", predict)
    plan = dataclasses.replace(PLAN, iterations=10)
    measurement.measure(
        cell,
        plan,
        plan.make_recipe(cell),
        plan.make_execution(cell),
        lambda *now: progress.append(now),
    )
    assert progress[-1] == (30, 30)
    assert len(progress) == pytest.approx(30 * 0.05 / measurement.TELL_SEC, abs=3)
