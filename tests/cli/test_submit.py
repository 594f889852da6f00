"""What `lockstep submit` prints: scripts and manifests that start the same launch on every
machine."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lockstep.cli import app
from lockstep.launch.job import Job
from lockstep.launch.rendezvous_address import Meeting, Options, find_meeting
from lockstep.launch.slurm import Slurm, write_script

Run = Callable[..., tuple[int, str, str]]
TRAIN = ["train", "--recipe", "resnet50-paddle-90ep", "--data", "a folder", "--out", "RUN"]
ROOT: Any = typer.main.get_command(app)
LAUNCH = ROOT.commands["launch"]
KUBERNETES = "1.33"
"""The version of Kubernetes whose schemas are used."""


def launched(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what the parser of `lockstep launch` makes of a command, and the command after --."""
    arguments = words[words.index("launch") + 1 :]
    context = LAUNCH.make_context("launch", arguments, **ROOT.context_settings)
    return context.params, context.args


# Slurm

SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "{folder}/srun.txt"
printf '%s' "$LOCKSTEP_SECRET" > "{folder}/secret.txt"
mkdir -p RUN/checkpoints/{saved}
exit {code}
"""
SCONTROL = """#!/bin/sh
echo "$@" > "{folder}/scontrol.txt"
"""


def run_script(script: str, folder: Path, code: int, saved: str = ".") -> list[str]:
    """Run a batch script with programs that stand for Slurm's; return the words that srun gets."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text.format(folder=folder, code=code, saved=saved))
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    variables = {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(
        ["bash"], input=script, text=True, cwd=folder, env=os.environ | variables, check=False
    )
    assert done.returncode == code
    return (folder / "srun.txt").read_text().splitlines()


def test_the_script_of_slurm_starts_a_launcher_on_each_machine(answer: Run, tmp_path: Path) -> None:
    options = ["--nodes", 4, "-n", 8, "--time", "1-04:00:00", "--cpus", 64, "--patience", 60]
    code, script, errors = answer("submit", "slurm", *options, "--sbatch=--qos=low", "--", *TRAIN)
    assert (code, errors) == (0, "")
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]
    expected = {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=64"}
    assert expected | {"--time=28:00:00", "--signal=TERM@300", "--qos=low"} <= set(lines)
    launch, command = launched(run_script(script, tmp_path, 0))
    assert (launch["processes"], launch["patience"], command) == (8, 60, TRAIN)
    assert len((tmp_path / "secret.txt").read_text()) == 32
    assert not (tmp_path / "scontrol.txt").exists()


def test_a_task_can_be_a_rank(answer: Run, tmp_path: Path) -> None:
    options = ["--nodes", 2, "-n", 4, "--tasks", "rank", "--cpus", 64, "--gpus", 0]
    script = answer("submit", "slurm", *options, "--", *TRAIN)[1]
    assert "#SBATCH --ntasks-per-node=4\n" in script
    assert "#SBATCH --cpus-per-task=16\n" in script
    assert "gpus" not in script
    assert run_script(script, tmp_path, 0)[-len(TRAIN) :] == TRAIN


@pytest.mark.parametrize(
    ("code", "saved", "is_queued_again"),
    [(75, ".", True), (1, ".", False), (1, "step-00000010", True), (2, "step-00000010", False)],
    ids=["saved and stopped", "no progress", "lost after a checkpoint", "wrong use"],
)
def test_a_job_is_queued_again_if_that_brings_it_further(
    answer: Run, tmp_path: Path, code: int, saved: str, is_queued_again: bool
) -> None:
    script = answer("submit", "slurm", "-n", 1, "--", *TRAIN)[1]
    run_script(script, tmp_path, code, saved)
    calls = tmp_path / "scontrol.txt"
    assert (calls.read_text() if calls.exists() else "") == "requeue 4711\n" * is_queued_again


def test_an_array_has_a_job_for_each_recipe(answer: Run, tmp_path: Path) -> None:
    recipes = "resnet50-paddle-90ep,resnet50-mxnet-90ep"
    array = ["--recipes", recipes, "--runs", "all runs"]
    script = answer("submit", "slurm", "-n", 1, *array, "--", "train", "--data", "D")[1]
    assert "#SBATCH --array=0-1\n" in script
    command = launched(run_script(script, tmp_path, 0))[1]
    result = command[3:]
    assert result == ["--recipe", "resnet50-mxnet-90ep", "--out", "all runs/resnet50-mxnet-90ep"]


def test_the_jobs_of_an_array_have_a_place_each_in_a_store(tmp_path: Path) -> None:
    store = ("--set", "checkpoint_store=s3://bucket/a b/")
    job = Job("array", 1, 1, ("train", *store))
    script = write_script(job, Slurm(runs={"one": Path("runs/1"), "two": Path("runs/2")}), None)
    command = launched(run_script(script, tmp_path, 0))[1]
    assert command[-2:] == ["--set", "checkpoint_store=s3://bucket/a b/two"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "-n", 8], "nothing to submit"),
        (["slurm", "-n", 8, "--", "train", "--recipe", "x", "--data", "D", "--out", "R"], "x"),
        (["slurm", "-n", 8, "--time", "4h", "--", *TRAIN], "expected H:MM:SS"),
        (["slurm", "-n", 8, "--time", "0:05:00", "--", *TRAIN], "300 s are for saving"),
        (["slurm", "-n", 8, "--recipes", "a", "--", *TRAIN], "need each other"),
        (["kubernetes", "-n", 8, "--image", "I", "--", "train", "--what"], "No such option"),
        (["kubernetes", "-n", 8, "--image", "I", "--volume", "d", "--", *TRAIN], "CLAIM:/PATH"),
        (["ray", "-n", 8, "--", "train"], "--out"),
    ],
    ids=str,
)
def test_wrong_jobs_are_not_queued(answer: Run, words: list[object], message: str) -> None:
    code, output, errors = answer("submit", *words)
    assert (code, output) == (2, "")
    assert message in errors


def test_without_the_scheduler_the_missing_program_is_named(
    answer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs sbatch" in answer("submit", "slurm", "-n", 1, "--now", "--", *TRAIN)[2]
    kubernetes = ["kubernetes", "-n", 1, "--image", "I", "--now"]
    assert "needs kubectl" in answer("submit", *kubernetes, "--", *TRAIN)[2]


# Ray


def test_the_script_of_ray_hands_the_launch_in(answer: Run, tmp_path: Path) -> None:
    script = answer("submit", "ray", "--nodes", 2, "-n", 8, "--", *TRAIN)[1]
    program = tmp_path / "ray"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$RAY_AUTH_MODE" "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    words = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[:-1] == ["token", "job", "submit", "--no-wait", "--", "bash", "-c"]
    launch, command = launched(shlex.split(words[-1]))
    assert (launch["scheduler"], launch["nodes"], launch["gpus"]) == ("ray", 2, 8)
    assert command == TRAIN


def test_a_job_for_ray_needs_ray(
    answer: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    code, _, errors = answer("submit", "ray", "--now", "-n", 8, "--", *TRAIN)
    assert code == 2
    assert "install it: pip install 'ray[default]>=2.60'" in errors


# Kubernetes

PODS = {
    "job": lambda node: {"JOB_COMPLETION_INDEX": str(node)},
    "jobset": lambda node: {"JOB_COMPLETION_INDEX": str(node)},
    # As the operators set them: pkg/runtime/framework/plugins/torch of kubeflow/trainer, and
    # pkg/controller.v1/pytorch/envvar.go of kubeflow/training-operator.
    "trainjob": lambda node: {
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "lockstep-node-0-0.lockstep",
        "PET_MASTER_PORT": "29400",
    },
    "pytorchjob": lambda node: {
        "RANK": str(node),
        "MASTER_ADDR": "lockstep-master-0",
        "MASTER_PORT": "29400",
    },
}
"""The variables of the Pod of each node."""
HOSTS = {
    "job": "lockstep-0.lockstep",
    "jobset": "lockstep-node-0-0.lockstep",
    "trainjob": "lockstep-node-0-0.lockstep",
    "pytorchjob": "lockstep-master-0",
}


def manifest(answer: Run, form: str) -> list[dict[str, Any]]:
    volumes = ["--volume", "data:/data", "--volume", "runs:/runs"]
    options = ["--nodes", 2, "-n", 8, "--image", "I", "--form", form, *volumes]
    code, output, errors = answer("submit", "kubernetes", *options, "--", *TRAIN)
    assert (code, errors) == (0, "")
    return list(yaml.safe_load_all(output))


def find_commands(part: Any) -> list[list[str]]:
    """Return the arguments of all containers in a part of a manifest."""
    if isinstance(part, list):
        return [words for entry in part for words in find_commands(entry)]
    if not isinstance(part, dict):
        return []
    own = [part["args"]] if "args" in part else []
    return own + find_commands(list(part.values()))


@pytest.mark.parametrize("form", PODS)
def test_each_pod_starts_the_node_of_its_number(answer: Run, form: str) -> None:
    commands = find_commands(manifest(answer, form))
    for node in (0, 1):
        ((text,),) = commands[:1]
        text = text.replace("exec lockstep", "exec printf '%s\\n' lockstep", 1)
        done = subprocess.run(
            ["sh", "-c", text], env=PODS[form](node), capture_output=True, text=True, check=True
        )
        launch, command = launched(done.stdout.splitlines())
        assert (launch["processes"], launch["bind"], command) == (8, "eth0", TRAIN)
        request = Options(launch["nodes"], launch["node_rank"], launch["rendezvous"])
        secret = "a secret of the tests"
        expected = Meeting(node, 2, HOSTS[form], 29400, secret)
        assert find_meeting(request, {"LOCKSTEP_SECRET": secret}) == expected


def test_pods_that_saved_or_were_evicted_start_again_and_no_others(answer: Run) -> None:
    (job,) = (part for part in manifest(answer, "job") if part["kind"] == "Job")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert actions == {2: "FailJob", 3: "FailJob", 75: "Ignore"}
    assert rules[-1]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_the_manifests_follow_the_schemas_of_kubernetes(answer: Run) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    for part in manifest(answer, "job"):
        kubernetes_validate.validate(part, KUBERNETES, strict=True)
    (_, job_set) = manifest(answer, "jobset")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}}
    inner["spec"] = replicated["template"]["spec"]
    kubernetes_validate.validate(inner, KUBERNETES, strict=True)
    wrong = inner | {"spec": inner["spec"] | {"completion": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


# The pages


def test_the_pages_show_launches_that_are_understood() -> None:
    docs = Path(__file__).parents[2] / "docs/how-to"
    lines = []
    for name in ("many-machines", "schedulers"):
        page = (docs / f"{name}.md").read_text(encoding="utf-8")
        lines += re.findall(r"^(?:node\d)?\$ (lockstep launch .*)$", page, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        assert launched(shlex.split(line))[1][0] == "train"
