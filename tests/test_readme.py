"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

from lockstep.data.textures import draw_data_set

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    draw_data_set(Path("demo/data"), train_images=40, val_images=10)
    # The demo's images are numbered on from its 2,000 training images; here there are fewer of them.
    example = example.replace("00200.jpg", "00004.jpg")
    exec(compile(example, "README.md", "exec"), {})
    assert "10 " in capsys.readouterr().out
