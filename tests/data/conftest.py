import os
import platform
from pathlib import Path

import pytest

from lockstep.data import inspection
from tests.data.cases import image_folder
from tests.data.indexes import BAD, FILES

# The compiled decoder is only for x86-64. There, these tests fail if it is missing.
collect_ignore = [] if platform.machine() == "x86_64" else ["decoding/test_jpeg.py"]


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that are decoded during the test."""
    seen: list[bytes] = []

    def watched(data: bytes) -> tuple[int, int]:
        seen.append(data)
        return check(data)

    check = inspection.check
    monkeypatch.setattr(inspection, "check", watched)
    return seen


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return image_folder(tmp_path / "images", FILES)


@pytest.fixture
def partly_bad(root: Path) -> Path:
    image_folder(root, {name: data for name, (data, _) in BAD.items()})
    (root / "owl" / "gone.jpg").symlink_to("nowhere.jpg")
    (root / "owl" / "loop.jpg").symlink_to("loop.jpg")
    os.utime(root / "owl", (1, 1))
    return root
