"""Processor time of this process and of others."""

import subprocess
import sys
import time

from lockstep.benchmark.contention import ProcessorTime

WORK = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def test_what_this_process_works_is_its_own_and_the_machines() -> None:
    start = ProcessorTime.now()
    while time.process_time() < start.own_sec + 0.3:
        pass
    passed = ProcessorTime.now().since(start)
    assert passed.own_sec >= 0.3  # the work above takes this long, by the same clock
    assert passed.busy_sec is not None
    assert passed.busy_sec >= 0.25  # the system counts in hundredths of a second


def test_what_another_process_works_is_the_machines_alone() -> None:
    start = ProcessorTime.now()
    subprocess.run([sys.executable, "-c", WORK], check=True)
    passed = ProcessorTime.now().since(start)
    assert passed.busy_sec is not None
    assert passed.busy_sec - passed.own_sec >= 0.4
