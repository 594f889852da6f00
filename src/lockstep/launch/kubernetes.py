"""Kubernetes: write the manifest of a job in one of four forms, and submit it.

Each Pod runs one `lockstep launch`, which starts a rank for each GPU. Exit code 75 means that the
ranks saved and stopped, for example because a Pod was evicted: the Pods start again and resume. No
cluster runs these manifests in the tests.
"""

import re
import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.job import Job, hand_in
from lockstep.system.errors import LockstepError, UserError

INDEXED_JOB = "job"
JOB_SET = "jobset"
TRAIN_JOB = "trainjob"
PYTORCH_JOB = "pytorchjob"
FORMS = (INDEXED_JOB, JOB_SET, TRAIN_JOB, PYTORCH_JOB)
"""An indexed Job of Kubernetes itself, a JobSet, a TrainJob of Kubeflow's Trainer, a PyTorchJob of
its training operator."""
_PORT = 29400
_FAULTS = 6
"""Pods may fail this many times a node, not counting evictions and Pods that saved and stopped."""
_RESTARTS = 100
"""Restarts of all Pods, in forms that count evictions as failures."""
_TO_SAVE_SEC = 120
SECRET = "secret"
"""The key of the shared secret in the Secret, which is named after the job."""


@dataclass(frozen=True)
class Cluster:
    """What only Kubernetes needs to know about a job."""

    image: str
    """A container image with Lockstep, made from a Dockerfile of the repository."""
    form: str = INDEXED_JOB
    """One of `FORMS`."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """The names of claims by their paths in the Pods: file systems that all machines share."""
    runtime: str = "torch-distributed"
    """The training runtime of a TrainJob."""


def read_volumes(texts: Sequence[str]) -> dict[str, str]:
    """Return the claims by their paths, from texts such as data:/data. Raises `UserError`."""
    volumes = {}
    for text in texts:
        claim, _, path = text.partition(":")
        if not re.fullmatch(r"[a-z0-9][-.a-z0-9]*", claim) or not path.startswith("/"):
            raise UserError(f"--volume is {text!r}, expected CLAIM:/PATH such as data:/data")
        volumes[path] = claim
    return volumes


def write_manifest(job: Job, cluster: Cluster) -> list[dict[str, Any]]:
    """Return the objects of a job, for `yaml.safe_dump_all`."""
    writers = {
        INDEXED_JOB: _write_job,
        JOB_SET: _write_job_set,
        TRAIN_JOB: _write_train_job,
        PYTORCH_JOB: _write_pytorch_job,
    }
    return writers[cluster.form](job, cluster)


def _write_job(job: Job, cluster: Cluster) -> list[dict[str, Any]]:
    labels = {"job-name": job.name}
    rules = [
        _on_exit_codes("FailJob", job.name, [2, 3]),  # wrong use, diverged
        _on_exit_codes("Ignore", job.name, [75]),  # saved and stopped: the Pod starts again
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]
    spec = {
        **_index(job),
        "backoffLimit": _FAULTS * job.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"subdomain": job.name, **_write_pod(job, cluster, _place_of_job(job))},
        },
        **_limit_time(job),
    }
    # Headless: a name for each Pod, also before it is ready.
    named = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    service = _write_object(job, "v1", "Service", named)
    return [service, _write_policy(job, labels), _write_object(job, "batch/v1", "Job", spec)]


def _write_job_set(job: Job, cluster: Cluster) -> list[dict[str, Any]]:
    # A job that fails by its policy ends the set. One that reaches its limit restarts all jobs.
    spec = {
        **_index(job),
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [_on_exit_codes("FailJob", job.name, [2, 3])]},
        "template": {"spec": _write_pod(job, cluster, _place_of_job_set(job))},
        **_limit_time(job),
    }
    rule = {
        "name": "wrong-use-or-diverged",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    job_set = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": _RESTARTS, "rules": [rule]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
    }
    whole = _write_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", job_set)
    return [_write_policy(job, {"jobset.sigs.k8s.io/jobset-name": job.name}), whole]


def _write_train_job(job: Job, cluster: Cluster) -> list[dict[str, Any]]:
    container = _write_container(job, cluster, _PLACE_OF_TRAINER)
    mounts = container.pop("volumeMounts")
    limits = container.pop("resources")
    patch = {
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": _list_volumes(cluster),
        "terminationGracePeriodSeconds": _TO_SAVE_SEC,
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
    trainer = {name: container[name] for name in ("image", "command", "args", "env")}
    spec: dict[str, Any] = {
        "runtimeRef": {"name": cluster.runtime},
        "trainer": {**trainer, "numNodes": job.nodes, "resourcesPerNode": limits},
        "runtimePatches": [
            {
                "manager": "lockstep.dev/submit",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
            }
        ],
        **_limit_time(job),
    }
    whole = _write_object(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)
    return [_write_policy(job, {"jobset.sigs.k8s.io/jobset-name": job.name}), whole]


def _write_pytorch_job(job: Job, cluster: Cluster) -> list[dict[str, Any]]:
    pod = _write_pod(job, cluster, _PLACE_OF_OPERATOR, name="pytorch")  # the operator's name for it
    del pod["restartPolicy"]  # the replica sets it
    replica = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **replica}
    policy = {"cleanPodPolicy": "None", "backoffLimit": _RESTARTS, **_limit_time(job)}
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    whole = _write_object(job, "kubeflow.org/v1", "PyTorchJob", spec)
    return [_write_policy(job, {"training.kubeflow.org/job-name": job.name}), whole]


# Parts that all forms share


def _write_object(job: Job, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec}


def _limit_time(job: Job) -> dict[str, int]:
    return {} if job.seconds is None else {"activeDeadlineSeconds": job.seconds}


def _index(job: Job) -> dict[str, Any]:
    return {"completionMode": "Indexed", "completions": job.nodes, "parallelism": job.nodes}


def _on_exit_codes(action: str, container: str, codes: Sequence[int]) -> dict[str, Any]:
    on_codes = {"containerName": container, "operator": "In", "values": list(codes)}
    return {"action": action, "onExitCodes": on_codes}


def _place_of_job(job: Job) -> tuple[str, str]:
    """Return a Pod's number and the rendezvous as shell expressions for a Pod of a Job."""
    return "$JOB_COMPLETION_INDEX", f"{job.name}-0.{job.name}:{_PORT}"


def _place_of_job_set(job: Job) -> tuple[str, str]:
    """Return the same in a Pod of a JobSet."""
    return "$JOB_COMPLETION_INDEX", f"{job.name}-node-0-0.{job.name}:{_PORT}"


_PLACE_OF_TRAINER = ("$PET_NODE_RANK", "$PET_MASTER_ADDR:$PET_MASTER_PORT")
"""The same in a Pod of a TrainJob."""
_PLACE_OF_OPERATOR = ("$RANK", "$MASTER_ADDR:$MASTER_PORT")
"""The same in a Pod of a PyTorchJob."""


def _write_pod(
    job: Job, cluster: Cluster, place: tuple[str, str], name: str | None = None
) -> dict[str, Any]:
    """Return the specification of a Pod with one container, by default named after the job."""
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _TO_SAVE_SEC,
        "containers": [{"name": name or job.name, **_write_container(job, cluster, place)}],
        "volumes": _list_volumes(cluster),
    }


def _write_container(job: Job, cluster: Cluster, place: tuple[str, str]) -> dict[str, Any]:
    number, rendezvous = place
    launch = ["lockstep", "launch", "--nodes", str(job.nodes), "-n", str(job.processes)]
    meeting = f'--node-rank "{number}" --rendezvous "{rendezvous}" --bind eth0'
    # Kubernetes itself replaces $(NAME) and $$ in arguments.
    rest = shlex.join([*job.launch, "--", *job.command]).replace("$", "$$")
    secret = {"secretKeyRef": {"name": job.name, "key": SECRET}}
    mounts = [
        {"name": f"volume-{number}", "mountPath": path}
        for number, path in enumerate(cluster.volumes)
    ]
    return {
        "image": cluster.image,
        "command": ["sh", "-c"],
        "args": [f"exec {shlex.join(launch)} {meeting} {rest}"],
        "env": [{"name": "LOCKSTEP_SECRET", "valueFrom": secret}],
        "resources": {"limits": {"nvidia.com/gpu": job.gpus}} if job.gpus else {},
        "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }


def _list_volumes(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the claims, and shared memory for NCCL, which needs more than a container's 64 MiB."""
    claims = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(cluster.volumes.values())
    ]
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    return [*claims, memory]


def _write_policy(job: Job, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a policy by which only the Pods of the job connect to each other: the frameworks' own
    protocols have no password."""
    pods = {"matchLabels": dict(labels)}
    spec = {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": pods}]}],
    }
    return _write_object(job, "networking.k8s.io/v1", "NetworkPolicy", spec)


def submit(manifest: str, name: str) -> str:
    """Create the shared secret and submit a manifest; return what kubectl prints. Raises
    `LockstepError` if it refuses."""
    make = ["kubectl", "create", "secret", "generic", name, f"--from-file={SECRET}=/dev/stdin"]
    existing = hand_in(["kubectl", "get", "secret", name], "")
    if existing.returncode:
        _check(hand_in(make, secrets.token_hex(16)))
    return _check(hand_in(["kubectl", "apply", "-f", "-"], manifest))


def _check(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise LockstepError(f"kubectl refused the job: {done.stderr.strip()}")
    return done.stdout.strip()
