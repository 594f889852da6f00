"""The libraries of the formats read our files, and we read theirs.

Each library runs in a separate process, MXNet in a separate environment: `make mxnet-env`, or the
Python that LOCKSTEP_MXNET_PYTHON names.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.data.containers import Damage, Sample, Stored, recordio, tfrecord, webdataset
from lockstep.data.containers.recordio import Header, frame_record, pack_header
from tests.data.containers.shared import MAGIC, list_images, write
from tests.processes import mxnet_python

PEERS = Path(__file__).parent / "peers"
HEIGHT = 20
WIDTH = 30


def jpeg(seed: int, comment: bytes) -> bytes:
    """Return a JPEG of noise, with a comment 6 bytes after the beginning."""
    file = io.BytesIO()
    Image.fromarray(
        np.random.default_rng(seed).integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)
    ).save(file, "JPEG")
    data = file.getvalue()
    return data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:]


def draw_image() -> list[Sample]:
    """Return seven images of three classes. Two have RecordIO's magic number at a multiple of 4,
    one has it elsewhere."""
    comments = {1: b"ab" + MAGIC, 3: b"ab" + MAGIC * 2 + b"cdef" + MAGIC, 4: b"a" + MAGIC}
    names = [
        f"{folder}/{file}.JPEG"
        for folder, files in (("cat", "abc"), ("newt", "a"), ("owl", "abc"))
        for file in files
    ]
    folders = [name.partition("/")[0] for name in names]
    labels = [sorted(set(folders)).index(folder) for folder in folders]
    images = [jpeg(i, comments.get(i, bytes(i))) for i in range(len(names))]
    return [
        Sample(i, *item, HEIGHT, WIDTH)
        for i, item in enumerate(zip(names, labels, folders, images, strict=True))
    ]


SAMPLES = draw_image()
DIGESTS = [hashlib.sha256(item.data).hexdigest() for item in SAMPLES]
LABELS = [item.label for item in SAMPLES]


def ask_peer(python: Path | str, script: str, *arguments: object) -> Any:
    """Run a script; return the JSON of its last line."""
    # TensorFlow prints the processor's instructions on standard error.
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [python, PEERS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images as files and in all formats."""
    folder = tmp_path_factory.mktemp("peers")
    for item in SAMPLES:
        path = folder / "images" / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.data)
    (folder / "samples.json").write_text(
        json.dumps([[item.number, item.label, item.name] for item in SAMPLES])
    )
    write(recordio, folder / "ours.rec", SAMPLES)
    write(tfrecord, folder / "ours.tfrecord", SAMPLES)
    write(webdataset, folder / "ours.tar", SAMPLES)
    return folder


@pytest.fixture(scope="module")
def mxnet_output(folder: Path) -> Any:
    return ask_peer(mxnet_python(), "with_mxnet.py", folder)


@pytest.fixture(scope="module")
def tensorflow_output(folder: Path) -> Any:
    return ask_peer(sys.executable, "with_tensorflow.py", folder)


@pytest.fixture(scope="module")
def dali_output(folder: Path) -> Any:
    return ask_peer(sys.executable, "with_dali.py", folder, len(SAMPLES))


def test_mxnet_reads_every_record_by_its_index(mxnet_output: Any) -> None:
    expected = {
        str(item.number): [0, item.label, item.number, 0, DIGESTS[i]]
        for i, item in enumerate(SAMPLES)
    }
    assert mxnet_output["by index"] == expected


def test_mxnet_reads_all_records_in_order(mxnet_output: Any) -> None:
    assert mxnet_output["in order"] == DIGESTS


def test_mxnets_iterator_decodes_every_image_with_its_label(mxnet_output: Any) -> None:
    assert mxnet_output["batches"] == {"labels": LABELS, "images": len(SAMPLES)}


def test_mxnet_writes_the_same_bytes(mxnet_output: Any, folder: Path) -> None:
    for ending in (".rec", ".idx"):
        assert (folder / f"theirs{ending}").read_bytes() == (folder / f"ours{ending}").read_bytes()


def test_mxnet_writes_several_labels_in_the_same_bytes(mxnet_output: Any, folder: Path) -> None:
    records = [
        frame_record(pack_header(Header((float(item.label), 0.5, 7.0), item.number)) + item.data)
        for item in SAMPLES
    ]
    result = (folder / "several.rec").read_bytes()
    assert result == b"".join(piece for record in records for piece in record)


def test_files_of_mxnet_are_read(mxnet_output: Any, folder: Path) -> None:
    result = list_images(recordio, folder / "theirs.rec")
    assert result == [(item.data, item.label) for item in SAMPLES]
    places = recordio.read_index(folder / "theirs.idx")
    assert [number for number, _ in places] == [item.number for item in SAMPLES]


def test_several_labels_of_mxnet_are_refused_one_by_one(mxnet_output: Any, folder: Path) -> None:
    items = list(recordio.scan_images(folder / "several.rec"))
    assert len(items) == len(SAMPLES)
    for item in items:
        assert isinstance(item, Damage)
        assert "it has 3 labels" in item.reason


def im2rec(images: Path, folder: Path, *options: str) -> Path:
    """List a folder of images and pack them, unchanged, with MXNet's script; return the `.rec`."""
    script = next(mxnet_python().parents[1].glob("lib/python*/site-packages/mxnet/tools/im2rec.py"))
    # The script imports OpenCV even if it only copies files; this empty module replaces it.
    (folder / "cv2.py").touch()
    for step in (["--list", "--recursive", *options], ["--pass-through"]):
        command = [mxnet_python(), script, folder / "im2rec", images, *step]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=900
        )
        assert result.returncode == 0, result.stderr[-3000:]
    return folder / "im2rec.rec"


@pytest.mark.slow
def test_im2rec_makes_the_same_three_files_of_a_folder(folder: Path, tmp_path: Path) -> None:
    path = im2rec(folder / "images", tmp_path, "--no-shuffle")
    for ending in (".lst", ".rec", ".idx"):
        assert path.with_suffix(ending).read_bytes() == (folder / f"ours{ending}").read_bytes()


@pytest.mark.slow
def test_a_shuffled_file_of_im2rec_is_read_whole(folder: Path, tmp_path: Path) -> None:
    """Users make such files: the numbers are those of the sorted folder, and the records have
    another order."""
    path = im2rec(folder / "images", tmp_path)
    items = [item for item in recordio.scan_images(path) if isinstance(item, Stored)]
    assert [item.number for item in items] != [item.number for item in SAMPLES]
    result = sorted((item.number, item.name, item.label) for item in items)
    assert result == [(item.number, item.name, item.label) for item in SAMPLES]


@pytest.mark.slow
def test_tensorflow_reads_every_key(tensorflow_output: Any) -> None:
    assert tensorflow_output["ours"] == [
        {
            "image": digest,
            "shape": [HEIGHT, WIDTH, 3],
            "image/filename": item.name,
            "image/class/synset": item.class_name,
            "image/class/text": item.class_name,
            "image/class/label": item.label + 1,
            "image/colorspace": "RGB",
            "image/format": "JPEG",
            "image/height": HEIGHT,
            "image/width": WIDTH,
            "image/channels": 3,
        }
        for item, digest in zip(SAMPLES, DIGESTS, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["theirs", "shuffled"])
def test_files_of_tensorflow_are_read(name: str, tensorflow_output: Any, folder: Path) -> None:
    path = folder / f"{name}.tfrecord"
    assert list_images(tfrecord, path) == [(item.data, item.label) for item in SAMPLES]
    items = [
        (item.name, item.class_name)
        for item in tfrecord.scan_images(path)
        if isinstance(item, Stored)
    ]
    assert items == [(item.name, item.class_name) for item in SAMPLES]


@pytest.mark.slow
def test_the_shuffled_file_is_a_file_to_tensorflow_too(tensorflow_output: Any) -> None:
    assert [item["image"] for item in tensorflow_output["shuffled"]] == DIGESTS


@pytest.mark.parametrize(("format", "first"), [("recordio", 0), ("tfrecord", 1)])
def test_dali_reads_images_and_labels(format: str, first: int, dali_output: Any) -> None:
    expected = [[digest, [label + first]] for digest, label in zip(DIGESTS, LABELS, strict=True)]
    assert dali_output[format] == expected


def test_dali_reads_a_tar(dali_output: Any) -> None:
    """The class is read as the characters of its number."""
    assert dali_output["webdataset"] == [
        [digest, list(b"%d" % label)] for digest, label in zip(DIGESTS, LABELS, strict=True)
    ]
