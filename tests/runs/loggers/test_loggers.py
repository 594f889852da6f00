"""Several loggers of a run: a logger that fails is left out, and nothing is sent twice."""

import json
from pathlib import Path

import pytest

from lockstep.runs.loggers import LOGGERS, Kind, Loggers, Opening, Picture, check_installed
from lockstep.system.errors import UserError
from tests.runs.loggers.conftest import Notebook


def loggers(folder: Path, *names: str, step: int = 0, warned: list[str] | None = None) -> Loggers:
    warn = [].append if warned is None else warned.append
    return Loggers(names or ("noting",), Opening(folder, step, {"epochs": 2}, None), warn)


def test_figures_have_their_group(noting: Notebook, picture: Picture, tmp_path: Path) -> None:
    several = loggers(tmp_path)
    several.figures("train", {"loss": 1.5, "lr": 0.1}, 2)
    several.images("mistakes", [picture], 4)
    several.close("stopped")
    assert noting.calls == [
        ("open", None, {"epochs": 2}),
        ("figures", {"train/loss": 1.5, "train/lr": 0.1}, 2),
        ("images", ["mistakes/01"], 4),
        ("close", "stopped"),
    ]


def test_a_resumed_run_keeps_its_key(noting: Notebook, tmp_path: Path) -> None:
    first = loggers(tmp_path)
    for step in (2, 4, 6):
        first.figures("train", {"loss": float(step)}, step)
    first.figures("val_trained", {"loss": 9.0}, 4)
    again = loggers(tmp_path, step=2)  # killed, and there is no newer checkpoint
    for step in (4, 6, 8):
        again.figures("train", {"loss": float(step)}, step)
    again.figures("val_trained", {"loss": 9.0}, 4)
    again.figures("val_ema", {"loss": 8.0}, 4)
    assert noting.select("open") == [[None, {"epochs": 2}], ["key 0", {"epochs": 2}]]
    sent = [(*values.items(), step) for values, step in noting.select("figures")]
    assert sent == [
        (("train/loss", 2.0), 2),
        (("train/loss", 4.0), 4),
        (("train/loss", 6.0), 6),
        (("val_trained/loss", 9.0), 4),
        (("train/loss", 8.0), 8),
        (("val_ema/loss", 8.0), 4),
    ]


def test_what_was_sent_is_noted_before_it_is_sent(noting: Notebook, tmp_path: Path) -> None:
    noting.fails_at = {"figures"}
    loggers(tmp_path).figures("train", {"loss": 1.0}, 2)
    result = json.loads((tmp_path / "loggers.json").read_text())
    assert result == {"noting": {"key": "key 0", "sent": {"train": 2}}}


@pytest.mark.parametrize("call", ["open", "figures", "images", "close"])
def test_a_logger_that_fails_is_warned_of_once_and_gets_nothing_more(
    call: str, noting: Notebook, picture: Picture, tmp_path: Path
) -> None:
    noting.fails_at = {call}
    warned = []
    several = loggers(tmp_path, "noting", "tensorboard", warned=warned)
    for step in (2, 4):
        several.figures("train", {"loss": 1.0}, step)
        several.images("mistakes", [picture], step)
    several.close("finished")
    assert warned == ["noting failed and is off from this step on: OSError: the disk is full"]
    assert noting.calls[-1][0] == call
    assert len(noting.select(call)) == 1
    assert list((tmp_path / "tensorboard").iterdir())  # the other loggers continue


def test_a_request_to_stop_is_no_failure(
    noting: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    several = loggers(tmp_path)
    monkeypatch.setattr("tests.runs.loggers.conftest.Noting.figures", interrupt)
    with pytest.raises(KeyboardInterrupt):
        several.figures("train", {"loss": 1.0}, 2)


def test_tensorboard_alone_leaves_no_note(tmp_path: Path) -> None:
    several = loggers(tmp_path, "tensorboard")
    several.figures("train", {"loss": 1.0}, 2)
    several.close("finished")
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        LOGGERS, "wandb", Kind(("no-such-client",), "pip install it", forgets=False)
    )
    check_installed(["tensorboard"])
    with pytest.raises(UserError, match="logger 'wandb' needs no-such-client: pip install it"):
        check_installed(["tensorboard", "wandb"])
