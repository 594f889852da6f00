"""Measure whole processes to their first result, next to plain programs that do the same.

`load` builds ResNet-50 with weights, `predict-torch` and `predict-onnx` answer one photo with
PyTorch and with an export in ONNX Runtime, `serve` answers one request, and `train` ends after its
first step, which it saves. The plain programs are in `startup_plain.py`; --peers is a folder with
torchvision. With --baseline SRC, the folder src of another version, that version is measured too.
All take turns; `help` and `nothing`, an interpreter that does nothing, have no counterpart.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

import lockstep
from measuring import make_parser, median, record, round_all, seconds

PLAIN = str(Path(__file__).with_name("startup_plain.py"))
LOCKSTEP = ("-m", "lockstep")
LOAD = "import lockstep, sys; lockstep.load(sys.argv[1]).module()"
SETTINGS = ("model=resnet50", "global_batch_images=8", "epochs=1", "precision=fp32")


def prepare(folder: Path) -> None:
    """Write a data set, a run, a state dict of torchvision's and an export to ONNX."""
    random = np.random.default_rng(0)
    for number in range(48):
        path = folder / f"data/{('train', 'val')[number // 24]}/{'abc'[number % 3]}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = random.integers(0, 256, (6, 8, 3), np.uint8)
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(path)
    run(*LOCKSTEP, *list_training(folder, "run"))
    model = lockstep.load(folder / "run")
    model.save(folder / "weights.pth", to="torchvision")
    model.export(folder / "onnx", to="onnx")


def run(*arguments: str, source: Path | None = None) -> float:
    """Run a Python process and return the seconds it takes."""
    command = [sys.executable, *arguments]
    return seconds(
        lambda: subprocess.run(command, capture_output=True, check=True, env=_environment(source))
    )


def request(photo: Path, *arguments: str, source: Path | None = None) -> float:
    """Start a server, and return the seconds until it has answered a photo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    command = [sys.executable, *(word.replace("PORT", str(port)) for word in arguments)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=_environment(source))
    try:
        while True:
            try:
                address = f"http://127.0.0.1:{port}/predict"
                urllib.request.urlopen(address, photo.read_bytes(), timeout=60).read()
                return time.perf_counter() - began
            except OSError:
                if server.poll() is not None:
                    raise
                time.sleep(0.005)
    finally:
        server.terminate()
        server.wait()


def _environment(source: Path | None) -> dict[str, str]:
    environment = dict(os.environ)
    if source is not None:
        environment["PYTHONPATH"] = f"{source}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed version is compiled
    return environment


def list_training(folder: Path, name: str) -> list[str]:
    """Return the words of `lockstep train` for a new run."""
    words = ["train", "--data", str(folder / "data"), "--out", str(folder / name)]
    return words + [word for setting in SETTINGS for word in ("--set", setting)]


def list_tasks(folder: Path) -> dict[str, tuple[Callable[..., float], list[str], list[str]]]:
    """Return what to measure by name: how, the arguments for Lockstep and for the plain program."""
    data, photo, onnx = (str(folder / name) for name in ("data", "data/val/a/24.jpg", "onnx"))
    weights, state, model = (
        str(folder / name) for name in ("run", "weights.pth", "onnx/model.onnx")
    )
    train = [*list_training(folder, "new"), "--stop-after-steps", "1"]
    native = ["predict", weights, photo, "--set", "precision=fp32"]
    serve = ["serve", onnx, "--port", "PORT"]

    def ask(*arguments: str, source: Path | None = None) -> float:
        return request(Path(photo), *arguments, source=source)

    return {
        "load": (run, ["-c", LOAD, weights], ["load", state]),
        "predict-torch": (run, [*LOCKSTEP, *native], ["predict-torch", state, photo]),
        "predict-onnx": (run, [*LOCKSTEP, "predict", onnx, photo], ["predict-onnx", model, photo]),
        "serve": (ask, [*LOCKSTEP, *serve], ["serve", model, "PORT"]),
        "train": (run, [*LOCKSTEP, *train], ["train", data, f"{folder}/new.pth"]),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", type=Path, help="A folder with torchvision.")
    parser.add_argument("--baseline", type=Path, metavar="SRC", help="src of another version.")
    options = parser.parse_args()
    if options.peers is not None:
        os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{options.peers}"
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-startup-") as name:
        folder = Path(name)
        prepare(folder)
        tasks = list_tasks(folder)
        for turn in range(options.rounds + 1):
            turns = {"help": run(*LOCKSTEP, "--help"), "nothing": run("-c", "pass")}
            for task, (measure, ours, plain) in tasks.items():
                for version in ("", *([options.baseline] if options.baseline else [])):
                    shutil.rmtree(folder / "new", ignore_errors=True)
                    label = f"{task}, baseline" if version else f"{task}, lockstep"
                    turns[label] = measure(*ours, source=version or None)
                turns[f"{task}, plain"] = measure(PLAIN, *plain)
            for label, took in turns.items() if turn else ():  # the first turn fills caches
                times.setdefault(label, []).append(took)
    medians = {label: round(median(took), 3) for label, took in times.items()}
    turns_by_label = {label: round_all(took) for label, took in times.items()}
    record("startup", {"seconds": medians, "turns": turns_by_label})


if __name__ == "__main__":
    main()
