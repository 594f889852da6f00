"""How much of Lockstep a plain command imports: what a run does not use is not loaded."""

import json
import subprocess
import sys
from pathlib import Path

import lockstep
from tests.data.cases import jpeg

COUNT = """
import atexit, json, sys
from pathlib import Path

def count():
    files = [getattr(module, "__file__", None) for module in sys.modules.values()]
    Path("loaded.json").write_text(json.dumps(files))

atexit.register(count)
sys.argv[0] = "lockstep"
from lockstep.cli import run
run()
"""


def count_loaded(folder: Path, *words: str) -> tuple[int, int]:
    """Return how many lines and files of Lockstep a command imports in its own process."""
    subprocess.run([sys.executable, "-c", COUNT, *words], cwd=folder, check=True, timeout=300)
    root = Path(lockstep.__file__).parent
    loaded = {Path(file) for file in json.loads((folder / "loaded.json").read_text()) if file}
    files = [file for file in loaded if file.suffix == ".py" and file.is_relative_to(root)]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files), len(files)


def test_a_training_and_a_prediction_load_what_they_use(tmp_path: Path) -> None:
    for i in range(8):
        path = tmp_path / f"data/{('train', 'val')[i % 2]}/{'ab'[i // 2 % 2]}/{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(32, 32))
    settings = "model=resnet18 image_size=32 eval_resize=32 eval_crop=32 epochs=1"
    options = [word for setting in settings.split() for word in ("--set", setting)]
    options += ["--set", "global_batch_images=4", "--recipe", "demo", "--data", "data"]
    lines, files = count_loaded(tmp_path, "train", "--out", "run", *options)
    assert lines < 20_600, lines
    assert files < 165, files
    lines, files = count_loaded(tmp_path, "predict", "run", "data/val/a/1.jpg")
    assert lines < 20_000, lines
    assert files < 155, files
