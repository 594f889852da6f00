import os
from pathlib import Path

import pytest

from lockstep.machine import cores, memory_bytes, processor, share_of_cores


def test_cores_are_those_this_process_may_use() -> None:
    assert cores() == len(os.sched_getaffinity(0))


def test_all_cores_count_where_a_system_does_not_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cores() == 7


@pytest.mark.parametrize(("processes", "share"), [(None, 6), ("1", 6), ("2", 3), ("4", 1), ("16", 1)])
def test_launched_processes_share_the_cores(processes: str | None, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.machine.cores", lambda: 6)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert share_of_cores() == share


def test_memory_is_what_the_system_counts() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert memory_bytes() == int(total.split()[1]) * 1024


def test_the_processor_has_a_name() -> None:
    assert processor()
