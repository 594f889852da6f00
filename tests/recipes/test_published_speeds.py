"""The published rows are those of the documents."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from lockstep.recipes.published_speeds import ROWS, Row, read_speeds
from lockstep.system.errors import DataError
from tests.lines import read_table

V100 = "Tesla V100-SXM2-16GB"
A100 = "NVIDIA A100-SXM4-80GB"
PADDLE = "NVIDIA/DeepLearningExamples PaddlePaddle/Classification/RN50v1.5/README.md {}"


def row(**fields: object) -> Row:
    """Return the one row with these fields."""
    rows = [
        row
        for row in read_speeds()
        if all(getattr(row, name) == value for name, value in fields.items())
    ]
    assert len(rows) == 1, rows
    return rows[0]


# Copied from the documents by hand: a first, a middle and a last row of tables.
COPIED = """
{framework: MXNet, kind: train, precision: fp16, accelerators: 8}
  | {images_per_sec: 10263.2, printed_weak_scaling: 7.11, batch_images: 208, accelerator: Tesla
  V100-SXM2-16GB}
{framework: MXNet, kind: inference, precision: fp32, batch_images: 96}
  | {images_per_sec: 1282, accelerators: 1, system: DGX-1}
{framework: PaddlePaddle, accelerator: NVIDIA A100-SXM4-80GB, precision: tf32, variant: null,
  batch_images: 32}
  | {images_per_sec: 2423.74, mean_ms: 13.2, p90_ms: 16.09, p95_ms: 18.1, p99_ms: 28.01}
{table: "Training performance: NVIDIA DGX A100 (8x A100 80GB)", images_per_sec: 993}
  | {framework: PaddlePaddle, document: NVIDIA/DeepLearningExamples
  PaddlePaddle/Classification/RN50v1.5/README.md (NGC 22.05.1), precision: tf32, remark: null}
{document: NVIDIA/DeepLearningExamples PaddlePaddle/Classification/RN50v1.5/README.md (NGC 22.05.1),
  images_per_sec: 7955}
  | {accelerators: 8, precision: tf32}
{document: NVIDIA/DeepLearningExamples PaddlePaddle/Classification/RN50v1.5/README.md at 38934f9,
  kind: train, precision: mixed, accelerators: 8}
  | {images_per_sec: 23874, batch_images: 256, accelerator: NVIDIA A100-SXM4-80GB}
{document: NVIDIA/DeepLearningExamples PaddlePaddle/Classification/RN50v1.5/README.md (NGC 22.05.1),
  accelerator: NVIDIA A100-SXM4-80GB, mean_ms: 1.4}
  | {images_per_sec: 716.49, p99_ms: 3.01, precision: tf32, batch_images: 1, variant: TensorRT}
{document: NVIDIA/DeepLearningExamples PaddlePaddle/Classification/RN50v1.5/README.md (NGC 22.05.1),
  accelerator: NVIDIA A100-SXM4-80GB, images_per_sec: 860.9}
  | {mean_ms: 1.16, p90_ms: 1.81, p95_ms: 2.06, p99_ms: 2.98, precision: fp16}
{framework: PaddlePaddle, accelerator: NVIDIA A10, precision: int8, batch_images: 256}
  | {images_per_sec: 9598.97, mean_ms: 26.67, p99_ms: 27.48, variant: TensorRT}
{accelerator: Tesla T4, batch_images: 256, images_per_sec: 1559}
  | {framework: MXNet, mean_ms: 164.15, p50_ms: 163.97, p99_ms: 168.54, printed_speedup: 3.71}
{framework: PyTorch, model: resnext101-32x4d, batch_images: 8, precision: mixed, system: DGX-1}
  | {images_per_sec: 333, mean_ms: 24.18, p95_ms: 25.92, p99_ms: 28.3, p90_ms: null}
{framework: TensorFlow, system: DGX-2, variant: XLA, batch_images: 64}
  | {images_per_sec: 3101.15, p90_ms: 20.93, precision: mixed}
{system: NVIDIA, kind: train} | {minutes_to_target: 12.03, images_per_sec: 62954, variant: v4.0}
"""


@pytest.mark.parametrize(("fields", "expected"), read_table(COPIED))
def test_rows_are_the_documents(fields: str, expected: str) -> None:
    copied = yaml.safe_load(expected)
    published = row(**yaml.safe_load(fields))
    assert {name: getattr(published, name) for name in copied} == copied


def test_every_row_of_every_document_is_there() -> None:
    counted = Counter(
        (row.framework, row.kind) for row in read_speeds() if not row.document.startswith("MLPerf")
    )
    # Counted in the documents: rows of their tables times columns of speeds, without empty cells.
    assert counted == {
        ("MXNet", "train"): 6 + 2 * (3 + 4 + 5 + 4 + 5),
        ("MXNet", "inference"): 11 + 8 + 10 + 10 + 11 + 10 + 10,
        ("PaddlePaddle", "train"): 4 + 4 + 4,
        ("PaddlePaddle", "inference"): 9 * (2 + 3 * 2 + 3 * 3),
        ("PyTorch", "train"): 12 + 4 + 12,
        ("PyTorch", "inference"): 9 * 2 * 2 + 8 + 8,
        ("TensorFlow", "train"): 12 + 6,
        ("TensorFlow", "inference"): 9 * (4 + 3 * 3) + 8,
    }


def test_printed_quotients_are_those_of_the_printed_speeds_or_it_is_said() -> None:
    tables: dict[tuple[str, str], dict[tuple[str | None, int | None], Row]] = {}
    for published in read_speeds():
        if published.printed_weak_scaling:
            tables.setdefault((published.document, published.table), {})[
                published.precision, published.accelerators
            ] = published
    assert len(tables) == 6
    odd = set()
    for rows in tables.values():
        full = next(precision for precision, _ in rows if precision in ("fp32", "tf32"))
        for (precision, count), published in rows.items():
            assert published.images_per_sec
            scaling, speedup = (
                published.images_per_sec / rows[at].images_per_sec
                for at in ((precision, 1), (full, count))
            )
            agrees = published.printed_weak_scaling == pytest.approx(scaling, abs=0.0101)
            if published.printed_speedup:
                agrees = agrees and published.printed_speedup == pytest.approx(speedup, abs=0.0101)
            assert agrees == (published.remark is None), published
            odd |= set() if agrees else {(published.accelerator, precision, count)}
    assert odd == {(A100, "mixed", 1), (A100, "mixed", 4), ("Tesla V100-SXM3-32GB", "fp32", 4)}


def test_speed_and_mean_latency_of_a_row_agree_or_it_is_said() -> None:
    checked = 0
    for published in read_speeds():
        if published.mean_ms and published.images_per_sec and published.batch_images:
            checked += 1
            agrees = published.images_per_sec == pytest.approx(
                published.batch_images / published.mean_ms * 1000, rel=0.06
            )
            assert agrees or published.remark, published
    assert checked == 283 + 54 + 20 + 8


def test_what_cannot_be_is_remarked() -> None:
    falling = [
        row for row in read_speeds() if list(row.percentiles_ms()) != sorted(row.percentiles_ms())
    ]
    result = [(row.batch_images, row.p95_ms, row.p99_ms) for row in falling]
    assert result == [(128, 157.49, 77.42), (256, 356.58, 78.99)]
    assert {row.remark for row in falling} == {"p95 is above p99, which is impossible."}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [[1, 2.0, 3]]}, "row [1, 2.0, 3]"),
        ({"rows": [[1, -2.0]]}, "greater than 0"),
        ({"rows": [[1, None]]}, "expected images_per_sec"),
        ({"kind": "training"}, "'train' or 'inference'"),
        ({"gpu": "A100"}, "gpu"),
        ({"columns": ["p90_ms", "p50_ms"]}, "percentiles of latency must rise"),
        ({"remarks": [{"where": {"batch_images": 2}, "remark": "odd"}]}, "a remark fits no row"),
    ],
)
def test_wrong_tables_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    table = yaml.safe_load(ROWS.read_text())[0] | {
        "table": "Speed",
        "columns": ["batch_images", "images_per_sec"],
    }
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump([table | {"accelerators": 1, "rows": [[1, 2]]} | change]))
    with pytest.raises(DataError, match="table 'Speed'") as error:
        read_speeds(path)
    assert message in str(error.value)
