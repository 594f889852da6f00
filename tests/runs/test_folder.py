"""A run's folder: one recipe, one writer, and complete files."""

import json
import os
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import yaml

from lockstep.models.state import State
from lockstep.recipes import Recipe, load_recipe
from lockstep.runs import folder
from lockstep.runs.environment import describe_environment
from lockstep.runs.folder import open_run_folder, read_classes
from lockstep.runs.report import read_report
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.system.event_log import read_log
from lockstep.system.files import write_json, write_text
from lockstep.system.machine import memory_bytes
from lockstep.weights import checkpoint
from tests.lines import read_table


def begin(path: Path, recipe: Recipe) -> None:
    """Leave a folder as a run leaves it that is stopped after its first log entry."""
    with open_run_folder(path, recipe):
        (path / "log.jsonl").write_text('{"kind": "start", "step": 0}\n')


def test_a_new_folder_holds_every_field_of_the_recipe(tiny_recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a run"
    with open_run_folder(path, tiny_recipe):
        assert (path / "checkpoints").is_dir()
    assert yaml.safe_load((path / "recipe.yaml").read_text()) == tiny_recipe.fields()
    assert load_recipe(path) == tiny_recipe


def test_a_run_knows_its_classes_by_the_newest_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    assert read_classes(tmp_path) == ()
    for step, classes in ((1, ["0", "10", "2"]), (2, ["cat"])):
        state = State(step, {"fc.bias": np.zeros(3, np.float32)}, {})
        checkpoint.save(tmp_path / "checkpoints", state, data_digest="", about={"classes": classes})
    assert read_classes(tmp_path) == ("cat",)
    (tmp_path / "checkpoints/step-00000002/model.safetensors").write_bytes(b"")
    assert read_classes(tmp_path) == ("0", "10", "2")


def test_a_run_resumes_in_its_folder(tiny_recipe: Recipe, tmp_path: Path) -> None:
    begin(tmp_path / "run", tiny_recipe)
    with open_run_folder(tmp_path / "run", tiny_recipe) as changed:
        assert changed == {}
        assert (tmp_path / "run" / "log.jsonl").exists()


def test_a_run_keeps_the_name_of_its_first_recipe(tiny_recipe: Recipe, tmp_path: Path) -> None:
    begin(tmp_path / "run", tiny_recipe.rename("with: a colon"))
    begin(tmp_path / "run", tiny_recipe.rename("the same fields"))
    assert load_recipe(tmp_path / "run").based_on == "with: a colon"
    assert load_recipe(tmp_path / "run") == tiny_recipe


def test_a_nameless_run_takes_an_equal_recipes_name(tiny_recipe: Recipe, tmp_path: Path) -> None:
    begin(tmp_path / "run", tiny_recipe)
    begin(tmp_path / "run", tiny_recipe.rename("tiny"))
    assert load_recipe(tmp_path / "run").based_on == "tiny"


def test_a_run_under_a_longer_recipe_is_not_finished(tiny_recipe: Recipe, tmp_path: Path) -> None:
    begin(tmp_path / "run", tiny_recipe)
    write_json(tmp_path / "run" / "report.json", {"steps": 14})
    other = tiny_recipe.replace(epochs=7)
    run = tmp_path / "run"
    with pytest.raises(RecipeError, match=r"\nIt cannot, says this test\.\nUse another --out"):
        open_run_folder(run, other, lambda there: "It cannot, says this test.").__enter__()
    assert (run / "report.json").exists()
    with open_run_folder(run, other, lambda there: None if there == tiny_recipe else "") as changed:
        assert changed == {"epochs": (2, 7)}
    assert not (tmp_path / "run" / "report.json").exists()
    assert load_recipe(tmp_path / "run") == other


def test_another_recipe_is_refused_with_its_fields(tiny_recipe: Recipe, tmp_path: Path) -> None:
    before = tiny_recipe.replace(augmentations=["solarise", {"name": "randaugment"}])
    begin(tmp_path / "run", before)
    other = before.replace(
        epochs=7,
        lr=0.5,
        mean=(1.0, 2.0, 3.0),
        augmentations=["solarise", {"name": "randaugment", "magnitude": 7}],
        mix_probability=0.0,
        image_sizes=[[0, 32], [1, 64]],
    )
    with pytest.raises(RecipeError) as error:
        open_run_folder(tmp_path / "run", other).__enter__()
    lines = str(error.value).splitlines()
    assert lines[0] == f"{tmp_path / 'run'} holds a run of a different recipe:"
    assert {
        "  epochs: 2 in that run, 7 here",
        "  lr: 0.05 in that run, 0.5 here",
        "  mean: [123.675, 116.28, 103.53] in that run, [1.0, 2.0, 3.0] here",
        "  augmentations[1].magnitude: 9.0 in that run, 7.0 here",
        "  image_sizes: [] in that run, [[0, 32], [1, 64]] here",
    } < set(lines)
    assert load_recipe(tmp_path / "run") == before


def test_another_recipe_is_refused_for_a_checkpoint(tiny_recipe: Recipe, tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run", tiny_recipe):
        (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir()
    with pytest.raises(RecipeError, match="epochs"):
        open_run_folder(tmp_path / "run", tiny_recipe.replace(epochs=7)).__enter__()


def test_a_corrected_recipe_is_taken_before_training(tiny_recipe: Recipe, tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run", tiny_recipe.replace(logits=3)):
        pass
    with open_run_folder(tmp_path / "run", tiny_recipe):
        assert load_recipe(tmp_path / "run") == tiny_recipe


def test_a_folder_named_like_a_published_recipe_is_still_a_folder(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begin(Path("demo"), tiny_recipe)
    with open_run_folder(Path("demo"), tiny_recipe):
        assert load_recipe(Path("demo/recipe.yaml")) == tiny_recipe


def test_a_folder_of_other_things_is_refused(tiny_recipe: Recipe, tmp_path: Path) -> None:
    for name in ("thesis.tex", "photos", "a.txt", "b.txt"):
        (tmp_path / name).mkdir()
    message = r"holds other files \(a\.txt, b\.txt, photos\) but no run"
    with pytest.raises(CheckpointError, match=message):
        open_run_folder(tmp_path, tiny_recipe).__enter__()
    result = sorted(path.name for path in tmp_path.iterdir())
    assert result == ["a.txt", "b.txt", "photos", "thesis.tex"]


@pytest.mark.parametrize(
    "left", [[], [".lock"], [".lock", ".recipe.yaml.partial"], [".DS_Store"]], ids=str
)
def test_a_killed_start_stops_nothing(left: list[str], tiny_recipe: Recipe, tmp_path: Path) -> None:
    for name in left:
        (tmp_path / name).write_text("half")
    with open_run_folder(tmp_path, tiny_recipe):
        assert load_recipe(tmp_path) == tiny_recipe


def test_a_start_killed_before_any_file_is_written_can_be_repeated(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def die(path: Path, text: str) -> None:
        written.append(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_text", die)
        with pytest.raises(KeyboardInterrupt):
            open_run_folder(tmp_path / "run", tiny_recipe).__enter__()
    assert written == [tmp_path / "run" / "recipe.yaml"]
    with open_run_folder(tmp_path / "run", tiny_recipe):
        assert load_recipe(tmp_path / "run") == tiny_recipe


@pytest.mark.parametrize("out", ["file", "file/below", "file/deep/below"])
def test_an_impossible_folder_is_an_error(out: str, tiny_recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = r"cannot write to .*file.*: (File exists|Not a directory); use another --out"
    with pytest.raises(CheckpointError, match=message):
        open_run_folder(tmp_path / out, tiny_recipe).__enter__()


def test_a_folder_without_permission_is_a_clear_error(
    tiny_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    message = r"cannot write to .*: Permission denied; use another --out"
    with pytest.raises(CheckpointError, match=message):
        open_run_folder(tmp_path / "run", tiny_recipe).__enter__()


HOLDER = """
import sys
from pathlib import Path
from lockstep.recipes import load_recipe
from lockstep.runs.folder import open_run_folder, read_classes
with open_run_folder(Path(sys.argv[1]), load_recipe(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_in_a_folder_is_refused(tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(tiny_recipe.format_yaml())
    path = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(path), str(recipe)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another process is training in"):
            open_run_folder(path, tiny_recipe).__enter__()
        holder.kill()
        holder.communicate()
    with open_run_folder(path, tiny_recipe):
        assert load_recipe(path) == tiny_recipe


def test_a_refused_start_does_not_hold_the_folder(tiny_recipe: Recipe, tmp_path: Path) -> None:
    begin(tmp_path / "run", tiny_recipe)
    with pytest.raises(RecipeError) as kept:
        open_run_folder(tmp_path / "run", tiny_recipe.replace(epochs=7)).__enter__()
    with open_run_folder(tmp_path / "run", tiny_recipe):
        assert kept.traceback


def test_a_small_file_is_never_seen_half_written(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    texts = ["a" * 200_000, "b" * 100]
    write_text(path, texts[0])
    seen = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(60):
        write_text(path, texts[number % 2])
    done.set()
    reader.join()
    assert seen <= set(texts)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new" * 10_000 + "\ud800")
    assert path.read_text() == "old"


def test_json_is_written_as_people_read_it(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"classes": ["café"], "loss": 0.1})
    assert (tmp_path / "a.json").read_text(
        encoding="utf-8"
    ) == '{\n "classes": [\n  "café"\n ],\n "loss": 0.1\n}\n'


SCORES = {"step": 8, "loss": None, "top1_percent": 75.0, "top5_percent": 100.0, "images": 8}
REPORT = {
    **{"recipe": "", "model": "resnet18", "epochs": 1, "device": "CPU", "ranks": 1},
    "data_wait_share": None,
    "steps": 8,
    "final": {"trained": SCORES},
    "best": SCORES,
    "classes": ["cat", "owl"],
    "per_class": {"trained": {"images": [4, 4], "top1": [3, 3], "top5": [4, 4]}},
    "images_per_sec": None,
    "train_sec": 1.5,
    "quarantined": 0,
}


@pytest.mark.parametrize(
    ("content", "report"),
    [
        (json.dumps(REPORT), REPORT),
        (json.dumps(REPORT)[:-1], None),
        ("", None),
        (None, None),
        ("[]", None),
        ("5", None),
        ("{}", None),
        ("[" * 100_000, None),
        (json.dumps(REPORT | {"final": []}), None),
        (json.dumps(REPORT | {"final": {"trained": SCORES | {"images": 0}}}), None),
        (json.dumps(REPORT | {"best": None}), None),
        (json.dumps(REPORT | {"classes": [1, 2]}), None),
        (
            json.dumps(
                REPORT | {"per_class": {"trained": {"images": [4], "top1": [4], "top5": [4]}}}
            ),
            None,
        ),
        (json.dumps(REPORT | {"train_sec": "long"}), None),
        (json.dumps(REPORT | {"best": SCORES | {"macro_f1_percent": "1"}}), None),
        (json.dumps(REPORT | {"best": SCORES | {"loss": False}}), None),
        (json.dumps(REPORT | {"published": {"recipe": "demo"}}), None),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_only_a_whole_report_is_one(content: str | None, report: object, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    assert read_report(tmp_path) == report


ONE = '{"kind": "start", "step": 1}'
TWO = '{"kind": "evaluate", "step": 2, "weights": "trained"}'


@pytest.mark.parametrize(
    ("content", "entries"),
    [
        ("", []),
        (f"{ONE}\n{TWO}\n", [json.loads(ONE), json.loads(TWO)]),
        (f"{ONE}\n{TWO}", [json.loads(ONE)]),
        (f'{ONE}\n{{"st', [json.loads(ONE)]),
        (f'{ONE}\n{{"st\n', [json.loads(ONE)]),
        ('{"st', []),
        ('{"name": "caf\xc3', []),
        ('{"kind": "note", "step": 1, "loss": NaN}\n', "NaN"),
    ],
    ids=repr,
)
def test_a_log_is_read_up_to_a_cut_line(content: str, entries: object, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content.encode("latin-1"))
    if entries == "NaN":
        assert str(read_log(path)) == "[{'kind': 'note', 'step': 1, 'loss': nan}]"
    else:
        assert read_log(path) == entries


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_log(tmp_path / "log.jsonl") == []


def test_a_line_cut_off_in_the_middle_of_a_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{ONE}\n{{"st\n{TWO}\n')
    with pytest.raises(CheckpointError, match=r"log\.jsonl, line 2 is not JSON"):
        read_log(path)


OTHER_SHAPES = """
5 | it is not an object
[] | it is not an object
{} | it has no kind
{"kind": 1} | it has no kind
{"kind": "start"} | it has no step
{"kind": "train"} | it has no step
{"kind": "evaluate", "step": true} | its step is True
{"kind": "evaluate", "step": 1e300, "weights": "trained"} | its step is 1e
{"kind": "evaluate", "step": 4, "weights": ["trained"]} | its weights is
{"kind": "evaluate", "step": 4, "weights": "trained", "top1_percent": NaN} | its top1_percent is nan
{"kind": "train", "step": 2, "first_step": 0, "images": 0, "images_per_sec": 1} | its images is 0
{"kind": "train", "step": 2, "first_step": 0, "images": 8, "images_per_sec": 0}
  | its images_per_sec is 0
{"kind": "train", "step": 2, "first_step": 2, "images": 8, "images_per_sec": 1}
  | its first_step is not below
{"kind": "note", "step": 2, "losses": 5} | its losses is 5
"""


@pytest.mark.parametrize(("line", "problem"), read_table(OTHER_SHAPES))
def test_a_line_of_another_shape_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{ONE}\n{line}\n")
    with pytest.raises(CheckpointError, match=rf"log\.jsonl, line 2 is not a log entry: {problem}"):
        read_log(path)


def test_a_log_that_is_shown_needs_every_figure(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"kind": "train", "step": 2, "first_step": 0, "images": 8, "images_per_sec": 1.0}\n'
    )
    assert len(read_log(path)) == 1
    with pytest.raises(CheckpointError, match="line 1 is not a log entry: it has no "):
        read_log(path, whole=True)


def test_the_environment_says_what_numbers_and_speed_depend_on() -> None:
    about = describe_environment("torch")
    assert about["lockstep"] == version("lockstep-vision")
    assert about["numpy"] == version("numpy")
    assert about["torch"] == version("torch")
    assert about["python"] == ".".join(map(str, sys.version_info[:3]))
    assert about["cores"] == len(os.sched_getaffinity(0))
    assert about["memory_bytes"] == memory_bytes()
    assert about["system"].startswith("Linux")
    assert about["processor"]
