"""MLflow's own client with a store in a file. Skipped if MLflow is not installed."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.runs.loggers import Loggers, Opening, Picture

pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings inside the client and its packages


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store. Making one takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def client(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a copy of the store, in a separate folder."""
    shutil.copy(store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    from mlflow import MlflowClient

    return MlflowClient()


def open_loggers(folder: Path, step: int, warned: list[str]) -> Loggers:
    folder.mkdir(exist_ok=True)
    opening = Opening(folder, step, {"epochs": 2, "mean": [1.0, 2.0]}, None)
    return Loggers(["mlflow"], opening, warned.append)


def test_a_run_resumes_with_each_step_once(client: Any, picture: Picture, tmp_path: Path) -> None:
    warned: list[str] = []
    for first, outcome in ((2, "stopped"), (4, "finished")):
        several = open_loggers(tmp_path / "my run", first - 2, warned)
        for step in (first, first + 2, first + 4):
            several.figures("train", {"loss": 1 / step, "images_per_sec": 10.0 * step}, step)
        if outcome == "finished":
            several.images("mistakes", [picture], 8)
        several.close(outcome)  # type: ignore[arg-type]
    assert warned == []
    (run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    assert (run.info.run_name, run.info.status) == ("my run", "FINISHED")
    assert run.data.params == {"epochs": "2", "mean": "[1.0, 2.0]"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    result = [(metric.step, metric.value) for metric in history]
    assert result == [(step, 1 / step) for step in (2, 4, 6, 8)]
    (artifact,) = client.list_artifacts(run.info.run_id, "mistakes")
    assert artifact.path == "mistakes/01_dots_predicted_as_rays.png"
    image = Image.open(client.download_artifacts(run.info.run_id, artifact.path, str(tmp_path)))
    assert np.array_equal(np.asarray(image), picture.pixels)


@pytest.mark.parametrize(("outcome", "status"), [("stopped", "KILLED"), ("failed", "FAILED")])
def test_how_a_run_ended_is_told(outcome: Any, status: str, client: Any, tmp_path: Path) -> None:
    open_loggers(tmp_path / "run", 0, []).close(outcome)
    (run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    assert run.info.status == status


def test_a_run_that_is_gone_is_warned_of(client: Any, tmp_path: Path) -> None:
    warned: list[str] = []
    open_loggers(tmp_path / "run", 0, warned).close("stopped")
    (tmp_path / "run" / "loggers.json").write_text('{"mlflow": {"key": "0123", "sent": {}}}')
    open_loggers(tmp_path / "run", 2, warned).figures("train", {"loss": 1.0}, 4)
    assert len(warned) == 1
    assert "mlflow failed and is off from this step on" in warned[0]
