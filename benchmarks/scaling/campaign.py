"""Measure training steps of several ranks over throttled links, and check the model of their speed.

    sudo .venv/bin/python -m benchmarks.scaling.campaign

Needs Linux, root, iproute2 (`ip`, `tc`), and a machine without other work. Hosts are network
namespaces, each connected to one switch by a link whose sending side is throttled (tbf). Ranks of
PyTorch's engine run in them, with one thread each, and share this machine's cores.

Rows that are in the result already are kept, unless other programs used much of the machine. The
namespaces are removed at the end, also after Ctrl-C and SIGTERM; what an earlier, killed campaign
left is removed first.
"""

import argparse
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.measuring import RESULTS
from benchmarks.scaling.fit import KIND, VERSION, compare_steps, fit_steps, read_measured
from lockstep.benchmark.cell_process import save_task
from lockstep.benchmark.cells import TRAIN, Cell, Plan, full_name
from lockstep.benchmark.contention import ProcessorTime, measure_others
from lockstep.benchmark.figures import combine_times
from lockstep.launch.launcher import LOCKSTEP
from lockstep.runs.environment import describe_environment
from lockstep.system.files import write_json
from lockstep.system.machine import cores
from lockstep.system.ranks import EXIT_CODE_FOLDER

COMMAND = "python -m benchmarks.scaling.campaign"
PREFIX = "lockstep-scaling-"
"""Every namespace of a campaign has a name that begins so."""
SWITCH = f"{PREFIX}switch"
PORT = "29511"
"""The namespaces have no other programs, so any port is free."""
LONGEST_SEC = 600
MOST_OF_OTHERS = 0.1
"""If other programs used more than this share of the cores, the next start of the same command
measures the row again."""


@dataclass(frozen=True)
class Row:
    """Steps to measure."""

    ranks: int
    batch: int
    hosts: int = 1
    mbit_per_sec: int | None = None
    all_reduce_mb: int = 25
    fitted: bool = True
    warmup: int = 2
    rounds: int = 5
    """Each has as many steps as the warm-up."""

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the row in the result."""
        own = asdict(self)
        rate = own.pop("mbit_per_sec")
        return own | {"bits_per_sec": None if rate is None else rate * 1e6}

    def __str__(self) -> str:
        link = (
            ""
            if self.mbit_per_sec is None
            else f" on {self.hosts} hosts at {self.mbit_per_sec} Mbit/s"
        )
        return f"{self.ranks} ranks{link}, batch {self.batch}, exchanges of {self.all_reduce_mb} MB"


def rows(small: int, large: int) -> list[Row]:
    """Return the rows of a campaign with two batches."""
    middle = (small + large) // 2
    slow = {"warmup": 1, "rounds": 3}
    return [
        Row(1, small, rounds=8),
        Row(1, large, rounds=8),
        Row(2, small),
        Row(2, large),
        Row(2, small, all_reduce_mb=1),
        Row(4, small),
        Row(4, large),
        Row(2, small, 2, 100, **slow),
        Row(4, small, 2, 100, **slow),
        Row(2, small, 2, 1000),
        Row(2, large, 2, 1000),
        Row(4, large, 2, 1000, rounds=3),
        # Checks
        Row(3, small, fitted=False),
        Row(3, large, fitted=False),
        Row(2, middle, all_reduce_mb=5, fitted=False),
        Row(2, middle, 2, 300, fitted=False, **slow),
        Row(3, large, 3, 300, fitted=False, **slow),
        Row(4, small, 4, 300, fitted=False, **slow),
        Row(4, middle, 4, 1000, fitted=False, rounds=3),
        Row(4, middle, 2, 500, fitted=False, **slow),
    ]


# Namespaces


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")


def within(name: str, *command: str) -> None:
    run("ip", "-n", name, *command)


def remove_namespaces() -> None:
    """Remove the namespaces of this campaign and of earlier ones. Their links go with them."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout
    for line in listed.splitlines():
        name = line.split(" ")[0]
        if name.startswith(PREFIX):
            subprocess.run(["ip", "netns", "delete", name], check=False)


@contextmanager
def namespaces(hosts: int, mbit_per_sec: int | None) -> Iterator[list[str]]:
    """Yield the names of connected namespaces, with addresses from 10.77.0.1 on."""
    remove_namespaces()
    names = [f"{PREFIX}{host}" for host in range(hosts)]
    try:
        run("ip", "netns", "add", SWITCH)
        within(SWITCH, "link", "add", "bridge", "type", "bridge")
        within(SWITCH, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            run("ip", "netns", "add", name)
            within(name, "link", "set", "lo", "up")
            within(
                SWITCH,
                "link",
                "add",
                f"port{host}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            within(SWITCH, "link", "set", f"port{host}", "master", "bridge", "up")
            within(name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            within(name, "link", "set", "eth0", "up")
            if mbit_per_sec is not None:
                # A burst of 1 ms, at least two of the largest packets that the system hands to a
                # device. Data waits for at most 10 ms: a long queue would delay every message of a
                # ring, and hide the rate behind it.
                burst = max(mbit_per_sec * 125, 2**17)
                limits = ("rate", f"{mbit_per_sec}mbit", "burst", str(burst), "latency", "10ms")
                run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limits)
        yield names
    finally:
        remove_namespaces()


# Ranks


def measure_row(row: Row, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the result."""
    with namespaces(row.hosts, row.mbit_per_sec) as names, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cell = Cell(
            TRAIN,
            "torch",
            full_name(settings["model"]),
            settings["precision"],
            row.batch,
            row.ranks,
            "off",
        )
        changes = {"image_size": settings["image_size"]}
        execution = {"device": "cpu", "all_reduce_mb": row.all_reduce_mb}
        plan = Plan(row.warmup, row.rounds, 1, changes=changes, execution=execution)
        save_task(folder, cell, plan, plan.make_recipe(cell), plan.make_execution(cell))
        running = [start_rank(rank, row, names, folder) for rank in range(row.ranks)]
        try:
            wait(running, folder)
        finally:
            for process in running:
                process.kill()
                process.wait()
        counted = []
        processors = []
        for number in range(row.ranks):
            rank = json.loads((folder / f"rank-{number}.json").read_text())
            counted.append(rank["counted"])
            processors.append(ProcessorTime(**rank["processors"]))
    others = measure_others(processors, cores())
    return row.key | {
        "times_sec": combine_times(counted),
        "other_programs_share": others,
    }


def start_rank(rank: int, row: Row, names: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    """Start a rank in its namespace. Ranks fill one host after the other."""
    host = rank // -(-row.ranks // row.hosts)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": row.ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": row.ranks,  # they share the cores
        "MASTER_ADDR": "127.0.0.1" if row.hosts == 1 else "10.77.0.1",
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "lo" if row.hosts == 1 else "eth0",
        # also for one rank: with other numbers of threads it would be another program
        "OMP_NUM_THREADS": 1,
        EXIT_CODE_FOLDER: folder,  # so that the rank ends with this process
        # addresses of namespaces have no names, which it would warn of
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [
        "ip",
        "netns",
        "exec",
        names[host],
        sys.executable,
        *LOCKSTEP,
        "benchmark",
        "cell",
        str(folder),
    ]
    own = os.environ | {name: str(value) for name, value in variables.items()}
    # A single rank ends when its stdin is closed, so that it does not outlive the process that
    # started it.
    return subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def wait(running: list["subprocess.Popen[bytes]"], folder: Path) -> None:
    """Wait for all ranks. Ends the program if one fails, or if they take too long."""
    ends_at = time.monotonic() + LONGEST_SEC
    codes: list[int | None] = [None]
    while None in codes and not any(codes) and time.monotonic() < ends_at:
        time.sleep(0.1)
        codes = [process.poll() for process in running]
    if set(codes) != {0}:
        reasons = [json.loads(file.read_text())["reason"] for file in folder.glob("failure-*.json")]
        sys.exit(f"a rank failed: {' '.join(reasons) or 'it said nothing'}")


# The campaign


def end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=96, help="height and width of the images")
    parser.add_argument(
        "--batches", default="4,12", help="two batches of a rank, the smaller one first"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.json")
    parser.add_argument(
        "--only", type=int, nargs="+", help="numbers of rows to measure, from 1, to try the script"
    )
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    options = arguments()
    if os.geteuid() != 0:
        sys.exit(f"network namespaces need root: sudo .venv/bin/{COMMAND}")
    with Path(f"/run/{PREFIX}lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                "another campaign is running on this machine, and would remove the namespaces of"
                " this one"
            )
        campaign(options)


def campaign(options: argparse.Namespace) -> None:
    small, large = map(int, options.batches.split(","))
    settings = {
        "model": options.model,
        "image_size": options.size,
        "precision": "fp32",
        "cores": cores(),
    }
    result: dict[str, Any] = {"kind": KIND, "version": VERSION, "settings": settings, "rows": []}
    if options.out.exists():
        result = json.loads(options.out.read_text())
        if result["settings"] != settings:
            sys.exit(
                f"{options.out} has other settings: {result['settings']}, expected {settings}; give"
                " another --out"
            )
    wanted = rows(small, large)
    chosen = wanted if options.only is None else [wanted[number - 1] for number in options.only]
    began = time.monotonic()
    for number, row in enumerate(chosen, 1):
        same = [old for old in result["rows"] if old.items() >= row.key.items()]
        kept = [old for old in same if old["other_programs_share"] <= MOST_OF_OTHERS]
        new = kept[0] if kept else measure_row(row, settings)
        if not kept:
            result["rows"] = [old for old in result["rows"] if old not in same] + [new]
            result["command"] = COMMAND
            result["environment"] = describe_environment("torch")
            write_json(options.out, result)
        middle = sorted(new["times_sec"])[len(new["times_sec"]) // 2]
        busy = new["other_programs_share"] > MOST_OF_OTHERS
        note = " (kept)" if kept else " (other programs were running)" if busy else ""
        print(
            f"{number:>2} of {len(chosen)}, {time.monotonic() - began:.0f} s: {row}: {middle:.3f}"
            f" s{note}",
            flush=True,
        )
    if options.only is None:
        measured_rows = read_measured(options.out)
        worst = 0.0
        for check in compare_steps(fit_steps(measured_rows), measured_rows):
            if not check.measured.fitted:
                worst = max(worst, abs(check.difference))
        print(
            f"the largest difference of a prediction from a step that was not fitted: {worst:.1%},"
            " wanted 10 %"
        )
        print(f"python -m benchmarks.scaling --measured {options.out}")


if __name__ == "__main__":
    main()
