"""Tables, lists and compressed files, written by the libraries that people use, and packed."""

import bz2
import csv
import gzip
import importlib.util
import io
import json
import lzma
import re
import shlex
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.data.packing import Columns, Packing, compressed, pack
from lockstep.data.packing.devkit import read_ground_truth
from lockstep.data.sources import FORMATS, find_sources
from lockstep.system.errors import DataError
from tests.data.cases import image_folder, jpeg, sample, write
from tests.data.packing.packed import read_packed

IMAGES = [jpeg(16 + i, 20, 9 * i) for i in range(6)]
LABELS = [2, 0, 1, 1, 0, 2]
NAMES = ["wolf", "ant", "bee"]
"""Not sorted, as the classes of some data sets."""
SORTED = ["ant", "bee", "wolf"]
EXPECTED = [(NAMES[label], data) for label, data in zip(LABELS, IMAGES, strict=True)]
WEBDATASET = Packing("webdataset")
needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed"
)


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, words)))
    return result.exit_code, result.output + str(result.exception or "")


# Tables

FEATURES = {"image": {"_type": "Image"}, "label": {"names": NAMES, "_type": "ClassLabel"}}


def write_table(path: Path, notes: object = None, **columns: object) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(columns)
    if notes is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(notes)})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=4, write_page_checksum=True)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def write_saved(folder: Path, files: int) -> None:
    """Write a folder as `Dataset.save_to_disk` of datasets 5.2 does."""
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        write_rows(folder / name, slice(6 * i // files, 6 * (i + 1) // files))
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))


def write_rows(path: Path, some: slice) -> None:
    images = [{"bytes": data, "path": None} for data in IMAGES[some]]
    write_table(path, {"info": {"features": FEATURES}}, image=images, label=LABELS[some])


@needs_pyarrow
def test_files_of_datasets(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for i in range(2):
        path = tmp_path / f"hub/data/train-0000{i}-of-00002.parquet"
        write_rows(path, slice(3 * i, 3 * i + 3))
    write_rows(tmp_path / "hub/data/validation-00000-of-00001.parquet", slice(6))
    assert pack(tmp_path / "hub", out / "hub", WEBDATASET) == {"train": 6, "val": 6}
    assert read_packed(out / "hub") == {"train": EXPECTED, "val": EXPECTED}
    assert (out / "hub/classes.txt").read_text().split() == NAMES
    for split in ("train", "test"):
        write_saved(tmp_path / "dict" / split, 1)
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert pack(tmp_path / "dict", out / "dict", WEBDATASET) == {"train": 6, "test": 6}
    assert read_packed(out / "dict") == {"train": EXPECTED}
    assert read_packed(out / "dict/test") == {"": EXPECTED}
    for files in (1, 2):  # the file of the first call stays
        write_saved(tmp_path / "one", files)
    assert pack(tmp_path / "one", out / "one", WEBDATASET) == {"images": 6}
    assert read_packed(out / "one") == {"": EXPECTED}
    (tmp_path / "one/data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"lacks .*data-00001"):
        pack(tmp_path / "one", out / "lost", WEBDATASET)


@needs_pyarrow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_without_notes_of_datasets(tmp_path: Path, kind: str) -> None:
    names = [NAMES[label] for label in LABELS]
    path = write_table(tmp_path / f"my data.{kind}", photo=IMAGES, breed=names, width=LABELS)
    assert pack(path, tmp_path / "out", WEBDATASET) == {"images": 6}
    assert read_packed(tmp_path / "out") == {"": EXPECTED}
    assert (tmp_path / "out/classes.txt").read_text().split() == SORTED
    _, output = run("data", "check", path)
    [command] = re.findall(r"(lockstep data pack .*)", output)
    assert run(*shlex.split(command)[1:])[0] == 0
    assert read_packed(tmp_path / "my data-packed") == {"": EXPECTED}
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="is damaged or incomplete"):
        pack(path, tmp_path / "cut", WEBDATASET)


@needs_pyarrow
def test_classes_in_another_order_are_matched_by_name(tmp_path: Path) -> None:
    order = NAMES[1:] + NAMES[:1]
    notes_of_file = {"info": {"features": {"label": {"names": order, "_type": "ClassLabel"}}}}
    numbers = [order.index(NAMES[label]) for label in LABELS]
    write_rows(tmp_path / "in/train.parquet", slice(6))
    other = tmp_path / "in/validation.parquet"
    write_table(other, notes_of_file, image=IMAGES, label=numbers)
    notes: list[str] = []
    pack(tmp_path / "in", tmp_path / "out", WEBDATASET, note=notes.append)
    assert read_packed(tmp_path / "out") == {"train": EXPECTED, "val": EXPECTED}
    assert "number their classes differently, and are matched by name" in notes[0]
    order[0] = "someone"
    write_table(other, notes_of_file, image=IMAGES, label=numbers)
    with pytest.raises(DataError, match=r"train\.parquet and .*\.parquet list .*: .*someone"):
        pack(tmp_path / "in", tmp_path / "other", WEBDATASET)


@needs_pyarrow
def test_arrays_and_splits_in_tables(tmp_path: Path) -> None:
    pixels = np.arange(120, dtype=np.uint8).reshape(2, 5, 4, 3)
    path = write_table(
        tmp_path / "x.parquet", image=pixels.tolist(), label=[7.0, 11.0], split=["train", "valid"]
    )
    assert pack(path, tmp_path / "out", WEBDATASET) == {"train": 1, "val": 1}
    splits = read_packed(tmp_path / "out")
    for i, (split, name) in enumerate([("train", "7"), ("val", "11")]):
        [(label, data)] = splits[split]
        assert label == name
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels[i])


@needs_pyarrow
@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"label": [0, None]}, "row 1: the label is None"),
        ({"label": ["a", ""]}, "row 1: the label is ''"),
        ({"label": [0, -1]}, "row 1: the label is -1"),
        ({"fine_label": [0, 1], "coarse": [0, 1]}, "2 columns .*: fine_label, coarse.*--label"),
        ({"label": [0, 1], "image2": [b"", b""]}, "2 columns that may hold the image: .*--image"),
        ({"width": [0, 1]}, "no column that seems to hold the label: .* Name it: --label NAME"),
        ({"label": [None, 0]}, r"filter\(lambda row: row\['label'\] != None\)"),
        (
            {"labels": [[0, 1], [1]]},
            "column labels does not hold one name or number .* Several labels",
        ),
        ({"label": [0, 1], "split": ["train", "trian"]}, "'trian' is not a split"),
    ],
)
def test_tables_that_cannot_be_understood(tmp_path: Path, columns: dict, reason: str) -> None:
    path = write_table(tmp_path / "x.parquet", image1=IMAGES[:2], **columns)
    with pytest.raises(DataError, match=reason):
        pack(path, tmp_path / "out", WEBDATASET)
    assert not (tmp_path / "out").exists()


@needs_pyarrow
def test_files_of_pandas(tmp_path: Path) -> None:
    """Categories, an index that is a column, and one without a name."""
    import pyarrow

    paths = write_images(tmp_path)
    names = [NAMES[label] for label in LABELS]
    categories = pyarrow.array(names).dictionary_encode()
    index = {"__index_level_0__": LABELS}
    write_table(tmp_path / "x.parquet", image=IMAGES, label=categories, **index)
    text = pyarrow.array(paths, pyarrow.large_string())
    write_table(tmp_path / "paths.parquet", image=text, label=categories)
    rows = [[i, *row] for i, row in enumerate(zip(paths, names, strict=True))]
    write_csv(tmp_path / "y.csv", [["", "image", "label"], *rows])
    for name in ("x.parquet", "paths.parquet", "y.csv"):
        assert pack(tmp_path / name, tmp_path / "out" / name, WEBDATASET) == {"images": 6}
        assert read_packed(tmp_path / "out" / name) == {"": EXPECTED}


@needs_pyarrow
def test_configurations_are_not_mixed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_table(tmp_path / f"{name}/train-00000-of-00001.parquet", image=IMAGES, label=LABELS)
    with pytest.raises(DataError, match=r"several data sets .*: a, b"):
        pack(tmp_path, tmp_path / "out", WEBDATASET)
    # The images of a public test have no labels.
    test = tmp_path / "a/test-00000-of-00001.parquet"
    for i, columns in enumerate([{"label": [-1] * 6}, {"label": [None] * 6}, {}]):
        write_table(test, image=IMAGES, **columns)
        code, output = run("data", "pack", test.parent, tmp_path / f"out{i}")
        assert code == 0
        assert "note: left out 6 images of the split test without a label" in output
        assert {path.name for path in (tmp_path / f"out{i}").glob("[!.]*")} == {
            "classes.txt",
            "train-000000.tar",
        }
    with pytest.raises(DataError, match="has no labels"):
        pack(test, tmp_path / "none", WEBDATASET)


# Lists


def write_images(folder: Path) -> list[str]:
    names = [f"images/{i} x.jpg" for i in range(6)]
    image_folder(folder, dict(zip(names, IMAGES, strict=True)))
    return names


def write_csv(path: Path, rows: list[list[object]], **options: str) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file, **options).writerows(rows)
    return path


def rows_of(names: list[str]) -> list[list[object]]:
    return [[name, NAMES[label]] for name, label in zip(names, LABELS, strict=True)]


def write_json(path: Path, header: list[str], rows: list[list[object]]) -> None:
    path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))


HEADER = ["file_name", "label"]
LISTS: dict[str, Callable[[Path, list[list[object]]], object]] = {
    "metadata.csv": lambda path, rows: write_csv(path, [HEADER, *rows]),
    "metadata.jsonl": lambda path, rows: write_json(path, HEADER, rows),
    "pets.csv": lambda path, rows: write_csv(path, [["Path", "Class Name"], *rows], delimiter=";"),
    "pets.tsv": lambda path, rows: write_csv(path, rows, delimiter="\t"),
    "pets.ndjson": lambda path, rows: write_json(path, ["path", "species"], rows),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_images(tmp_path: Path, name: str) -> None:
    data = tmp_path / "my data"
    LISTS[name](data / name, rows_of(write_images(data)))
    assert pack(data / name, tmp_path / "out", WEBDATASET) == {"images": 6}
    assert read_packed(tmp_path / "out") == {"": EXPECTED}
    if name == "pets.tsv":
        return  # a folder with a list without a header is not known as one
    for command in (("train", "--data", data, "--out", tmp_path / "run"), ("data", "info", data)):
        _, output = run(*command)
        [hint] = re.findall(r"(lockstep data pack .*)", output)
        assert shlex.split(hint)[3:] == [str(data), str(tmp_path / "my data-packed")]
    assert run(*shlex.split(hint)[1:])[0] == 0
    assert read_packed(tmp_path / "my data-packed") == {"": EXPECTED}


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_splits_and_formats(tmp_path: Path, format: str) -> None:
    names = write_images(tmp_path)
    rows = [
        [name, label + 9, "train" if i % 2 else "Validation"]
        for i, (name, label) in enumerate(zip(names, LABELS, strict=True))
    ]
    path = write_csv(tmp_path / "list.csv", [["filename", "label", "split"], *rows])
    assert pack(path, tmp_path / "out", Packing(format)) == {"train": 3, "val": 3}
    numbered = [(str(label + 9), data) for label, data in zip(LABELS, IMAGES, strict=True)]
    expected = {"train": numbered[1::2], "val": numbered[::2]}
    packed = read_packed(tmp_path / "out")
    if format == "folder":
        expected = {
            split: sorted(rows, key=lambda row: int(row[0])) for split, rows in expected.items()
        }
    assert packed == expected
    assert (tmp_path / "out/classes.txt").read_text().split() == ["9", "10", "11"]


def test_a_list_with_test_images_of_which_some_have_no_label(tmp_path: Path) -> None:
    rows = [[*row, "test"] for row in rows_of(write_images(tmp_path))]
    for i, word in enumerate(["-1", ""]):
        rows[i][1] = word
    rows[5][2] = "train"
    path = write_csv(tmp_path / "list.csv", [["path", "label", "split"], *rows])
    notes: list[str] = []
    counts = pack(path, tmp_path / "out", WEBDATASET, note=notes.append)
    assert counts == {"test": 3, "train": 1}
    assert notes == ["note: left out 2 images of the split test without a label"]
    assert read_packed(tmp_path / "out/test") == {"": EXPECTED[2:5]}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([["images/0 x.jpg", "a"], ["images/9.jpg", "b"]], "1 of 2 images are missing.*images/9"),
        ([["../secret.jpg", "a"]], "line 2: '../secret.jpg' leads out of .*--images"),
        ([["/etc/passwd", "a"]], "line 2: '/etc/passwd' leads out of"),
        (
            [["images/0 x.jpg", "a"], ["images/./0 x.jpg", "b"]],
            "line 3 lists the image of .*line 2",
        ),
        ([["images/0 x.jpg", ""]], "line 2: the label is ''"),
        ([["images/0 x.jpg"]], "line 2 has 1 cells; expected 2"),
        ([["", "a"]], "line 2 has no image"),
        ([], "list.csv has no rows"),
    ],
)
def test_lists_that_are_wrong(tmp_path: Path, rows: list, reason: str) -> None:
    (tmp_path / "secret.jpg").write_bytes(IMAGES[0])
    write_images(tmp_path / "data")
    path = write_csv(tmp_path / "data/list.csv", [["path", "label"], *rows])
    with pytest.raises(DataError, match=reason):
        pack(path, tmp_path / "out", WEBDATASET)
    assert not (tmp_path / "out").exists()


def test_a_line_of_json_with_two_labels_is_refused(tmp_path: Path) -> None:
    [name, *_] = write_images(tmp_path)
    line = json.dumps({"file_name": name, "label": "a"})
    (tmp_path / "metadata.jsonl").write_text(f'{line}\n{line[:-1]}, "label": "b"}}\n')
    with pytest.raises(DataError, match="after line 1: an object has the key 'label' twice"):
        pack(tmp_path, tmp_path / "out", WEBDATASET)


def test_a_list_packs_no_file_that_is_no_image(tmp_path: Path) -> None:
    image_folder(
        tmp_path, {"a.jpg": IMAGES[0], "b.jpg": b"root:x:0:0:root", "c.jpg": IMAGES[1][:-9]}
    )
    path = write_csv(tmp_path / "list.csv", [["a.jpg", "x"], ["b.jpg", "x"], ["c.jpg", "y"]])
    code, output = run("data", "pack", path, tmp_path / "out", "--images", tmp_path)
    assert code == 1
    assert "line 2" in output
    assert "line 3" in output
    assert b"root:x" not in b"".join(tar.read_bytes() for tar in (tmp_path / "out").glob("*.tar"))
    assert read_packed(tmp_path / "out") == {"": [("x", IMAGES[0])]}


def test_columns_are_chosen(tmp_path: Path) -> None:
    names = write_images(tmp_path)
    rows = [[name, "x", NAMES[label]] for name, label in zip(names, LABELS, strict=True)]
    path = write_csv(tmp_path / "list.csv", [["file", "label", "category"], *rows])
    with pytest.raises(DataError, match="2 columns that may hold the label: label, category"):
        pack(path, tmp_path / "out", WEBDATASET)
    assert run("data", "pack", path, tmp_path / "out", "--label", "category")[0] == 0
    assert read_packed(tmp_path / "out") == {"": EXPECTED}
    with pytest.raises(DataError, match=r"no column categroy\. Did you mean category?"):
        pack(path, tmp_path / "no", WEBDATASET, columns=Columns(label="categroy"))


# ImageNet's validation images


def write_validation(folder: Path) -> list[str]:
    names = [f"ILSVRC2012_val_{i + 1:08d}" for i in range(6)]
    image_folder(folder, {f"{n}.JPEG": data for n, data in zip(names, IMAGES, strict=True)})
    return names


def test_labels_of_imagenet(tmp_path: Path) -> None:
    scipy = pytest.importorskip("scipy.io")
    names = write_validation(tmp_path / "val")
    wnids = ["n02114367", "n02219486", "n02206856"]
    expected = {"": [(wnids[label], data) for label, data in zip(LABELS, IMAGES, strict=True)]}
    rows = [
        [n, f"{wnids[label]} 85 1 499 272 {wnids[label]} 3 4 5 6"]
        for n, label in zip(names, LABELS, strict=True)
    ]
    path = write_csv(tmp_path / "LOC_val_solution.csv", [["ImageId", "PredictionString"], *rows])
    columns = Columns(images=tmp_path / "val")
    pack(path, tmp_path / "kaggle", WEBDATASET, columns=columns)
    assert read_packed(tmp_path / "kaggle") == {"val": expected[""]}
    kit = tmp_path / "ILSVRC2012_validation_ground_truth.txt"
    kit.write_text("".join(f"{label + 1}\n" for label in LABELS))
    fields = [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("children", object)]
    synsets = np.zeros((3, 1), fields)
    for i in (2, 0, 1):  # not in the order of their numbers
        synsets[i - 1, 0] = (i + 1, wnids[i], "wolf, Canis lupus", np.zeros((1, i)))
    scipy.savemat(tmp_path / "meta.mat", {"synsets": synsets}, do_compression=True)
    pack(kit, tmp_path / "kit", WEBDATASET, columns=columns)
    assert read_packed(tmp_path / "kit") == {"val": expected[""]}
    (tmp_path / "val/extra.JPEG").write_bytes(IMAGES[0])
    with pytest.raises(DataError, match="6 numbers for 7 images"):
        next(read_ground_truth(kit, tmp_path / "val", {}, ()))
    scipy.savemat(tmp_path / "meta.mat", {"synsets": synsets})
    data = (tmp_path / "meta.mat").read_bytes()
    # A few bytes may claim to be an array of any size.
    for damaged in (data[:800], data.replace(struct.pack("<ii", 3, 1), b"\0\0\0\x10" * 2)):
        (tmp_path / "meta.mat").write_bytes(damaged)
        with pytest.raises(DataError, match=r"meta\.mat cannot be read"):
            pack(kit, tmp_path / "cut", WEBDATASET, columns=columns)


# Compressed files

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def write_tar(path: Path, names: list[str]) -> None:
    with tarfile.open(path, f"w:{path.suffix.replace('.t', '').strip('.')}") as tar:
        for name, data in zip(names, IMAGES, strict=True):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("name", ["pets.tar.gz", "pets.tgz", "pets.tar.bz2", "pets.txz"])
@pytest.mark.parametrize("format", ["webdataset", "recordio"])
def test_compressed_tars(tmp_path: Path, name: str, format: str) -> None:
    write_tar(tmp_path / name, [f"pets/{NAMES[label]}/{i}.jpg" for i, label in enumerate(LABELS)])
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=f"lockstep data pack {source} "):
            find_sources(source)
    assert pack(tmp_path / name, tmp_path / "out", Packing(format)) == {"images": 6}
    assert read_packed(tmp_path / "out") == {"": sorted(EXPECTED, key=lambda row: row[0])}
    assert not (tmp_path / "out/.lockstep/stage").exists()


@pytest.mark.parametrize("ending", COMPRESS)
def test_no_stream_of_a_compressed_file_is_overlooked(tmp_path: Path, ending: str) -> None:
    # Programs that compress on several cores write several streams.
    write_tar(tmp_path / "a.tar.gz", [f"{NAMES[n]}/{i}.jpg" for i, n in enumerate(LABELS)])
    whole = gzip.decompress((tmp_path / "a.tar.gz").read_bytes())
    first = 512 * (1 + -(-len(IMAGES[0]) // 512))
    parts = [COMPRESS[ending](part) for part in (whole[:first], whole[first:])]
    path = tmp_path / f"several.tar.{ending}"
    path.write_bytes(b"".join(parts) + bytes(512))
    assert pack(path, tmp_path / "out", WEBDATASET) == {"images": 6}
    path.write_bytes(parts[0] + b"?" + parts[1][1:])
    with pytest.raises(DataError, match=r"several\.tar\..* is damaged or incomplete"):
        pack(path, tmp_path / "no", WEBDATASET)


def test_a_tar_with_splits_and_an_archive_next_to_class_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for i, label in enumerate(LABELS):
        names.append(f"pets/{('train', 'val')[i % 2]}/{NAMES[label]}/{i}.jpg")
    write_tar(tmp_path / "pets.tgz", [name.replace("/val/", "/test/") for name in names])
    pack(tmp_path / "pets.tgz", tmp_path / "tested", WEBDATASET)
    assert sorted(read_packed(tmp_path / "tested/test")[""]) == sorted(EXPECTED[1::2])
    write_tar(tmp_path / "pets.tgz", names)
    monkeypatch.setattr(compressed, "_divide", lambda path: path.missing)
    with pytest.raises(AttributeError):  # as if it was killed there
        pack(tmp_path / "pets.tgz", tmp_path / "out", WEBDATASET)
    monkeypatch.undo()
    pack(tmp_path / "pets.tgz", tmp_path / "out", WEBDATASET)
    expected = {"train": sorted(EXPECTED[::2]), "val": sorted(EXPECTED[1::2])}
    packed = read_packed(tmp_path / "out")
    assert {split: sorted(rows) for split, rows in packed.items()} == expected
    image_folder(tmp_path, {name[5:]: data for name, data in zip(names, IMAGES, strict=True)})
    (tmp_path / "labels.csv").write_text("path,label\n")
    assert pack(tmp_path, tmp_path.with_name("folders"), WEBDATASET) == {"train": 3, "val": 3}
    assert read_packed(tmp_path.with_name("folders")) == packed
    write_tar(tmp_path / "texts.tgz", [f"{i}.txt" for i in range(6)])
    with pytest.raises(DataError, match=f"^{tmp_path}/texts.tgz"):
        pack(tmp_path / "texts.tgz", tmp_path / "no", WEBDATASET)


@pytest.mark.parametrize("kind", COMPRESS)
def test_compressed_tfrecords(tmp_path: Path, kind: str) -> None:
    for split in ("train", "validation", "test"):
        for i in range(2):
            some = range(3 * i, 3 * i + 3)
            samples = [sample(j, LABELS[j], IMAGES[j], f"{j}.jpg", NAMES[LABELS[j]]) for j in some]
            path = write("tfrecord", tmp_path / f"data/{split}-0000{i}-of-00002", samples)
            path.with_name(f"{path.name}.{kind}").write_bytes(COMPRESS[kind](path.read_bytes()))
            path.unlink()
    with pytest.raises(DataError, match="lockstep data pack"):
        find_sources(tmp_path / "data")
    pack(tmp_path / "data", tmp_path / "out", Packing("tfrecord"))
    assert read_packed(tmp_path / "out") == {"train": EXPECTED, "val": EXPECTED}
    assert read_packed(tmp_path / "out/test") == {"": EXPECTED}
    cut = tmp_path / f"data/train-00001-of-00002.{kind}"
    data = cut.read_bytes()
    flipped = bytearray(data)
    flipped[-6] ^= 1
    for damaged in (data[:-3], bytes(flipped)):
        cut.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{cut} is damaged or incomplete"):
            pack(tmp_path / "data", tmp_path / "cut", WEBDATASET)
