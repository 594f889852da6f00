"""What a campaign keeps, whatever happens to its parts: `benchmarks/gpu/running.py` and
`results.py`."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import running
from benchmarks.gpu.parts import Part, all_parts, tiny_parts
from benchmarks.gpu.results import Results, digest_of_sources, read_rows
from benchmarks.gpu.running import Campaign, open_parts, run_parts
from tests.gpu.pretend import HANGS, part
from tests.processes import wait_until

ABOUT = {"device": "none", "torch": "1", "cuda": None, "sources": "a"}
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that opens the file, measures what is missing, and returns the results of
    the file on disk."""

    def measure(
        *parts: Part, seconds: float = 600, about: dict[str, Any] = ABOUT, again: bool = False
    ) -> list[dict[str, Any]]:
        results = Results.open(tmp_path / "campaign.json")
        machine = results.add_machine(about)
        campaign = Campaign(tmp_path, "cpu", True, time.monotonic() + seconds)
        run_parts(
            open_parts(parts, results, machine, again=again), campaign, results, machine, print
        )
        return Results.open(tmp_path / "campaign.json").results

    return measure


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a part makes when it hangs. No part's time begins before: a busy machine starts
    processes slowly."""
    file = tmp_path / HANGS

    class Patient(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                wait_until(file.exists)
            return super().wait(timeout)

    monkeypatch.setattr(running.subprocess, "Popen", Patient)
    return file


def is_gone(process: Path) -> bool:
    """Return whether a process of /proc has ended; it may still wait to be buried."""
    try:
        return not (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("raise", "ValueError: the figure is not there"),
        ("die", "killed by SIGKILL: it printed nothing"),
        ("exit", "exit code 3, without a message"),
    ],
)
def test_a_part_that_ends_badly_keeps_its_rows_and_does_not_take_the_others(
    run: Run, does: str, reason: str
) -> None:
    bad, good = run(part("bad", does=does), part("good"))
    assert (bad["status"], bad["reason"]) == ("failed", reason)
    assert [row["what"] for row in bad["rows"]] == ["begun"]
    assert (good["status"], good["reason"], good["rows"][0]["device"]) == ("ok", "", "cpu")


def test_a_part_that_hangs_is_killed_with_all_that_it_started(run: Run, hangs: Path) -> None:
    hung, good = run(part("hung", does="hang", limit_sec=1.5), part("good"))
    assert (hung["status"], hung["reason"]) == (
        "failed",
        "ran longer than its limit of 2 s and was killed",
    )
    wait_until(lambda: is_gone(Path("/proc") / str(hung["rows"][-1]["pid"])))
    assert good["status"] == "ok"


def test_a_part_that_the_campaigns_minutes_cut_off_is_measured_again(
    run: Run, hangs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "FEWEST_SEC", 0.0)
    cut_off = part("long", does="hang", counts_in=str(tmp_path / "counted"), limit_sec=100)
    for _ in range(2):
        hangs.unlink(missing_ok=True)
        (result,) = run(cut_off, seconds=1.5)
        assert (result["status"], result["reason"]) == (
            "stopped",
            "the campaign's minutes were over",
        )
        assert result["rows"][0]["left_sec"] < 1.5
    assert (tmp_path / "counted").read_text() == "begun\n" * 2


def test_a_part_for_which_too_little_time_is_left_is_not_begun_and_a_shorter_one_is(
    run: Run,
) -> None:
    results = run(part("long", expected_sec=1000), part("short"))
    assert [result["part"] for result in results] == ["short"]
    missing = part("missing", expected_sec=100, needs=("no_such_package",))
    assert [result["part"] for result in run(part("short too"), missing, seconds=5)] == [
        "short",
        "missing",
    ]


def test_what_is_done_is_not_measured_again_until_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    for again, times in ((False, 1), (False, 1), (True, 2)):
        (result,) = run(part("one", counts_in=str(counted)), again=again)
        assert result["status"] == "ok"
        assert counted.read_text() == "begun\n" * times


def test_a_part_that_failed_is_tried_twice_and_after_the_others(run: Run, tmp_path: Path) -> None:
    order = tmp_path / "order"
    bad = part("bad", does="raise", counts_in=str(order))
    assert [result["attempts"] for result in run(bad)] == [1]
    assert [result["attempts"] for result in run(bad)] == [2]
    assert [result["attempts"] for result in run(bad)] == [2]
    results = Results.open(tmp_path / "campaign.json")
    results.results[0]["attempts"] = 1
    machine = results.add_machine(ABOUT)
    assert [each.name for each in open_parts([bad, part("new")], results, machine)] == [
        "new",
        "bad",
    ]


@pytest.mark.parametrize(
    "changed", [{"device": "other"}, {"torch": "2"}, {"sources": "b"}], ids=str
)
def test_results_belong_to_device_versions_and_sources(run: Run, changed: dict[str, str]) -> None:
    run(part("one"))
    first, second = run(part("one"), about=ABOUT | changed)
    assert first["machine"] != second["machine"]


def test_results_belong_to_settings(run: Run, tmp_path: Path) -> None:
    run(part("one"))
    assert [result["settings"] for result in run(part("one", does="look"))] == [
        {},
        {"does": "look"},
    ]


def test_the_file_is_complete_after_every_part(run: Run) -> None:
    results = run(part("first"), part("second", does="raise"), part("third", does="look"))
    assert results[-1]["rows"][-1]["parts"] == ["first", "second"]


def test_a_part_without_its_package_is_missing_until_it_is_there(run: Run) -> None:
    (result,) = run(part("one", needs=("no_such_package", "nvidia.no_such_package", "json")))
    assert (result["status"], result["reason"]) == (
        "missing",
        "needs no_such_package, nvidia.no_such_package",
    )
    assert [result["status"] for result in run(part("one"))] == ["ok"]


def test_a_figure_that_is_not_finite_is_written_as_json(run: Run, tmp_path: Path) -> None:
    (result,) = run(part("one", does="infinite"))
    assert result["rows"][-1]["ratio"] is None

    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads((tmp_path / "campaign.json").read_text(), parse_constant=refuse)


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"what": "a"}\n{"what": "b')
    assert read_rows(rows) == [{"what": "a"}]
    assert read_rows(tmp_path / "none") == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"form": 2}', '{"form": 1, "machines": {}}'])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "campaign.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not a campaign's file of form 1 .*; move it away"):
        Results.open(tmp_path / "campaign.json")


def test_the_digest_of_sources_changes_with_every_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    digests = {digest_of_sources(tmp_path)}
    (tmp_path / "a.py").write_text("b")
    digests.add(digest_of_sources(tmp_path))
    (tmp_path / "b.py").write_text("")
    digests.add(digest_of_sources(tmp_path))
    assert len(digests) == 3


def test_every_part_has_a_name_of_its_own_and_a_limit_above_what_it_is_expected_to_need() -> None:
    for parts in (all_parts(), tiny_parts()):
        assert len({each.name for each in parts}) == len(parts) > 10
        assert [each.name for each in parts if not each.expected_sec < each.limit_sec <= 600] == []
