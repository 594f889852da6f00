"""Our speeds stand beside published ones, and there are no claims across hardware."""

import pytest

from lockstep.benchmark.compare_published import compare
from lockstep.recipes.published import RECIPES
from lockstep.recipes.published_speeds import read_speeds
from tests.benchmark.published_cases import report

V100 = "Tesla V100-SXM2-16GB"
A100 = "NVIDIA A100-SXM4-80GB"


def test_a_cell_stands_beside_rows_of_its_model_kind_chip_number_and_batch() -> None:
    cell = {"model": "resnet50-v1.5", "what": "inference", "batch": 96, "dtype": "fp32"}
    (comparison,) = compare(report(cell, gpu="Tesla V100-SXM3-32GB"), read_speeds())
    rows = [beside.row for beside in comparison.published]
    assert {row.batch_images for row in rows} == {96}
    assert [row.images_per_sec for row in rows if row.batch_images == 96] == [3546, 1282]
    result = {(row.model, row.kind, row.accelerators) for row in rows}
    assert result == {("resnet50", "inference", 1)}
    assert all("V100" in row.accelerator for row in rows)
    alike = [row for row in read_speeds() if row.model == "resnet50" and row.kind == "inference"]
    assert comparison.left_out == len(alike) - len(rows)
    (everything,) = compare(
        report({"what": "inference", "batch": 96}), read_speeds(), everything=True
    )
    assert (len(everything.published), everything.left_out) == (len(alike), 0)


def test_a_batch_that_nobody_published_stands_beside_all_batches() -> None:
    (comparison,) = compare(report({"batch": 7}, gpu=V100), read_speeds())
    assert {208, 96} <= {beside.row.batch_images for beside in comparison.published}


def test_a_processor_that_nobody_published_stands_alone_unless_all_rows_are_wanted() -> None:
    (comparison,) = compare(report({}), read_speeds())
    assert (comparison.published, comparison.left_out > 100) == ((), True)


def test_version_1_of_the_model_is_not_compared_with_v1_5() -> None:
    (comparison,) = compare(report({"model": "resnet50-v1"}), read_speeds())
    assert comparison.published == ()


def test_speeds_are_divided_on_the_same_hardware_alone() -> None:
    (comparison,) = compare(report({}, gpu=V100), read_speeds())
    divided = {
        beside.row.images_per_sec: beside.ratio
        for beside in comparison.published
        if beside.ratio is not None
    }
    # 721.3 / 1442.6, fp16 at 208 images; no other row has the same batch and precision.
    assert divided == {1442.6: 0.5}


@pytest.mark.parametrize(
    ("gpu", "change"),
    [
        (None, {}),
        ("NVIDIA H100 80GB HBM3", {}),
        ("Tesla V100-SXM2-32GB", {}),
        (V100, {"ranks": 2}),
        (V100, {"batch": 64}),
        (V100, {"dtype": "fp32"}),
    ],
)
def test_nothing_is_claimed_across_hardware(gpu: str | None, change: dict[str, object]) -> None:
    (comparison,) = compare(report(change, gpu=gpu), read_speeds(), everything=True)
    assert comparison.published
    assert {beside.ratio for beside in comparison.published} == {None}


@pytest.mark.parametrize(
    ("what", "settings", "size"),
    [
        ("train", {"recipe": "resnet50-mxnet-90ep", "changes": {}}, 224),
        ("train", {"recipe": "resnet50-mxnet-90ep", "changes": {"image_size": 160}}, 160),
        ("inference", {"recipe": "demo", "changes": {}}, RECIPES["demo"]().image_size),
        ("train", {"recipe": "gone.yaml", "changes": {}}, None),
    ],
)
def test_other_sizes_are_told_and_not_compared(what: str, settings: dict, size: int | None) -> None:
    batch = {"train": 208, "inference": 128}[what]
    cell = {"what": what, "batch": batch, "dtype": "fp16"}
    (comparison,) = compare(report(cell, gpu=V100) | {"settings": settings}, read_speeds())
    assert comparison.image_size == size
    assert any(beside.ratio is not None for beside in comparison.published) == (size == 224)


def test_a_cell_of_the_processor_is_not_of_the_gpu_beside_it() -> None:
    (comparison,) = compare(report({"device": "CPU, 2 threads"}, gpu=V100), read_speeds())
    assert comparison.hardware == "AMD EPYC 9R14"


@pytest.mark.parametrize(
    ("device", "gpus", "hardware"),
    [
        (V100, [A100, V100], V100),
        ("GPU 1", [A100, A100], A100),
        ("/physical_device:GPU:0", [V100], V100),
        ("GPU 1", [V100, A100], f"GPU 1 of {A100}, {V100}"),
        ("GPU 0", [], "GPU 0 of unknown ones"),
        (None, [V100, A100], f"a GPU of {A100}, {V100}"),
        (None, [], "AMD EPYC 9R14"),
    ],
)
def test_a_cell_is_of_the_gpu_it_names(device: str | None, gpus: list[str], hardware: str) -> None:
    measured = report({"device": device} if device else {})
    measured["environment"]["gpus"] = [{"gpu": name} for name in gpus]
    (comparison,) = compare(measured, read_speeds())
    assert comparison.hardware == hardware
    divided = any(beside.ratio is not None for beside in comparison.published)
    assert divided == (hardware == V100)


def test_cells_that_failed_are_left_out() -> None:
    assert compare(report({"status": "out of memory"}, {"status": "failed"}), read_speeds()) == []
