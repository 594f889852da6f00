"""Which images `lockstep predict` takes, and how it writes results."""

import csv
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lockstep
from lockstep.data.packing import Packing, pack
from lockstep.inference import named_images
from lockstep.inference.images import Encoded
from lockstep.inference.named_images import NamedImages
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.system.regular_files import NAMES
from lockstep.weights import checkpoint
from tests.lines import check_lines

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def images(textures: Path) -> list[Path]:
    return sorted((textures / "val").rglob("*.jpg"))[:2]


def test_images_that_cannot_be_read_are_named_and_counted_and_the_others_predicted(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    missing = tmp_path / "no.jpg"
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(images[0].read_bytes()[:2000])
    code, output, errors = answer(
        "predict", run_folder, missing, images[0], cut, images[1], "--format", "jsonl"
    )
    assert code == 1
    result = [json.loads(line)["path"] for line in output.splitlines()]
    assert result == [str(image) for image in images]
    first, second, last = errors.splitlines()
    assert first == f"lockstep: {missing}: No such file or directory"
    assert second.startswith(f"lockstep: {cut}: cannot be read: Premature end of JPEG file")
    assert last == "lockstep: 2 of 4 images could not be read"


def test_the_old_form_is_noted(answer: Run, run_folder: Path, images: list[Path]) -> None:
    new = answer("predict", run_folder, *images)
    code, output, errors = answer("predict", *images, "--run", run_folder)
    assert (code, output) == (0, new[1])
    check_lines(errors, "^note: --run is not needed")


def paths_of(answered: tuple[int, str, str]) -> list[str]:
    """Return the paths in JSON lines."""
    assert answered[0] == 0
    return [json.loads(line)["path"] for line in answered[1].splitlines()]


def test_folders_and_patterns_are_searched_in_order(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    root = tmp_path / "photos"
    for name in ("b/2.jpg", "a/1.JPEG", "c.png", "a/.hidden.jpg", "a/notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(images[0], root / name)
    (root / "b" / "up").symlink_to(root)
    photos = [str(root / name) for name in ("a/1.JPEG", "b/2.jpg", "c.png")]
    of_folder = answer("predict", run_folder, root, "--format", "jsonl")
    assert paths_of(of_folder) == photos
    notes = root / "a" / "notes.txt"
    check_lines(of_folder[2], f"^note: left out 1 file of other kinds, such as {notes}$")
    result = paths_of(answer("predict", run_folder, f"{root}/[ab]/*.[jJ]*", "--format", "jsonl"))
    assert result == photos[:2]
    code, _, errors = answer("predict", run_folder, f"{root}/*.gif")
    assert (code, errors.splitlines()[0]) == (1, f"lockstep: {root}/*.gif: no file matches")


def test_a_list_and_standard_input_name_images(
    answer: Run,
    run_folder: Path,
    images: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "names.txt").write_text("".join(f"{image}\r\n\n" for image in images))
    result = paths_of(answer("predict", run_folder, f"@{tmp_path}/names.txt", "--format", "jsonl"))
    assert result == list(map(str, images))
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(map(str, images)).encode()))
    )
    result = paths_of(answer("predict", run_folder, "-", "--format", "jsonl"))
    assert result == list(map(str, images))


def test_what_is_no_file_is_named_and_the_images_are_predicted(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    photos = tmp_path / "photos"
    photos.mkdir()
    os.mkfifo(photos / "pipe.tar")
    (photos / "zero.jpg").symlink_to("/dev/zero")
    shutil.copy(images[0], photos / "photo.jpg")
    arguments = ("/dev/zero", tmp_path / "pipe", photos, "/proc/self")
    code, output, errors = answer("predict", run_folder, *arguments, "--format", "jsonl")
    assert code == 1
    assert [json.loads(line)["path"] for line in output.splitlines()] == [str(photos / "photo.jpg")]
    check_lines(
        errors,
        "^lockstep: /dev/zero: .* device",
        f"^lockstep: {tmp_path}/pipe: .* pipe",
        f"^lockstep: {photos}/pipe.tar: .* pipe",
        f"^lockstep: {photos}/zero.jpg: .* device",
        "^lockstep: /proc/self: a system folder",
        "^lockstep: 5 of 6 images",
    )


def test_a_bad_line_of_a_list_is_named_by_its_number_and_the_others_are_read(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    names = tmp_path / "names.txt"
    long = "x" * 5000
    names.write_text(f"{images[0]}\n\n{long}\na\0b.jpg\n{images[1]}\n")
    code, output, errors = answer("predict", run_folder, f"@{names}", "--format", "jsonl")
    assert code == 1
    assert [json.loads(line)["path"] for line in output.splitlines()] == list(map(str, images))
    check_lines(
        errors,
        f"^lockstep: {names}, line 3: the path has 5,000 bytes.* 4,095$",
        f"^lockstep: {names}, line 4: the line contains a NUL; .*find -print0",
        "^lockstep: 2 of 4 images",
    )


def test_a_list_may_have_a_nul_after_each_path(
    answer: Run,
    run_folder: Path,
    images: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = tmp_path / "two\nlines.jpg"
    shutil.copy(images[0], odd)
    content = b"".join(os.fsencode(path) + b"\0" for path in (odd, images[1]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    result = paths_of(answer("predict", run_folder, "-", "--format", "jsonl"))
    assert result == [str(odd), str(images[1])]


def test_a_list_that_never_ends_is_refused(
    answer: Run, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_images, "NAMES", NAMES._replace(most_bytes=2**20))
    os.mkfifo(tmp_path / "pipe")
    with Path("/dev/zero").open() as endless:
        monkeypatch.setattr("sys.stdin", endless)
        answers = [
            answer("predict", run_folder, arguments)
            for arguments in ("-", "@/dev/zero", f"@{tmp_path}/pipe")
        ]
    assert [(code, output) for code, output, _ in answers] == [(2, "")] * 3
    check_lines(
        "".join(errors for _, _, errors in answers),
        "^lockstep: standard input .* 1,048,576 ",
        "^lockstep: the list /dev/zero .* device",
        f"^lockstep: the list {tmp_path}/pipe .* pipe.* standard input: -$",
    )


def test_an_image_comes_through_standard_input(
    answer: Run, run_folder: Path, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(images[0].read_bytes())))
    through_stdin, from_file = json.loads(
        answer("predict", run_folder, "-", images[0], "--json")[1]
    )
    assert through_stdin == from_file | {"path": "-"}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM"])
def test_standard_input_is_an_image_of_any_format(kind: str, images: list[Path]) -> None:
    content = io.BytesIO()
    named = NamedImages()
    # Longer than what decides, as BMP and PPM.
    Image.open(images[0]).resize((300, 300)).save(content, kind)
    content.seek(0)
    named.add("-", content)
    [image] = named
    assert isinstance(image, Encoded)
    assert image.read() == content.getvalue()


@pytest.mark.parametrize("format", ["recordio", "tfrecord", "webdataset"])
def test_images_in_files_of_any_storage_format_are_predicted(
    format: str, answer: Run, run_folder: Path, textures: Path, tmp_path: Path
) -> None:
    pack(textures / "val", tmp_path / "packed", Packing(format))
    [file] = [
        path
        for path in (tmp_path / "packed").glob("[!.]*")
        if path.suffix in ("", ".rec", ".tar") and path.is_file()
    ]
    answers = [
        answer("predict", run_folder, arguments, "--format", "csv", "--top", 1)
        for arguments in (file, textures / "val")
    ]
    packed, loose = (list(csv.DictReader(io.StringIO(output))) for _, output, _ in answers)
    assert [(code, errors) for code, _, errors in answers] == [(0, "")] * 2
    assert len(packed) == len({row["path"] for row in packed}) == 20
    result = [(row["class"], row["probability"]) for row in packed]
    assert result == [(row["class"], row["probability"]) for row in loose]
    assert all(row["path"].startswith(str(file)) for row in packed)


def test_the_damage_of_a_file_of_images_is_named_after_its_images(
    answer: Run, run_folder: Path, textures: Path, tmp_path: Path
) -> None:
    pack(textures / "val", tmp_path / "packed", Packing("webdataset"))
    [file] = (tmp_path / "packed").glob("*.tar")
    file.write_bytes(file.read_bytes()[:30_000])
    code, output, errors = answer("predict", run_folder, tmp_path / "packed", "--format", "jsonl")
    whole = len(output.splitlines())
    assert code == 1
    assert 0 < whole < 20
    assert f"lockstep: {file}@" in errors
    assert "the file ends at byte 30000 within" in errors
    assert errors.endswith(f"lockstep: 1 of {whole + 1} images could not be read\n")


@pytest.fixture
def odd_names(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    """Weights of three classes whose names are hard to quote."""
    recipe = tiny_recipe.replace(logits=3)
    path = tmp_path / "weights.safetensors"
    about = {"recipe": recipe.fields(), "classes": ["a, b", 'the "c"', "d"]}
    checkpoint.write_weights(path, initial_tensors(recipe), about)
    return path


def test_csv_has_a_line_for_each_class_of_every_image(
    answer: Run, odd_names: Path, images: list[Path], tmp_path: Path
) -> None:
    odd = tmp_path / "x,y.jpg"
    shutil.copy(images[0], odd)
    rows = list(
        csv.DictReader(
            io.StringIO(answer("predict", odd_names, odd, "--format", "csv", "--top", 2)[1])
        )
    )
    prediction = lockstep.load(odd_names).predict(odd, top=2)
    assert [(row["path"], row["rank"], row["class"]) for row in rows] == [
        (str(odd), str(rank), name) for rank, name in enumerate(prediction.classes, start=1)
    ]
    result = [float(row["probability"]) for row in rows]
    assert result == pytest.approx(prediction.probabilities, abs=1e-6)


def test_a_spreadsheet_computes_no_cell_of_the_csv(
    answer: Run,
    tiny_recipe: Recipe,
    images: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tiny_recipe.replace(logits=4)
    weights = tmp_path / "weights.safetensors"
    about = {"recipe": recipe.fields(), "classes": ["=1+1", "+a", "@b", "'c"]}
    checkpoint.write_weights(weights, initial_tensors(recipe), about)
    names = ["=HYPERLINK(1).jpg", "-2+3.jpg", "@x.jpg", "+x.jpg", "\tx.jpg", "x=y.jpg"]
    for name in names:
        shutil.copy(images[0], tmp_path / name)
    monkeypatch.chdir(tmp_path)
    arguments = [f"./{name}" for name in names]
    rows = list(
        csv.DictReader(io.StringIO(answer("predict", weights, *arguments, "--format", "csv")[1]))
    )
    assert not [
        cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@", "\t"))
    ]
    assert [Path(row["path"]).name for row in rows[::4]] == names
    assert {row["class"] for row in rows} == {"'=1+1", "'+a", "'@b", "'c"}


def test_an_output_file_has_the_form_of_its_ending_and_what_would_be_printed(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    for ending, form in (("csv", "csv"), ("jsonl", "jsonl"), ("json", "json"), ("txt", "table")):
        path = tmp_path / f"out.{ending}"
        result = answer("predict", run_folder, *images, "--output", path)
        assert result == (0, f"wrote {path}: 2 images\n", "")
        assert path.read_text() == answer("predict", run_folder, *images, "--format", form)[1]


def test_an_output_file_stays_as_it_was_if_the_command_fails(
    answer: Run, odd_names: Path, images: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    tensors, about = checkpoint.read_weights(odd_names)
    tensors["fc.bias"][0] = np.nan
    odd_names.unlink()
    checkpoint.write_weights(odd_names, tensors, about)
    out.write_text("before")
    code, _, errors = answer("predict", odd_names, *images, "--output", out)
    assert (code, out.read_text()) == (3, "before")
    assert "are not finite numbers" in errors
    assert {path.name for path in tmp_path.iterdir()} == {odd_names.name, out.name}


class Interrupted(io.StringIO):
    """An output that takes a line, and then raises an error as a closed pipe or Ctrl-C does."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error: type[BaseException] | None = error
        reader, self.pipe = os.pipe()
        os.close(reader)

    def fileno(self) -> int:
        return self.pipe

    def flush(self) -> None:
        if self.error is not None and "\n" in self.getvalue():
            error = self.error
            self.error = None
            raise error


@pytest.mark.parametrize(("error", "exit_code"), [(BrokenPipeError, 0), (KeyboardInterrupt, 130)])
def test_a_closed_pipe_and_ctrl_c_end_the_command_at_once_and_leave_no_file(
    error: type[BaseException],
    exit_code: int,
    answer: Run,
    run_folder: Path,
    textures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "written"
    output = Interrupted(error)
    folder.mkdir()
    monkeypatch.setattr("sys.stdout", output)
    code, _, errors = answer(
        "predict",
        run_folder,
        textures,
        *("--top", 1, "--format", "table", "--embeddings", folder / "out.npz"),
    )
    os.close(output.pipe)
    if sys.stdout is not output:  # after a closed pipe, the command replaces it
        sys.stdout.close()
    assert (code, errors) == (exit_code, "")
    assert len(output.getvalue().splitlines()) == 2
    assert list(folder.iterdir()) == []
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("lockstep-predict")
    ]


def test_embeddings_are_written_next_to_the_predictions(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "features.npz"
    arguments = [images[0], tmp_path / "missing.jpg", images[1]]
    code, output, errors = answer("predict", run_folder, *arguments, "--embeddings", path, "--json")
    assert code == 1
    assert [row["path"] for row in json.loads(output)] == list(map(str, images))
    assert f"wrote {path}: 2 images of " in errors
    with lockstep.load(run_folder) as predictor, np.load(path) as arrays:
        assert arrays["paths"].tolist() == list(map(str, images))
        np.testing.assert_array_equal(
            arrays["features"], [one.features for one in predictor.predict(images, features=True)]
        )


def test_embeddings_alone_print_one_line(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "features.npz"
    code, output, errors = answer("predict", run_folder, *images, "--embeddings", path)
    with np.load(path) as arrays:
        features = arrays["features"].shape[1]
    assert (code, errors) == (0, "")
    assert output == f"wrote {path}: 2 images of {features} features\n"


def test_an_explanation_is_a_picture_for_one_image_and_a_folder_for_several(
    answer: Run, run_folder: Path, images: list[Path], tmp_path: Path
) -> None:
    picture = tmp_path / "why.png"
    folder = tmp_path / "why"
    assert answer("predict", run_folder, images[0], "--explain", picture)[0] == 0
    assert answer("predict", run_folder, *images, "--explain", folder)[0] == 0
    names = [f"{number:06d}-{image.stem}.png" for number, image in enumerate(images)]
    assert sorted(path.name for path in folder.iterdir()) == names
    with lockstep.load(run_folder) as predictor:
        first, _ = (one.explanation for one in predictor.predict(images, explain=True))
    np.testing.assert_array_equal(np.asarray(Image.open(picture)), first)
    np.testing.assert_allclose(np.asarray(Image.open(folder / names[0])).astype(int), first, atol=2)
    code, output, errors = answer("predict", run_folder, *images, "--explain", picture)
    assert (code, output) == (2, "")
    check_lines(errors, f"^lockstep: --explain {picture} .* 2 images; .* folder$")
