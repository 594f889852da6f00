"""Every mistake of a user gives one clear message on stderr, exit code 2 and no traceback."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep import backends, cli
from lockstep.data.textures import draw_data_set
from lockstep.system.errors import DivergedError, Interrupted
from tests.conftest import TINY
from tests.inference.cases import save_random
from tests.lines import check_lines, read_table
from tests.processes import call

Run = Callable[..., tuple[int, str, str]]
TRAIN = "train --recipe demo --data DATA --out OUT"

WRONG = r"""
train --recipe resnet50-padle-90ep --data DATA --out OUT | Did you mean resnet50-paddle-90ep or
train --recipe GARBAGE --data DATA --out OUT | garbage.yaml: cannot be read as YAML
train --recipe LIST --data DATA --out OUT | list.yaml: expected fields of a recipe .*, found
train --recipe FIELDS --data DATA --out OUT
  | fields.yaml: there is no field 'epoch'. Did you mean epochs
train --recipe demo --data DATA --out OUT --set epoch=3
  | there is no field 'epoch'. Did you mean --set epochs=3?
train --recipe demo --data DATA --out OUT --set sed=3 | Did you mean --set seed=3
train --recipe demo --data DATA --out OUT --set log_every_step=3
  | Did you mean --set log_every_steps=3
train --recipe demo --data DATA --out OUT --set epochs | expected field=value, found 'epochs'
train --recipe demo --data DATA --out OUT --set epochs=-3 | epochs: .*, not -3
train --recipe demo --data DATA --out OUT --set epochs=many | epochs: .*, not 'many'
train --recipe demo --data DATA --out OUT --set epochs=[1 | epochs: '\[1' is not a value
train --recipe demo --data DATA --out OUT --set model=resnet5
  | there is no model 'resnet5'. Did you mean resnet50.* --set 'model={block: bottleneck,
train --recipe demo --data DATA --out OUT --set padding=sme
  | padding: .*'symmetric', 'same' or 'flax'.*, not 'sme'
train --recipe demo --data DATA --out OUT --set loader_threads=-1 | loader_threads: .*, not -1
train --recipe demo --data DATA --out OUT --backend trch
  | there is no backend 'trch'. Did you mean torch?
train --recipe demo --data MISSING --out OUT
  | there is no folder .*missing; expected .*/train/<class>/<image>,
train --recipe demo --data FLAT --out OUT
  | flat/val holds 2 files and no folders; .* lockstep data sort-val
train --data DATA/train/dots --out OUT
  | dots has train images outside of class folders .* name the folder around
train --data DATA --split 0.1 --out OUT
  | has validation images, .* leave out --split, or use --data .*/train
find lr --data MISSING --weights https://127.0.0.1:9/w.pth | there is no folder .*missing
train --data DATA/train --split 1 --out OUT | validation_share: .* less than 1, not 1
train --data DATA --set epochs=0 --out OUT | epochs: .* greater than or equal to 1, not 0
train --recipe demo --data DATA --out FILE
  | cannot write to .*file.txt: File exists; use another --out
train --recipe demo --data DATA --out DATA | holds other files .*train, val.* but no run
train --out OUT | there is no run in .*; a new run needs images: --data DATA
train --recipe demo --out OUT | there is no run in .*; a new run needs images: --data DATA
demo --out FILE | file.txt
demo --set epoch=1 | Did you mean --set epochs=1
evaluate MISSING --data DATA | there is no run, no file and no checkpoint .*missing
evaluate GARBAGE --data DATA
  | garbage.yaml holds no weights that can be read; expected a run's folder, a checkpoint, or
  weights of
evaluate EMPTY --data DATA | empty holds no weights that can be read
evaluate MISSING --data DATA --set epochs=3
  | epochs cannot be set for trained weights; only preprocessing can. Known: mean, std,
convert EMPTY OUT.safetensors | empty holds no weights that can be read
convert RESNET OUT --to onnx | there is no format 'onnx' to convert to
predict MISSING IMAGE | there is no run, no file and no checkpoint .*missing
predict timm/resnet50.a1 IMAGE | Did you mean timm/resnet50.a1_in1k or timm/resnet50.a1h_in1k\?
predict resnet50.a1_in1k IMAGE | checkpoint resnet50.a1_in1k. Did you mean timm/resnet50.a1_in1k\?
predict timm/vit_tiny.x IMAGE | known weights. `lockstep weights` lists them, all ResNets
train DATA --out OUT | train needs an option in front of .*: --data
recipes fields sched | there is no field 'sched'. Did you mean lr_decay\?
predict MISSING | no images are named; expected lockstep predict RUN IMAGES: files, folders
predict MISSING @IMAGE | the list .*a.jpg cannot be read: No such file or directory
predict MISSING IMAGE --format cvs | there is no format 'cvs'. Did you mean csv?
find lr --data DATA --weight-decay 1 | Did you mean --set weight_decay=1
recipes show dmo | there is no recipe and no file 'dmo'. Did you mean demo?
recipes diff demo dmo | Did you mean demo?
launch -n 2 | nothing to launch; expected a command after --
launch -n 2 --backend trch -- train --data x --out x | Did you mean torch?
"""


@pytest.fixture(scope="session")
def places(textures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The values of the words in capitals."""
    root = tmp_path_factory.mktemp("wrong")
    contents = {
        "garbage.yaml": "epochs: {",
        "list.yaml": "[1, 2]",
        "fields.yaml": "epoch: 3",
        "file.txt": "text",
    }
    for name, content in contents.items():
        (root / name).write_text(content)
    draw_data_set(root / "flat", train_images=10, val_images=0)
    for folder in (root / "flat" / "val").iterdir():
        folder.rmdir()
    for name in ("a.jpg", "b.jpg"):
        (root / "flat" / "val" / name).write_text("")
    (root / "empty").mkdir()
    return {
        "DATA": str(textures),
        "OUT": str(root / "out"),
        "MISSING": str(root / "missing"),
        "FLAT": str(root / "flat"),
        "FILE": str(root / "file.txt"),
        "EMPTY": str(root / "empty"),
        "RESNET": str(save_random(TINY, root)),
        "GARBAGE": str(root / "garbage.yaml"),
        "LIST": str(root / "list.yaml"),
        "FIELDS": str(root / "fields.yaml"),
        "IMAGE": str(root / "a.jpg"),
    }


def fill_places(line: str, places: dict[str, str]) -> list[str]:
    return [
        re.sub("[A-Z]{2,}", lambda word: places[word[0]], argument) for argument in line.split()
    ]


@pytest.mark.parametrize(
    "line",
    [
        "export RESNET OUT --fp16",
        "convert RESNET OUT --device cuda",
        "evaluate RESNET --data DATA --num-classes 10",
        "benchmark train --precision fp16",
    ],
)
def test_no_setting_is_suggested_that_the_command_refuses(
    line: str, answer: Run, places: dict[str, str]
) -> None:
    code, _, errors = answer(*fill_places(line, places))
    assert code == 2
    assert "--set" not in errors


@pytest.mark.parametrize(("line", "message"), read_table(WRONG))
def test_a_wrong_command_is_answered_with_what_is_wrong(
    line: str, message: str, answer: Run, places: dict[str, str]
) -> None:
    code, output, errors = answer(*fill_places(line, places))
    assert code == 2
    assert output == ""
    assert errors.startswith("lockstep: ")
    assert errors.count("lockstep: ") == 1
    assert re.search(message, errors)


def test_little_memory_is_told(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 2 TiB")

    monkeypatch.setattr("lockstep.reporting.report", greedy)
    code, _, errors = answer("report", "run")
    assert code == 1
    assert errors.startswith(
        "lockstep: not enough memory: Unable to allocate 2 TiB. Use a smaller batch"
    )


def test_a_device_that_is_not_there_is_told_with_where_to_look(
    answer: Run, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, errors = answer(*fill_places(TRAIN, places), "--set", "device=cuda")
    assert code == 2
    assert errors.startswith("lockstep: device is cuda, but PyTorch finds no GPU here")
    assert "`lockstep doctor`" in errors


GRAMMAR = """
trian | No such command 'trian'. Did you mean 'train'?
zzz | No such command 'zzz'.
recipes shwo | No such command 'shwo'. Did you mean 'show'?
train | Missing option '--out'.
train --recipe demo | Missing option '--out'.
train --recip demo | No such option: --recip (Possible options: --help, --recipe)
recipes diff demo | Missing argument 'b'.
predict --run x | Missing argument 'RUN'.
predict x a.jpg --top 0 | Invalid value for '--top': Input should be greater than or equal to 1
predict x a.jpg --top many | Invalid value for '--top': Input should be a valid integer
launch -n 0 -- train | Invalid value for '-n'
"""


@pytest.mark.parametrize(("line", "message"), read_table(GRAMMAR))
def test_wrong_grammar_is_answered_with_the_usage(line: str, message: str, answer: Run) -> None:
    code, output, errors = answer(*line.split())
    assert code == 2
    assert output == ""
    assert errors.startswith("Usage: ")
    assert f"\nError: {message}" in errors


def test_without_a_command_the_help_is_shown(answer: Run) -> None:
    code, output, errors = answer()
    assert code == 2
    assert "train" in output + errors


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DivergedError("the loss is nan"), 3, "lockstep: the loss is nan\n"),
        (Interrupted("stopped by SIGTERM", 75), 75, "lockstep: stopped by SIGTERM\n"),
        (
            OSError(28, "No space left on device", "a/b"),
            2,
            "lockstep: [Errno 28] No space left on device: 'a/b'\n",
        ),
        (BrokenPipeError(32, "a rank is gone"), 2, "lockstep: [Errno 32] a rank is gone\n"),
    ],
    ids=repr,
)
def test_how_a_command_ends_is_told_by_its_exit_code(
    error: BaseException, code: int, message: str, answer: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "app", raising(error))
    assert answer("train") == (code, "", message)


def test_errors_of_our_own_have_tracebacks(answer: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", raising(ZeroDivisionError("a mistake")))
    with pytest.raises(ZeroDivisionError):
        cli.run()


def test_one_of_several_ranks_says_who_it_is_and_leaves_its_exit_code(
    answer: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCKSTEP_EXIT_CODE_FOLDER", str(tmp_path))
    code, _, errors = answer("recipes", "show", "dmo")
    assert code == 2
    assert errors.startswith("[rank 3] lockstep: there is no recipe")
    assert (tmp_path / "3").read_text() == "2"


MISSING_PATHS = """
train --data MISSING --out OUT | there is no folder .*missing
train --data DATA --weights MISSING --out OUT | there is no run, no file .*missing
find lr --data DATA --weights MISSING | there is no run, no file .*missing
data show DATA --weights MISSING | there is no run, no file .*missing
predict MISSING a.jpg | there is no run, no file .*missing
predict DATA/train MISSING | missing: No such file or directory
serve MISSING | there is no run, no file .*missing
convert MISSING a.safetensors | there is no run, no file .*missing
"""


@pytest.mark.parametrize(("command", "message"), read_table(MISSING_PATHS))
def test_a_missing_path_is_said_before_a_framework_is_imported(
    command: str, message: str, places: dict[str, str], answer: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "load", raising(AssertionError("a framework is imported")))
    code, output, errors = answer(*fill_places(command, places))
    assert (code in (1, 2), output) == (True, "")
    assert re.search(message, errors)


def raising(error: BaseException) -> Callable[..., None]:
    def app(**_: object) -> None:
        raise error

    return app


def test_a_process_says_it_on_stderr_alone() -> None:
    code, output, errors = call("recipes", "show", "dmo")
    assert (code, output) == (2, "")
    check_lines(errors, r"^lockstep: .*'dmo'\. Did you mean demo\?$")


def test_a_reader_that_goes_away_is_no_error_to_speak_of() -> None:
    command = [sys.executable, "-m", "lockstep", "recipes", "show", "demo"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
