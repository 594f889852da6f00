"""MLflow, through its own client.

Environment variables choose the destination: MLFLOW_TRACKING_URI names a store or a server,
MLFLOW_EXPERIMENT_NAME the experiment.
"""

import os
import time
from collections.abc import Mapping, Sequence

from lockstep.runs.loggers import Logger, Opening, Outcome, Picture

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow(Logger):
    """A resumed run continues the same MLflow run."""

    def __init__(self, opening: Opening) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client = MlflowClient()
        self._metric = Metric
        if opening.key is not None:
            self.key = opening.key
            self._client.update_run(self.key, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lockstep")
        experiment = self._client.get_experiment_by_name(name)
        place = (
            self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        self.key = self._client.create_run(
            place, run_name=opening.folder.resolve().name
        ).info.run_id
        self._client.log_batch(
            self.key, params=[Param(name, str(value)) for name, value in opening.about.items()]
        )

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics."""
        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self.key,
            metrics=[self._metric(name, value, now_ms, step) for name, value in values.items()],
        )

    def images(self, pictures: Sequence[Picture], step: int) -> None:
        """Log images as artifacts."""
        for picture in pictures:
            self._client.log_image(
                self.key, picture.pixels, artifact_file=f"{picture.full_name}.png"
            )

    def close(self, outcome: Outcome) -> None:
        """Record how the run ended."""
        self._client.set_terminated(self.key, _STATUS[outcome])


open_logger = Mlflow
