"""Draw the picture of `check.py` that finds swapped colours, for docs/how-to/deploy.md and README.

make docs-run PAGES=docs/tutorial/first-model.md
python docs/pictures/check.py build/docs-run/docs/tutorial/first-model/demo/run
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from shared import picture_command, run

APP = """import cv2
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model/model.onnx")
names = open("model/classes.txt").read().splitlines()


def classify(path):
    photo = cv2.imread(path, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)  # BGR
    classes, shares = session.run(None, {"images": photo[None]})
    return dict(zip(names, shares[0]))
"""


def main() -> None:
    source = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        run(root, "export", source, "model", "--to", "onnx")
        (root / "my_app.py").write_text(APP, encoding="utf-8")
        line = "python model/proof/check.py --predictor my_app:classify"
        command = [sys.executable, *line.split()[1:]]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr)
        if done.returncode != 1:
            raise SystemExit(f"exit code {done.returncode}; expected 1")
        picture_command(done.stdout, line, "check-finds-swapped-colours.svg")


if __name__ == "__main__":
    main()
