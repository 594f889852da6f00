"""Small images, folders of them and files of other formats, for the tests of data."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from PIL import Image

from lockstep.data.containers import Sample, recordio, tfrecord, webdataset

WRITERS = {
    "recordio": recordio.Writer,
    "tfrecord": tfrecord.Writer,
    "webdataset": webdataset.Writer,
}

COUNTED = """
import os, sys
from lockstep.data import index, inspection

def counted(data):
    os.write(log, b".")
    return check(data)

check, inspection.check = inspection.check, counted
log = os.open(sys.argv[2], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
print("ready", flush=True)
sys.stdin.readline()
print(index.open_index(sys.argv[1]).digest)
"""


def check_two_processes(root: Path, log: Path) -> None:
    """Check that of two processes that open an index of 150 images at once, one builds it."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COUNTED, str(root), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    digests = [process.communicate(timeout=60)[0] for process in processes]
    assert digests[0] == digests[1] != ""
    assert log.stat().st_size == 150


def jpeg(height: int = 16, width: int = 24, colour: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 128, 128)).save(file, "JPEG")
    return file.getvalue()


def image_folder(root: Path, files: dict[str, bytes]) -> Path:
    """Write files. Their folders get an old time, so that any later change of a folder changes its
    time."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for folder in {(root / name).parent for name in files}:
        os.utime(folder, (1, 1))
    return root


def sample(
    number: int, label: int, data: bytes = b"", name: str = "", class_name: str = ""
) -> Sample:
    return Sample(number, name, label, class_name, data or jpeg(8 + number, 8), 0, 0)


def write(format: str, path: Path, samples: list[Sample]) -> Path:
    """Write samples in this order; for RecordIO also the `.lst` if there are names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with WRITERS[format](path) as writer:
        writer.extend(map(writer.record, samples))
        if format == "recordio" and any(item.name for item in samples):
            writer.describe((item.number, item.label, item.name) for item in samples)
        writer.finish()
    return path


def write_tar(path: Path, members: dict[str, bytes | None]) -> Path:
    """Write members; None is a folder, `-> x` a link to x."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if data is None:
                info.type = tarfile.DIRTYPE
            elif data.startswith(b"-> "):
                info.type = tarfile.SYMTYPE
                info.linkname = data[3:].decode()
            else:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data or b""))
    return path
