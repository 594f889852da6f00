"""What Lockstep keeps next to images is data: whatever a stranger puts there, a command works, or
refuses in a sentence, and opens, writes and removes nothing elsewhere."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.data.index import open_index
from lockstep.data.packing import Packing, pack
from lockstep.data.sources import find_split
from lockstep.system.errors import LockstepError
from tests.hostile import HOSTILE

STATE = [
    *(".lockstep/train/index.json", ".lockstep/train/names", ".lockstep/train/rows"),
    *(".lockstep/train/index.lock", ".lockstep/pack.json", ".lockstep/pack.finished"),
    *(".lockstep/pack.states.npy", "quarantine.json", ".store.json", "classes.txt"),
]


@pytest.fixture(scope="module")
def packed(textures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack with an index."""
    folder = tmp_path_factory.mktemp("packed") / "pack"
    pack(textures, folder, Packing("webdataset"))
    open_index(find_split(folder, "train"))
    return folder


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", STATE)
def test_hostile_state_next_to_images_does_nothing_elsewhere(
    packed: Path,
    textures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = shutil.copytree(packed, tmp_path / "data")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("kept")
    (data / ".parts").symlink_to(tmp_path / "precious")
    file = data / name
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    HOSTILE[kind](file)
    with suppress(LockstepError, OSError):  # the command line prints both as a sentence
        if "pack" in name:
            pack(textures, data, Packing("webdataset"))
        else:
            assert len(open_index(find_split(data, "train"))) == 60
    assert (tmp_path / "precious/file").read_text() == "kept"
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["file"]
