"""Sort a flat folder of validation images by each kind of labels file."""

from pathlib import Path

import pytest

from lockstep.data.index import open_index
from lockstep.data.sorted_folders import sort_into_classes
from lockstep.system.errors import DataError
from tests.data.cases import jpeg

IMAGES = {f"ILSVRC2012_val_0000000{i}.JPEG": jpeg(8 + i, 8) for i in range(1, 5)}
CLASSES = {1: "n02", 2: "n01", 3: "n02", 4: "n03"}
SORTED = {f"{CLASSES[i]}/{name}": data for i, (name, data) in enumerate(IMAGES.items(), 1)}
STEMS = [name.removesuffix(".JPEG") for name in IMAGES]
ROWS = list(zip(IMAGES, CLASSES.values(), strict=True))
LINES = "".join(f"{name} {label}\n" for name, label in ROWS)
LABELS = {
    "name and class": LINES,
    "tabs, in another order": "".join(f"{name}\t{label}\n" for name, label in reversed(ROWS)),
    "commas, spaces, empty lines": "\n".join(f"  {name}, {label} \n" for name, label in ROWS),
    "names of folders too": "".join(f"val/{name} {label}\n" for name, label in ROWS),
    "Windows": "\ufeff" + "".join(f"{name},{label}\r\n" for name, label in ROWS),
    "class alone": "".join(f"{label}\n" for label in CLASSES.values()),
    "Kaggle": "\ufeffImageId,PredictionString\n"
    + "".join(f"{STEMS[i]},{label} 85 1 499 272\n" for i, (_, label) in enumerate(ROWS)),
    "more images than there are": LINES + "other.JPEG n04\n",
}


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    folder = tmp_path / "val"
    folder.mkdir()
    for name, data in IMAGES.items():
        (folder / name).write_bytes(data)
    return folder


def labels(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "labels"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def find_classes(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", LABELS)
def test_every_image_goes_to_its_class(kind: str, flat: Path, tmp_path: Path) -> None:
    assert sort_into_classes(flat, labels(tmp_path, LABELS[kind])) == 4
    assert find_classes(flat) == SORTED
    assert open_index(flat).classes == ("n01", "n02", "n03")
    assert sort_into_classes(flat, tmp_path / "labels") == 0
    assert find_classes(flat) == SORTED


def test_numbers_become_folders_that_sort_as_numbers_do(flat: Path, tmp_path: Path) -> None:
    sort_into_classes(flat, labels(tmp_path, "2\n10\n1\n10\n"))
    assert sorted(path.split("/")[0] for path in find_classes(flat)) == ["01", "02", "10", "10"]
    assert open_index(flat).classes == ("01", "02", "10")


def test_an_exact_name_counts_before_one_with_another_ending(tmp_path: Path) -> None:
    folder = tmp_path / "val"
    folder.mkdir()
    for name in ("x.jpg", "x.png"):
        (folder / name).write_text(name)
    sort_into_classes(folder, labels(tmp_path, "x.png cat\nx.jpg dog\n"))
    assert find_classes(folder) == {"cat/x.png": b"x.png", "dog/x.jpg": b"x.jpg"}


def test_other_files_stay(flat: Path, tmp_path: Path) -> None:
    (flat / "readme.txt").write_text("about")
    sort_into_classes(flat, labels(tmp_path, LABELS["class alone"]))
    assert find_classes(flat) == SORTED | {"readme.txt": b"about"}


@pytest.mark.parametrize("kind", ["class alone", "Kaggle"])
@pytest.mark.parametrize("after", range(4))
def test_interrupted_anywhere_it_moves_the_rest_when_run_again(
    after: int, kind: str, flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = labels(tmp_path, LABELS[kind])
    rename = Path.rename
    moved = []

    def interrupted(path: Path, target: Path) -> Path:
        if len(moved) == after:
            raise KeyboardInterrupt
        moved.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sort_into_classes(flat, file)
    assert sort_into_classes(flat, file) == 4 - after
    assert find_classes(flat) == SORTED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{STEMS[0]}.JPEG n01\n{STEMS[2]}.JPEG n01\n", "no class for 2 of 4 .* first .*2.JPEG"),
        ("n01\nn02\nn03\n", "has 3 classes for 4 images; expected one for each"),
        ("n01\n" * 5, "has 5 classes for 4 images"),
        ("", "is empty; expected a line for each image"),
        ("ImageId,PredictionString\n", "is empty"),
        (f"{STEMS[0]}.JPEG n01\n{STEMS[1]}.JPEG\n", "'ILSVRC2012_val_00000002.JPEG' has no class"),
        ("n01\n../n02\nn01\nn01\n", "'../n02' is not a class name"),
        ("n01\n..\nn01\nn01\n", "'..' is not a class name"),
        ("n01\n/tmp\nn01\nn01\n", "'/tmp' is not a class name"),
    ],
)  # fmt: skip
def test_wrong_labels_move_nothing(text: str, message: str, flat: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        sort_into_classes(flat, labels(tmp_path, text))
    assert find_classes(flat) == IMAGES
    assert not [path for path in flat.iterdir() if path.is_dir()]


def test_labels_that_are_no_text_or_not_there_are_named(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xd8\xff")
    for name in ("binary", "none"):
        with pytest.raises(DataError, match=f"{name} cannot be read"):
            sort_into_classes(flat, tmp_path / name)
    with pytest.raises(DataError, match=r"there is no folder .*/nowhere"):
        sort_into_classes(tmp_path / "nowhere", tmp_path / "none")


def test_an_image_that_was_sorted_before_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "val"
    labels = tmp_path / "labels.txt"
    (folder / "cat").mkdir(parents=True)
    (folder / "cat" / "a.jpg").write_bytes(b"sorted before")
    (folder / "a.jpg").write_bytes(b"flat")
    labels.write_text("a.jpg cat\n")
    with pytest.raises(DataError, match=r"cat/a.jpg exists already"):
        sort_into_classes(folder, labels)
    assert (folder / "cat" / "a.jpg").read_bytes() == b"sorted before"
    assert (folder / "a.jpg").exists()
