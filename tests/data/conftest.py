import pytest

from lockstep.data import index as module


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
