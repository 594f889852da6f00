import platform

import pytest

from lockstep.data import index as module

# The compiled decoder is only for x86-64. There, these tests fail if it is missing.
collect_ignore = [] if platform.machine() == "x86_64" else ["decoding/test_jpeg.py"]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that are decoded during the test."""
    seen: list[bytes] = []

    def watched(data: bytes) -> tuple[int, int]:
        seen.append(data)
        return check(data)

    check = module.check
    monkeypatch.setattr(module, "check", watched)
    return seen
