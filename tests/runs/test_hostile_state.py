"""State that Lockstep reads back is data: whatever a stranger puts there is refused, or made
again. `python -m tests.runs.test_hostile_state` reads it where hooks watch what is opened,
imported and connected to."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.recipes import Recipe
from lockstep.recipes.published import RECIPES
from lockstep.system.errors import LockstepError
from tests.hostile import HOSTILE, link, write

MODULE = "planted_by_a_stranger"
SEEN: list[str] = []
FAR = np.array([2**31 - 1], np.int32)
NPZ: dict[str, Any] = {
    **{"step": 1, "digest": "x", "classes": ["a"], "labels": FAR, "val.labels": FAR},
    **{"trained.ranks": FAR, "trained.predictions": FAR},
    **{"trained.losses": np.float32([1]), "trained.confidences": np.float32([1])},
}


def write_arrays(**arrays: Any) -> Callable[[Path], None]:
    """Return a function that writes an archive of arrays."""

    def fill(file: Path) -> None:
        with file.open("wb") as opened:
            np.savez_compressed(opened, **arrays)

    return fill


@cache
def make_bomb() -> bytes:
    """Return an archive that unpacks to 64 MiB."""
    packed = BytesIO()
    np.savez_compressed(packed, labels=np.zeros(2**26, np.uint8))
    return packed.getvalue()


KINDS: dict[str, Callable[[Path], object]] = HOSTILE | {
    "a link outside": link("../outside/file"),
    "other lengths": write_arrays(**{"train.labels": [0], "train.checksums": [1, 2], **NPZ}),
    "labels out of range": write_arrays(**NPZ),
    "a zip bomb": lambda file: file.write_bytes(make_bomb()),
    "a pickle": write(f"c{MODULE}\nmake\n.".encode()),
    "objects": write_arrays(labels=np.array([{}], object)),
    "paths": write(b'{"choices": {"x": {"runtime": "../outside/file"}}, "file": "../outside/f"}'),
    "a holder": write(b'{"machine": "another", "pid": 1, "beat": 1, "done": -1, "total": 0}'),
}


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note each opening outside, import of the planted module, and connection."""
    if event.startswith(("socket.connect", "socket.getaddrinfo")) or MODULE in arguments[:1]:
        SEEN.append(f"{event} {arguments}")
    if event == "open" and isinstance(arguments[0], str):
        path, _, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR) and not flags & (os.O_NOFOLLOW | os.O_EXCL)
        place = Path(path).resolve() if writes else Path(path).absolute()
        if "outside" in place.parts:
            SEEN.append(f"{event} {arguments}")


def list_readers(data: Path) -> dict[str, Callable[[Path], object]]:
    """Return what reads every file, and writes it again where the program does."""
    from lockstep.backends.jax import compile_cache
    from lockstep.data.index import open_index
    from lockstep.data.sources import find_split
    from lockstep.inference.runtimes import fastest
    from lockstep.reporting import page
    from lockstep.runs import image_results, linear_probe, loggers
    from lockstep.runs.folder import hold_run
    from lockstep.runs.reading import read_run
    from lockstep.system import locks
    from lockstep.system.files import write_json
    from lockstep.weights.preprocessing import read_certified_preprocessing

    index = open_index(find_split(data, "train"))
    sets: Any = SimpleNamespace(training=index, validation=index)
    locks.STALE_SEC = locks._LOOK_SEC = 0.01
    page._prepare_environment = cache(page._prepare_environment)  # the template is compiled once

    def read_images(file: Path) -> None:
        image_results.compare_images(file.parent, sets)
        image_results.list_images(file.parent, sets, is_new=True)

    def read_features(file: Path) -> None:
        assert linear_probe.read_features(file, (3, 2)) is None
        linear_probe.write_features(file, np.zeros((3, 2), np.float32))

    def read_report(file: Path) -> None:
        page.render([read_run(file.parent)])

    return {
        "features-0.npy": read_features,
        "runtimes.json": lambda file: write_json(file, fastest._read(file)),
        "images.npz": read_images,
        "loggers.json": lambda file: loggers.Loggers(
            (), loggers.Opening(file.parent, 0, {}, None), print
        ),
        "w.certificate.json": lambda file: read_certified_preprocessing(file.with_name("w")),
        "compiled": lambda file: compile_cache.drop_oldest(file.parent, 0),
        ".lock": lambda file: hold_run(file.parent).__enter__(),
        "index.lock": lambda file: locks.hold_lock(file).__enter__(),
        **dict.fromkeys(("validation.npz", "environment.json", "report.json"), read_report),
    }


def main(root: Path, data: Path, recipe: str) -> None:
    """Print what went wrong, by file and kind."""
    outside = root / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (outside / f"{MODULE}.py").write_text("")
    readers = list_readers(data)
    os.chdir(outside)
    sys.path.insert(0, str(outside))
    sys.addaudithook(watch)
    problems = {}
    for name, read in readers.items():
        for number, (kind, fill) in enumerate(KINDS.items()):
            folder = root / f"{name} {number}"
            folder.mkdir()
            (folder / "recipe.yaml").write_text(recipe)
            fill(folder / name)
            (folder / f".{name}.partial").symlink_to(outside / "file")
            SEEN.clear()
            with suppress(LockstepError, OSError):  # the command line prints both as a sentence
                try:
                    read(folder / name)
                except (ValueError, TypeError, LookupError, AttributeError, MemoryError) as error:
                    SEEN.append(repr(error))
            problems[f"{name}: {kind}"] = SEEN.copy()
            if (outside / "file").read_text() != "kept" or len([*outside.iterdir()]) != 2:
                problems[f"{name}: {kind}"].append("outside has changed")
    print(json.dumps(problems))


@pytest.fixture(scope="module")
def problems(
    textures: Path, tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What another process did with every file, by file and kind."""
    root = tmp_path_factory.mktemp("hostile")
    command = [sys.executable, "-m", "tests.runs.test_hostile_state", root, textures]
    # A published recipe that the run is based on is not looked for among all.
    command.append(f"based_on: {min(RECIPES)}\n{tiny_recipe.format_yaml()}")
    result = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    by_case: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return by_case


def test_hostile_state_opens_imports_and_requests_nothing(problems: dict[str, list[str]]) -> None:
    assert len(problems) == 11 * len(KINDS)
    assert {case: seen for case, seen in problems.items() if seen} == {}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
