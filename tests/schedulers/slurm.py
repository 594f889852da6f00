"""A cluster of Slurm on two hosts of this machine: Debian's slurmctld on the first, slurmd on both.

The hosts are network namespaces (`tests.hosts`), each with its own name, and files in place of
those in /etc. All of Slurm's files are in a folder of the test.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts import Host, two_hosts
from tests.processes import wait_until

NAMES = ("one", "two")
CREDENTIAL_SEC = 5
"""Seconds after which a job that is queued again may start: as long as its old credential holds."""
SILENCE_SEC = 60
"""Seconds without a sign of a node after which its jobs are queued again."""
_CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost=one({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort=6817
SlurmdPort=6818
SlurmdTimeout={silence}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=60
MinJobAge=3600
SlurmdParameters=config_overrides
NodeName=one NodeAddr={addresses[0]} CPUs=4
NodeName=two NodeAddr={addresses[1]} CPUs=4
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120 MaxTime=1:00:00
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    hosts: tuple[Host, Host]
    folder: Path
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a user of the cluster."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *arguments: object, text: str | None = None) -> str:
        """Run a command of Slurm's on the first host, and return its output."""
        done = subprocess.run(
            self.hosts[0].inside(*arguments),
            input=text,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, number: int, program: str, *options: object) -> None:
        """Start one of Slurm's servers on a host that has its own name."""
        name = NAMES[number]
        with (self.folder / f"{program}-{name}.out").open("ab") as output:
            server = subprocess.Popen(
                self.hosts[number].inside_named(name, program, *options),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.servers.append(server)

    def start_node(self, number: int) -> None:
        """Start slurmd on a host."""
        self.start(number, "slurmd", "-D", "-N", NAMES[number])

    def submit(self, script: str, *options: object) -> str:
        """Hand a batch script in; return the number of the job."""
        output = f"--output={self.folder}/%A_%a.out"
        answer = self.run("sbatch", "--parsable", output, *options, text=script)
        return answer.strip()

    def output(self, job: str) -> str:
        """Return what a job, or a task of an array, has printed."""
        files = sorted(self.folder.glob(f"{job}_*.out"))
        return "".join(file.read_text(errors="replace") for file in files)

    def state(self, job: str) -> dict[str, str]:
        """Return what Slurm says about a job."""
        words = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, state: str, seconds: float = 300) -> None:
        """Wait until a job is in a state, such as RUNNING or COMPLETED."""
        deadline = time.monotonic() + seconds
        while (now := self.state(job)["JobState"]) != state:
            is_late = time.monotonic() > deadline
            is_over = now in ("FAILED", "CANCELLED", "TIMEOUT", "COMPLETED", "NODE_FAIL")
            if is_late or is_over:
                raise AssertionError(f"{now}, not {state}\n{self.output(job)}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the last lines of all of Slurm's logs."""
        texts = []
        for file in sorted([*self.folder.glob("*.log"), *self.folder.glob("*-*.out")]):
            lines = file.read_text(errors="replace").splitlines()[-15:]
            texts.append("\n".join([f"== {file.name}", *lines]))
        return "\n".join(texts)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start a cluster, and end it with all that it runs."""
    servers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(lambda: [server.wait() for server in servers])
        hosts = stack.enter_context(two_hosts(3))  # ends them
        folder.mkdir(exist_ok=True)
        for name in ("state", "spool-one", "spool-two"):
            (folder / name).mkdir()
        addresses = [host.address for host in hosts]
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                folder=folder, addresses=addresses, credential=CREDENTIAL_SEC, silence=SILENCE_SEC
            )
        )
        # The hosts do not see the control groups of this machine, and nothing here uses them.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for number, host in enumerate(hosts):
            other = 1 - number
            lines = [  # as Debian writes it: a machine's own name is 127.0.1.1
                "127.0.0.1 localhost",
                f"127.0.1.1 {NAMES[number]}",
                f"{addresses[other]} {NAMES[other]}",
            ]
            (host.files / "hosts").write_text("\n".join(lines) + "\n")
        cluster = Slurm(hosts, folder, servers)
        stack.enter_context(_munge(cluster))
        cluster.start(0, "slurmctld", "-D")
        for number in range(len(hosts)):
            cluster.start_node(number)
        wait_until(lambda: _are_idle(cluster), 30)
        yield cluster


def _are_idle(cluster: Slurm) -> bool:
    try:
        states = cluster.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t").split()
    except AssertionError:  # slurmctld does not answer yet
        return False
    return states == ["idle", "idle"]


@contextmanager
def _munge(cluster: Slurm) -> Iterator[None]:
    """Run munged with a key of its own. One serves both hosts: its socket is a file."""
    folder = cluster.folder
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    options = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    command = ["munged", "--foreground", "--force", f"--key-file={key}", *options]
    command.append(f"--socket={folder}/munge.socket")
    with (folder / "munged.out").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_until((folder / "munge.socket").exists, 30)
        yield
    finally:
        process.terminate()
        process.wait()
