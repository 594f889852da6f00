"""The examples for clusters: valid for what reads them, and their commands are understood by
Lockstep's own options.

No cluster runs them here.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lockstep.cli import app
from lockstep.launch.meeting import Meeting, Options, find_meeting
from lockstep.recipes import Execution
from lockstep.recipes.published import RECIPES

EXAMPLES = Path(__file__).parent.parent / "examples"
SLURM, JOB, PYTORCH_JOB = (
    EXAMPLES / name
    for name in ("slurm.sbatch", "kubernetes-job.yaml", "kubernetes-pytorchjob.yaml")
)
KUBERNETES = "1.33"
"""The version of Kubernetes whose schemas are used."""
SECRET = "a secret of the tests"
COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def launched(words: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what Lockstep's own parser makes of the options of `lockstep launch`, and of the
    launched `train`."""
    assert words[:2] == ["lockstep", "launch"]
    context = COMMANDS["launch"].make_context("launch", words[2:])
    command, *rest = context.args
    assert command == "train"
    train = COMMANDS["train"].make_context("train", list(rest)).params
    assert train["recipe"] in RECIPES
    assert Execution.of({"backend": train["backend"]} if train["backend"] else {})
    return context.params, train


def meetings(words: list[str], nodes: list[dict[str, str]]) -> list[Meeting | None]:
    """Return where the launchers meet that have these environment variables."""
    options = launched(words)[0]
    request = Options(
        options["nodes"],
        options["node_rank"],
        options["rendezvous"],
        None,
        options["secret_file"],
    )
    return [find_meeting(request, node | {"LOCKSTEP_SECRET": SECRET}) for node in nodes]


def test_every_example_is_tested_here_and_shown_in_the_page() -> None:
    assert set(EXAMPLES.iterdir()) == {SLURM, JOB, PYTORCH_JOB}
    page = (EXAMPLES.parent / "docs" / "many-machines.md").read_text(encoding="utf-8")
    assert [
        example.name for example in EXAMPLES.iterdir() if f"../examples/{example.name}" not in page
    ] == []


# Slurm


SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "{folder}/srun"
printf '%s' "$LOCKSTEP_SECRET" > "{folder}/secret"
exit {code}
"""
SCONTROL = """#!/bin/sh
echo "$@" > "{folder}/scontrol"
"""


def submitted(folder: Path, code: int) -> int:
    """Run the script of the batch job with programs that stand for Slurm's, and note what they get;
    return its exit code."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).mkdir(exist_ok=True)
        program = folder / name / name
        program.write_text(text.format(folder=folder / "calls", code=code))
        program.chmod(0o755)
    (folder / "calls").mkdir(exist_ok=True)
    path = os.pathsep.join([str(folder / "srun"), str(folder / "scontrol"), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "64"}
    return subprocess.run(
        ["bash", SLURM, "a folder", "RUN"], env=environment, check=False
    ).returncode


def test_the_script_of_slurm_starts_a_launcher_on_each_node_with_a_secret(tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    assert submitted(tmp_path, 0) == 0
    words = (tmp_path / "calls" / "srun").read_text().splitlines()
    launch, train = launched(words)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", SLURM.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert launch["processes"] == int(options["gpus-per-node"])
    assert (str(train["data"]), str(train["out"])) == ("a folder", "RUN")
    nodes = int(options["nodes"])
    steps = [
        {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(node),
            "SLURM_NODEID": str(node),
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NUM_TASKS": str(nodes),
            "SLURM_STEP_NODELIST": "gpu[01-04]",
        }
        for node in range(nodes)
    ]
    places = meetings(words, steps)
    assert [(place.node, place.nodes, place.host) for place in places if place] == [
        (node, 4, "gpu01") for node in range(4)
    ]
    assert len((tmp_path / "calls" / "secret").read_text()) == 32
    assert not (tmp_path / "calls" / "scontrol").exists()


@pytest.mark.parametrize(("code", "again"), [(75, True), (1, False), (2, False)])
def test_the_script_of_slurm_is_queued_again_if_the_ranks_saved_and_stopped(
    tmp_path: Path, code: int, again: bool
) -> None:
    assert submitted(tmp_path, code) == code
    calls = tmp_path / "calls" / "scontrol"
    assert (calls.read_text() if calls.exists() else None) == ("requeue 4711\n" if again else None)


# Kubernetes


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


def containers() -> Iterator[tuple[dict[str, Any], dict[str, str], int]]:
    """Yield each container of the examples, the variables that Kubernetes sets in it, and the
    number of its node."""
    job = documents(JOB)[-1]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    for node in range(job["completions"]):
        yield container, {"JOB_COMPLETION_INDEX": str(node)}, node
    # As the operator sets them: `setPodEnv` in pkg/controller.v1/pytorch/envvar.go of
    # kubeflow/training-operator.
    replicas = documents(PYTORCH_JOB)[0]["spec"]["pytorchReplicaSpecs"]
    for node, kind in enumerate(replicas):
        (container,) = replicas[kind]["template"]["spec"]["containers"]
        place = {"MASTER_ADDR": "lockstep-master-0", "MASTER_PORT": "23456"}
        yield container, place | {"RANK": str(node), "WORLD_SIZE": "2"}, node


def test_each_pod_starts_the_node_of_its_number_with_the_shared_secret(tmp_path: Path) -> None:
    for container, variables, node in containers():
        shell, flag = container["command"]
        assert (shell, flag) == ("sh", "-c")
        text = container["args"][0].replace("exec lockstep", "exec printf '%s\\n' lockstep", 1)
        done = subprocess.run(
            [shell, flag, text], env=variables, capture_output=True, text=True, check=True
        )
        words = done.stdout.splitlines()
        (place,) = meetings(words, [variables])
        assert place is not None
        assert (place.node, place.nodes) == (node, 2)
        assert place.host in ("lockstep-0.lockstep", "lockstep-master-0")
        launch, train = launched(words)
        assert launch["processes"] == container["resources"]["limits"]["nvidia.com/gpu"]
        assert launch["bind"] == "eth0"
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {str(train["data"]), str(train["out"].parent)} <= mounted
        secret = next(entry for entry in container["env"] if entry["name"] == "LOCKSTEP_SECRET")
        assert "value" not in secret
        assert secret["valueFrom"]["secretKeyRef"] == {"name": "lockstep", "key": "secret"}


def test_the_service_and_the_policy_are_of_the_jobs_pods() -> None:
    service, policy, job = documents(JOB)
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2


needs_schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate is not installed: make .venv/.dev",
)


@needs_schemas
def test_the_manifests_follow_the_schemas_of_kubernetes() -> None:
    import kubernetes_validate

    job = documents(JOB)
    for document in job:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    wrong = job[-1] | {"spec": job[-1]["spec"] | {"completion": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_the_pytorchjob_has_the_fields_of_its_kind() -> None:
    # The part of kubeflow.org_pytorchjobs.yaml (kubeflow/training-operator, manifests/base/crds)
    # around the Pods.
    (job,) = documents(PYTORCH_JOB)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() <= {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
    assert spec["runPolicy"].keys() <= {
        "activeDeadlineSeconds",
        "backoffLimit",
        "cleanPodPolicy",
        "managedBy",
        "schedulingPolicy",
        "suspend",
        "ttlSecondsAfterFinished",
    }
    assert spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert spec["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}
    for replica in spec["pytorchReplicaSpecs"].values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        assert [container["name"] for container in replica["template"]["spec"]["containers"]] == [
            "pytorch"
        ]


@needs_schemas
def test_the_pods_of_the_pytorchjob_follow_the_schema_of_kubernetes() -> None:
    import kubernetes_validate

    for replica in documents(PYTORCH_JOB)[0]["spec"]["pytorchReplicaSpecs"].values():
        template = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "pod"},
            "template": replica["template"],
        }
        kubernetes_validate.validate(template, KUBERNETES, strict=True)


# The page


def test_the_page_of_many_machines_shows_launches_that_are_understood() -> None:
    page = (EXAMPLES.parent / "docs" / "many-machines.md").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:node\d\$ |srun )(lockstep launch .*)$", page, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        launched(shlex.split(line))
