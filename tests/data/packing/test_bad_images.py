"""Images that no reader would use are left out of a pack, and named."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.data.images import Quarantined
from lockstep.data.index import open_index
from lockstep.data.listing import list_images
from lockstep.data.packing import Packing, pack
from lockstep.data.sources import find_source
from tests.data.cases import image_folder, jpeg
from tests.data.pictures import progressive_jpeg
from tests.data.sets import FORMATS, encode_blank, files_of, read_all

PNG = encode_blank("PNG")
SOUND = {f"{name}/{i:02d}.jpg": jpeg(20, 30, 10 * i) for name in "ab" for i in range(0, 50, 2)}
SOUND |= {"a/grey.png": PNG, "b/tail.jpg": jpeg() + bytes(50)}
BAD = {
    "a/05.jpg": progressive_jpeg(repeated=1000),
    "a/07.jpg": jpeg()[:-9],
    "a/half.png": PNG[:-50],
    "b/00.jpg": b"",
    "b/21.jpg": b"text",
}
REASONS = {"a/05.jpg": "scans", "b/00.jpg": "empty file", "b/21.jpg": "not an image"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sound = {name: data for name, data in SOUND.items() if name not in BAD}
    return image_folder(tmp_path / "source", sound | BAD)


def pack_with_bad(source: Path, target: Path, format: str, **how: int) -> dict[str, str]:
    """Pack a source; return the images that are left out, with their reasons."""
    left_out: list[Quarantined] = []
    packing = Packing(format, shards=2, **how)
    counts = pack(source, target, packing, left_out=lambda _, bad: left_out.append(bad))
    assert counts == {"images": len(SOUND.keys() - BAD.keys())}
    return {bad.file: bad.reason for bad in left_out}


@pytest.mark.parametrize("resize", [0, 16])
@pytest.mark.parametrize("format", FORMATS)
def test_bad_images_are_named(format: str, resize: int, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    reasons = pack_with_bad(source, target, format, resize=resize)
    assert list(reasons) == sorted(BAD)
    for name, words in REASONS.items():
        assert words in reasons[name]
    listing = list_images(find_source(target))
    if not resize:
        packed = [data for _, _, data in read_all(listing)]
        assert packed == [data for name, data in sorted(SOUND.items()) if name not in BAD]
    assert not open_index(target).quarantined
    before = files_of(target)
    assert pack_with_bad(source, target, format, resize=resize) == reasons
    assert files_of(target) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from lockstep.data.packing import Packing, pack, pack_writer

extend = pack_writer.{writer}
left = int(sys.argv[4])

def count(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return extend(*arguments)

pack_writer.{writer} = count
pack_writer._TASK_IMAGES = 4
pack(Path(sys.argv[1]), Path(sys.argv[2]), Packing(sys.argv[3], 2, workers=1))
"""


@pytest.mark.parametrize(("format", "tasks"), [("recordio", 2), ("folder", 7)])
def test_a_killed_pack_resumes(format: str, tasks: int, source: Path, tmp_path: Path) -> None:
    pack_with_bad(source, tmp_path / "whole", format)
    script = KILLED.format(writer="_write_images" if format == "folder" else "_append")
    target = tmp_path / "target"
    command = [sys.executable, "-B", "-c", script, str(source), str(target), format, str(tasks)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert pack_with_bad(source, target, format).keys() == BAD.keys()
    assert files_of(target) == files_of(tmp_path / "whole")
