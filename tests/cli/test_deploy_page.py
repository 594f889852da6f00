"""The commands and the Python of docs/how-to/deploy.md run as they are shown, on a small run."""

import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.inference.targets import TARGETS, find_target
from tests.soak import SOAK

Answer = Callable[..., tuple[int, str, str]]
PAGE = (Path(__file__).parents[2] / "docs/how-to/deploy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
SHOWN = [
    shlex.join(shlex.split(line, comments=True))
    for kind, block in BLOCKS
    for line in re.findall(r"^\$ lockstep (.*)", block, flags=re.MULTILINE)
    if kind == "console"
]
COMMANDS = list(dict.fromkeys(SHOWN))
TABLE = PAGE.partition("## Targets\n")[2].partition("\n###")[0]
FILES = dict(re.findall(r"^\| `([a-z][a-z-]+)`[^|]*\|([^|]*)\|", TABLE, flags=re.MULTILINE))
"""What the table of targets says is written, by target."""
SIZES = "--set image_size=32 --set eval_crop=32 --set eval_resize=36"
SMALL = f"--model resnet18 -i 2 {SIZES}".split()


def words_of(command: str, places: dict[str, Path]) -> list[object]:
    """Return a command line with paths of this test. What was trained for seconds may lose any
    top-1 in int8."""
    words: list[object] = [places.get(word, word) for word in shlex.split(command)]
    if words[0] == "benchmark":
        return [*words, *SMALL]
    return [*words, "--tolerance", 100] if "int8" in words else words


def target(words: list[object]) -> str:
    """Return the format that an export is written to."""
    return (
        find_target(str(words[words.index("--to") + 1])).name if "--to" in words else "savedmodel"
    )


def skip_what_cannot_run(words: list[object]) -> None:
    if words[0] == "serve":
        pytest.skip("a server runs until it is stopped: its own tests start it")
    if words[0] == "benchmark" and not SOAK:
        pytest.skip("a grid of many processes: runs under make soak")
    if "executorch" in words and not SOAK:
        pytest.skip("test_phone_programs exports to it: runs under make soak")
    for package in ("executorch", "openvino", "tensorrt"):
        if (
            any(package in str(word).split(",") for word in words[1:])
            and importlib.util.find_spec(package) is None
        ):
            pytest.skip(f"{package} is not installed")


@pytest.fixture
def places(
    run_folder: Path, textures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Path]:
    """What the page's names stand for. FOLDER holds an export, unless a command writes one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    photos = next((textures / "val").glob("[!.]*"))
    names = {
        "RUN": run_folder,
        "demo/run": run_folder,
        "DATA": textures,
        "demo/data": textures,
        "photos/": photos,
    }
    return names | {"FOLDER": tmp_path / "export"}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_work(
    answer: Answer, places: dict[str, Path], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(command, places)
    folder = places["FOLDER"]
    skip_what_cannot_run(words)
    if folder in words and words[0] != "export":
        lockstep.export(places["RUN"], folder, to="onnx", compare=False)
        capsys.readouterr()
    code, output, errors = answer(*words)
    assert code == 0, errors
    if words[0] == "export":
        assert output.startswith(f"wrote {folder}\n")
        runtime = re.escape(str(TARGETS[target(words)].runtime()))
        assert re.search(
            rf"^compared on 8 photos [^:]+: {runtime} and \w+ \S+ differ by ",
            output,
            re.MULTILINE,
        )
        written = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        names = re.findall(r"`([\w./]+\.\w+)`", FILES[target(words)].replace("NAME", "model"))
        assert {*names} <= {*written}
        assert names or target(words) == "savedmodel"
    elif words[0] == "predict":
        for photo in places["photos/"].iterdir():
            assert photo.name in output
    elif words[0] == "evaluate":
        assert "of 20 images" in output
    else:
        assert "onnxruntime" in output


def test_the_page_has_a_command_for_every_target_and_every_use() -> None:
    commands: list[list[object]] = [[*shlex.split(command)] for command in COMMANDS]
    assert {words[0] for words in commands} >= {
        "doctor",
        "predict",
        "evaluate",
        "benchmark",
        "export",
    }
    assert {target(words) for words in commands if words[0] == "export"} == {*TARGETS} == {*FILES}


@pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="openvino is not installed"
)
def test_the_python_of_the_page_runs(places: dict[str, Path]) -> None:
    # the other program of the page runs without Lockstep: tests/inference/test_stablehlo.py
    [program] = [block for kind, block in BLOCKS if kind == "python" and "lockstep" in block]
    for name in ("RUN", "DATA"):
        program = program.replace(f'"{name}"', repr(str(places[name])))
    names: dict[str, Any] = {"images": np.zeros((2, 32, 32, 3), np.uint8)}
    exec(compile(program, "deploy.md", "exec"), names)
    assert names["logits"].shape == (2, 10)
