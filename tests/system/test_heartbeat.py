"""What a rank tells its launcher while it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.system import heartbeat
from lockstep.system.heartbeat import Beat, Heart, beat_file, read_beat
from lockstep.system.ranks import EXIT_CODE_FOLDER, LAUNCHER, PATIENCE
from tests.processes import wait_until


def test_a_beat_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = beat_file(tmp_path, 3)
    heart = Heart(path)
    heart.beat()
    assert read_beat(path) == Beat(1)
    heart.beat("training", 10_000_000, moved=True)
    assert read_beat(path) == Beat(2, "training", 10_000_000, 1)
    heart.beat("saving")
    assert read_beat(path) == Beat(3, "saving", 10_000_000, 1)


def test_a_beat_takes_no_more_space_than_the_one_before(tmp_path: Path) -> None:
    path = beat_file(tmp_path, 0)
    heart = Heart(path)
    heart.beat()
    before = path.stat().st_size
    heart.beat("evaluating", 2**63, moved=True)
    assert path.stat().st_size == before


@pytest.mark.parametrize(
    "text", ["", "3 train", "3 dancing 1 1", "x training 1 1", "3 training 1 1 1", "\xff"]
)
def test_a_part_of_a_beat_is_none(tmp_path: Path, text: str) -> None:
    path = beat_file(tmp_path, 0)
    path.write_text(text, encoding="latin-1")
    assert read_beat(path) is None


def test_no_launcher_means_no_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(EXIT_CODE_FOLDER, raising=False)
    heartbeat.begin()
    heartbeat.note("training", 3)
    assert list(tmp_path.iterdir()) == []


RANK = """
import time
from lockstep.system import heartbeat
heartbeat.begin()
{then}
"""


def start(folder: Path, then: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {EXIT_CODE_FOLDER: str(folder), "RANK": "5"} | variables
    command = [sys.executable, "-c", RANK.format(then=then)]
    return subprocess.Popen(command, env=environment, text=True)


def test_a_rank_beats_while_its_main_thread_waits(tmp_path: Path) -> None:
    process = start(tmp_path, "heartbeat.note('evaluating', 4)\ntime.sleep(60)")
    try:
        wait_until(lambda: (read_beat(beat_file(tmp_path, 5)) or Beat()).number > 3, seconds=50)
        beat = read_beat(beat_file(tmp_path, 5))
        assert beat is not None
        assert (beat.activity, beat.step) == ("evaluating", 4)
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_does_not_stop_ends_itself_after_its_launcher(tmp_path: Path) -> None:
    # No process has the id 0, so that the launcher counts as ended.
    process = start(tmp_path, "time.sleep(60)", **{LAUNCHER: "0", PATIENCE: "0.1"})
    assert process.wait(50) == -9
