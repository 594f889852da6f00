from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Answer

RECORD = Path(__file__).parents[2] / "benchmarks/results/grid_engines.json"


def test_a_page_is_written_and_named(
    run_folder: Path, tiny_recipe: object, answer: Callable[..., Answer], tmp_path: Path
) -> None:
    (run_folder / "recipe.yaml").write_text(tiny_recipe.format_yaml())  # type: ignore[attr-defined]
    (run_folder / "log.jsonl").write_text("")
    page = tmp_path / "page.html"
    assert answer("report", run_folder, "-o", page) == (0, f"{page}\n", "")
    assert page.read_text().startswith("<!doctype html>")


def test_the_file_of_a_benchmark_has_a_page(answer: Callable[..., Answer], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert answer("report", RECORD, "-o", page) == (0, f"{page}\n", "")
    assert "torch resnet50-v1.5 bf16" in page.read_text()


def test_a_folder_without_a_run_is_refused(answer: Callable[..., Answer], tmp_path: Path) -> None:
    code, _, complaint = answer("report", tmp_path, "-o", tmp_path / "page.html")
    assert code == 2
    assert "is not a run's folder" in complaint
