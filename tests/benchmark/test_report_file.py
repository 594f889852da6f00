"""A benchmark report is read, and other files are refused."""

import json
from pathlib import Path

import pytest

from lockstep.benchmark.report_file import find_environment, read_benchmark
from lockstep.system.errors import DataError
from tests.benchmark.published_cases import report


def test_a_report_is_read_and_its_older_cells_are_of_the_native_engine(tmp_path: Path) -> None:
    old = report({})
    del old["cells"][0]["runtime"]
    for content in (report({}), old):
        (tmp_path / "report.json").write_text(json.dumps(content))
        assert read_benchmark(tmp_path / "report.json") == report({})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not a report of"),
        ("[]", "is not a report of"),
        ('{"final": {}}', "is not a report of"),
        ('{"kind": "lockstep-benchmark", "version": 2}', "version 2, expected 1"),
    ],
)
def test_another_file_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_benchmark(tmp_path / "report.json")


def test_an_environment_is_a_backends_own_or_in_older_reports_that_of_all() -> None:
    by_backend = {"environment": {"mxnet": {"processor": "a", "numpy": "1.23"}}}
    assert find_environment(by_backend, "mxnet")["numpy"] == "1.23"
    assert find_environment(by_backend, "torch") == {}
    assert (
        find_environment({"environment": {"processor": "a", "torch": "2.0"}}, "torch")["processor"]
        == "a"
    )
