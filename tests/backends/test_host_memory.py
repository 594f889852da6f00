"""Memory that a process has freed, whichever engine runs in it."""

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.backends.shared import host_memory

RESIDENT_AFTER_FREEING = """
import resource
import numpy as np
from lockstep.backends.shared.host_memory import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

{call}
np.ones(1)
before = resident()
large = np.ones(8_000_000)
del large
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize(("call", "kept"), [("keep_freed_memory()", True), ("", False)])
def test_freed_memory_stays_with_the_process_when_asked(call: str, kept: bool) -> None:
    command = [sys.executable, "-c", RESIDENT_AFTER_FREEING.format(call=call)]
    environment = os.environ | {"LD_PRELOAD": ""}  # another allocator
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert (int(done.stdout) > 32_000_000) == kept


@pytest.mark.parametrize("missing", ["linux", "mallopt"])
def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    called: list[Callable[..., Any]] = []
    library = type(
        "Library", (), {} if missing == "mallopt" else {"mallopt": lambda *_: called.append(print)}
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library())
    if missing == "linux":
        monkeypatch.setattr(sys, "platform", "darwin")
    host_memory.keep_freed_memory()
    assert not called
