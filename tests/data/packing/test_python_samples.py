"""Samples of Python programs, and packs of samples in order that are killed."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep
from lockstep.data.packing import Packing, pack, stream
from lockstep.data.sources import find_sources
from lockstep.system.errors import DataError, UserError
from tests.data.cases import jpeg
from tests.data.packing.packed import read_packed

PIXELS = np.arange(36, dtype=np.uint8).reshape(4, 3, 3)


def decode(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def test_images_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(20))
    modes = ("RGB", "L", "P", "RGBA", "1", "CMYK")
    drawn = [Image.fromarray(PIXELS).convert(mode) for mode in modes]
    drawn.append(Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 257))
    images = [tmp_path / "a.jpg", str(tmp_path / "a.jpg"), jpeg(), PIXELS, PIXELS[:, :, 0], *drawn]

    def samples() -> Iterator[tuple[object, str]]:
        for i, image in enumerate(images):
            yield image, ["zebra", "ant"][i % 2]

    assert lockstep.pack(samples(), tmp_path / "out") == {"images": len(images)}
    rows = read_packed(tmp_path / "out")[""]
    assert [label for label, _ in rows] == [["zebra", "ant"][i % 2] for i in range(len(images))]
    data = [data for _, data in rows]
    assert data[:3] == [jpeg(20), jpeg(20), jpeg()]
    np.testing.assert_array_equal(decode(data[3]), PIXELS)
    np.testing.assert_array_equal(decode(data[4]), PIXELS[:, :, 0])
    for image, stored in zip(drawn, data[5:], strict=True):
        np.testing.assert_array_equal(decode(stored), np.asarray(image))


class Photos:
    """A data set as of torchvision: a length, items, and names of classes."""

    classes = ("zebra", "ant")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Image.Image, object]:
        return Image.fromarray(PIXELS + np.uint8(i)), np.int64(i % 2)


def test_a_data_set_with_numbers_and_an_orientation(tmp_path: Path) -> None:
    lockstep.pack(Photos(), tmp_path / "out")
    rows = read_packed(tmp_path / "out")[""]
    assert [label for label, _ in rows] == ["zebra", "ant"] * 2
    photo = Image.fromarray(PIXELS)
    photo.getexif()[0x112] = 6
    samples = [(photo, 1, "train"), (PIXELS, 0, "validation"), (PIXELS, 0, "test")]
    counts = lockstep.pack(samples, tmp_path / "splits", classes=["b", "a"])
    assert counts == {"train": 1, "val": 1, "test": 1}
    [(label, data)] = read_packed(tmp_path / "splits")["train"]
    assert label == "a"
    assert Image.open(io.BytesIO(data)).getexif()[0x112] == 6
    assert [row[0] for row in read_packed(tmp_path / "splits/test")[""]] == ["b"]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([(PIXELS, "a"), (PIXELS / 255, "a")], "sample 1 .*type float64; expected uint8"),
        ([(np.zeros((3, 5, 4), np.uint8), "a")], "sample 0 .*Leave out a transform"),
        ([(jpeg()[:-20], "a")], "sample 0 cannot be used"),
        ([({"a": 1}, "a")], "sample 0 cannot be used: an image is of type dict"),
        ([("missing.jpg", "a")], "sample 0 .*missing.jpg cannot be read"),
        ([(PIXELS, 3)], "sample 0: the label is the number 3; name the classes"),
        ([(PIXELS, None)], "sample 0: the label is None"),
        ([(PIXELS, "a", "trian")], "sample 0: 'trian' is not a split"),
        ([(PIXELS, "a"), (PIXELS, "a", "train")], "sample 1: some samples have a split"),
        ([{"image": PIXELS, "label": 1}], "sample 0 is of type dict; .*for row in data"),
        ([], "no image can be used"),
        ("photos", "samples is a path; .*lockstep data pack"),
    ],
)
def test_samples_that_are_wrong(tmp_path: Path, samples: object, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        lockstep.pack(samples, tmp_path / "out")
    if (tmp_path / "out").exists():
        with pytest.raises(DataError, match="is not complete"):
            find_sources(tmp_path / "out")
        # What a failed call left is no obstacle, and none of it stays.
        lockstep.pack([(PIXELS, "b")], tmp_path / "out")
        assert [row[0] for row in read_packed(tmp_path / "out")[""]] == ["b"]


def test_labels_are_of_the_classes(tmp_path: Path) -> None:
    for label in (2, -1, "c"):
        with pytest.raises(
            UserError, match=r"sample 0: the label is .*(not one of the 2|at least 0)"
        ):
            lockstep.pack([(PIXELS, label)], tmp_path / "out", classes=["a", "b"])
    lockstep.pack([(PIXELS, "b")], tmp_path / "out", classes=["a", "b"])
    with pytest.raises(UserError, match="holds a data set already"):
        lockstep.pack([(PIXELS, "b")], tmp_path / "out", classes=["a", "b"])
    for wrong in ({"b": 1, "a": 0}, "ab"):
        with pytest.raises(UserError, match=r"classes is of type .*expected names in their order"):
            lockstep.pack([(PIXELS, 0)], tmp_path / "none", classes=cast(Any, wrong))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    with pytest.raises(UserError, match="holds other files"):
        lockstep.pack([(PIXELS, "b")], tmp_path / "mine")


def test_parts_and_loaders_of_torch(tmp_path: Path) -> None:
    data = torch.utils.data
    with pytest.raises(UserError, match=r"a loader of batches; .*lockstep.pack\(loader.dataset"):
        lockstep.pack(data.DataLoader(Photos()), tmp_path / "out")
    lockstep.pack(data.Subset(cast(Any, Photos()), [1]), tmp_path / "out")
    assert [label for label, _ in read_packed(tmp_path / "out")[""]] == ["ant"]


KILLED = """
import os, signal, sys
from pathlib import Path
from lockstep.data.packing import Packing, pack, stream
stream.SHARD_BYTES = 20_000
def die(done, total):
    if done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
pack(Path(sys.argv[1]), Path(sys.argv[2]), Packing("webdataset"), die)
"""


def test_a_killed_pack_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third image is damaged: it is reported, whether it was written before or after."""
    data = [jpeg(60 + i, 60, i) for i in range(30)]
    data[2] = data[2][:-9]
    lines = ["path,label"]
    for i, image in enumerate(data):
        (tmp_path / f"{i}.jpg").write_bytes(image)
        lines.append(f"{i}.jpg,{i % 3}")
    source = tmp_path / "list.csv"
    source.write_text("\n".join(lines))
    process = subprocess.run([sys.executable, "-c", KILLED, source, tmp_path / "out", "25"])
    assert process.returncode == -9
    finished = sorted((tmp_path / "out").glob("*.tar"))
    assert len(finished) > 1
    times = [path.stat().st_mtime_ns for path in finished]
    monkeypatch.setattr(stream, "SHARD_BYTES", 20_000)
    for out in ("out", "whole"):
        reports: list[str] = []
        counts = pack(
            source,
            tmp_path / out,
            Packing("webdataset"),
            left_out=lambda split, bad, reports=reports: reports.append(bad.file),
        )
        assert counts == {"images": 29}
        assert [report.rpartition(", ")[2] for report in reports] == ["line 4"]
    assert [path.stat().st_mtime_ns for path in finished] == times
    rows = [(str(i % 3), image) for i, image in enumerate(data) if i != 2]
    for out in ("out", "whole"):
        assert read_packed(tmp_path / out) == {"": rows}
    # A tar that lost its end, as after a failure of the machine, is written again.
    for length in (5000, -600):
        (tmp_path / "out/.lockstep/pack.unfinished").touch()
        finished[0].write_bytes(finished[0].read_bytes()[:length])
        pack(source, tmp_path / "out", Packing("webdataset"))
        assert read_packed(tmp_path / "out") == {"": rows}
    source.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="some images have changed since"):
        pack(source, tmp_path / "out", Packing("webdataset"))
