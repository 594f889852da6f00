import platform

import pytest

from lockstep.data import index as module

# What is compiled is for x86-64 alone; there these tests fail where it is missing.
collect_ignore = [] if platform.machine() == "x86_64" else ["decoding/test_jpeg.py"]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that were decoded since."""
    seen: list[bytes] = []

    def watched(data: bytes) -> tuple[int, int]:
        seen.append(data)
        return check(data)

    check = module.check
    monkeypatch.setattr(module, "check", watched)
    return seen
