"""What `lockstep submit slurm` prints, run by Slurm itself on two nodes: stopped, preempted, cut
off, and resumed with the weights of an undivided run."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import kill_all
from tests.processes import call, wait_until
from tests.schedulers.cases import (
    assert_undivided,
    needs,
    wait_for_checkpoint,
    wait_for_start,
)
from tests.schedulers.slurm import Slurm, slurm

pytestmark = needs("slurmctld", "slurmd", "munged", "sbatch")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def write_script(train: list[object], *options: object) -> str:
    """Return what `lockstep submit slurm` prints for a rank on each of two nodes."""
    alike = ["--nodes", 2, "-n", 1, "--gpus", 0, *options]
    code, script, errors = call("submit", "slurm", *alike, "--", *train)
    assert code == 0, errors
    return script


class Submitted:
    """A job that trains."""

    def __init__(self, cluster: Slurm, train: list[object], run: Path, *options: object) -> None:
        self.cluster = cluster
        self.run = run
        self.train = train
        script = write_script([*train, "--out", run], *options)
        self.job = cluster.submit(script)

    def wait_for_start(self, number: int) -> None:
        """Wait until the job trains after its n-th start."""
        wait_for_start(self.run, number, self.why_over)

    def why_over(self) -> str:
        """Return why the job will not train; "" if it will."""
        state = self.cluster.state(self.job)["JobState"]
        if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"):
            return ""
        return f"{state}\n{self.cluster.output(self.job)}\n{self.cluster.logs()}"

    def end(self) -> None:
        """Let the ranks save and stop, and take the job out of the queue, in which it is again."""
        restarts = self.restarts()
        self.cluster.run("scancel", "--signal=TERM", self.job)
        wait_until(lambda: self.restarts() > restarts)
        self.cluster.run("scancel", self.job)
        wait_until(lambda: self.cluster.state(self.job)["JobState"] == "CANCELLED")

    def count_minutes(self) -> int:
        """Return for how many whole minutes the job has run since its last start."""
        hours, minutes, _ = map(int, self.cluster.state(self.job)["RunTime"].split(":"))
        return 60 * hours + minutes

    def restarts(self) -> int:
        """Return how often the job was queued again."""
        return int(self.cluster.state(self.job)["Restarts"])


@pytest.mark.parametrize(
    ("tasks", "backend"), [("node", "torch"), ("rank", "torch"), ("node", "tensorflow")]
)
def test_a_job_that_is_told_to_stop_is_queued_again_and_resumes_exactly(
    cluster: Slurm, train: list[object], tmp_path: Path, tasks: str, backend: str
) -> None:
    train += ["--backend", backend]
    job = Submitted(cluster, train, tmp_path / "run", "--tasks", tasks)
    job.wait_for_start(1)
    cluster.run("scancel", "--signal=TERM", job.job)
    job.wait_for_start(2)
    job.end()
    output = cluster.output(job.job)
    assert "exit code 75, queued again" in output
    assert "which other machines can reach" in output, (
        "the node's name is 127.0.1.1 in its hosts file"
    )
    assert_undivided(tmp_path / "run", train, tmp_path)


def test_a_job_saves_before_its_time_is_over(
    cluster: Slurm, train: list[object], tmp_path: Path
) -> None:
    job = Submitted(cluster, train, tmp_path / "run", "--time", "1:00:00", "--saving", 60)
    job.wait_for_start(1)
    minutes = job.count_minutes() + 2
    cluster.run("scontrol", "update", f"JobId={job.job}", f"TimeLimit={minutes}")
    wait_until(lambda: job.restarts() == 1)
    assert "exit code 75, queued again" in cluster.output(job.job)
    cluster.run("scontrol", "update", f"JobId={job.job}", "TimeLimit=60")
    job.wait_for_start(2)
    job.end()
    assert_undivided(tmp_path / "run", train, tmp_path)


def test_a_job_that_is_preempted_saves_and_resumes_after_the_other(
    cluster: Slurm, train: list[object], tmp_path: Path
) -> None:
    job = Submitted(cluster, train, tmp_path / "run")
    job.wait_for_start(1)
    urgent = cluster.submit(
        "#!/bin/sh\nsrun hostname\n", "--nodes=2", "--exclusive", "--partition=high"
    )
    cluster.wait(urgent, "COMPLETED")
    job.wait_for_start(2)
    job.end()
    assert_undivided(tmp_path / "run", train, tmp_path)


def processes_of(cluster: Slurm, number: int, program: str) -> list[int]:
    """Return the processes of a program on a host."""
    return [
        process
        for process in cluster.hosts[number].processes()
        if Path(f"/proc/{process}/comm").read_text().strip() == program
    ]


@pytest.mark.parametrize("lost", ["slurmd", "the node"])
def test_a_job_that_loses_a_node_resumes_when_it_is_back(
    cluster: Slurm, train: list[object], tmp_path: Path, lost: str
) -> None:
    train += ["--set", "save_every_steps=2"]
    job = Submitted(cluster, train, tmp_path / "run", "--patience", 60)
    job.wait_for_start(1)
    wait_for_checkpoint(job.run)
    if lost == "slurmd":
        for process in processes_of(cluster, 1, "slurmd"):
            os.kill(process, signal.SIGKILL)
    else:
        kill_all(cluster.hosts[1])
    wait_until(lambda: job.restarts() == 1)
    cluster.start_node(1)
    job.wait_for_start(2)
    job.end()
    assert_undivided(tmp_path / "run", train, tmp_path)


def test_an_array_trains_each_recipe(
    cluster: Slurm, recipe_file: Path, textures: Path, tmp_path: Path
) -> None:
    recipes = [tmp_path / f"rate-{rate}.yaml" for rate in ("0.1", "0.2")]
    for recipe in recipes:
        rate = recipe.stem.partition("-")[2]
        recipe.write_text(recipe_file.read_text().replace("lr: 0.05", f"lr: {rate}"))
    train = ["train", "--data", textures, "--set", "batch_norm=synchronised"]
    script = write_script(
        train, "--recipes", ",".join(map(str, recipes)), "--runs", tmp_path / "runs"
    )
    job = cluster.submit(script)
    for task in (0, 1):
        cluster.wait(f"{job}_{task}", "COMPLETED")
    for recipe in recipes:
        run = tmp_path / "runs" / recipe.stem
        assert f"lr: {recipe.stem.partition('-')[2]}" in (run / "recipe.yaml").read_text()
        assert (run / "report.json").exists(), "it has trained to its end"
        assert_undivided(run, [*train, "--recipe", recipe], tmp_path / recipe.stem)
