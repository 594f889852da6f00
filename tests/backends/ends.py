"""Let two ranks end many times on a busy machine: no rank aborts after its work is done.

    python -m tests.backends.ends BACKEND PAIRS

Several pairs at a time, on a machine whose cores are all busy, meet, exchange values and end as the
ranks of a run do. Where the framework can be forked, the ranks are forks of a process that has
imported it, so that ends follow each other quickly.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module

from lockstep import backends
from lockstep.launch.nodes import one_machine
from lockstep.recipes import Execution
from lockstep.system.machine import cores

AT_A_TIME = 5
FORKED = ("torch", "paddle", "mxnet")
"""Frameworks that can be used in a fork of a process that has imported them."""
LOAD = "while True: pass"
MOST_SEC = 300
"""After this time a signal ends a rank that hangs: it counts as failed. The same holds for the
process that starts the ranks, while it imports the framework."""


def run_pairs(name: str, pairs: int) -> list[int]:
    """Run pairs of ranks, and return the exit codes of the ranks that failed."""
    command = [sys.executable, "-m", "tests.backends.ends", name, "start"]
    codes: list[int] = []
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as forker,
        ExitStack() as stack,
    ):
        assert forker.stdin is not None
        assert forker.stdout is not None
        assert forker.stdout.readline() == "ready\n", "the framework cannot be imported"
        for _ in range(cores()):
            load = stack.enter_context(subprocess.Popen([sys.executable, "-c", LOAD]))
            stack.callback(load.kill)
        while len(codes) < 2 * pairs:
            with ExitStack() as meetings:
                variables = []
                for _ in range(AT_A_TIME):
                    meeting = backends.load(name).prepare_ranks(one_machine(2), "native")
                    start = meetings.enter_context(meeting)
                    shared = [start.table.variables(rank) for rank in (0, 1)]
                    variables += [shared[rank] | start.environment(rank) for rank in (0, 1)]
                print(json.dumps(variables), file=forker.stdin, flush=True)
                codes += json.loads(forker.stdout.readline())
        forker.stdin.close()
    return [code for code in codes if code]


def start_ranks(name: str) -> None:
    """Read the variables of ranks, start the ranks, and write their exit codes."""
    signal.alarm(MOST_SEC)
    if name in FORKED:
        import_module(f"lockstep.backends.{name}.world")
    signal.alarm(0)
    print("ready", flush=True)
    for line in sys.stdin:
        ranks = []
        for variables in json.loads(line):
            process = os.fork()
            if not process:
                signal.alarm(MOST_SEC)  # it stays in force for another program
                os.environ.update(variables)
                if name not in FORKED:
                    command = [sys.executable, "-m", "tests.backends.ends", name, "rank"]
                    os.execv(sys.executable, command)
                be_rank(name)
                return
            ranks.append(process)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        print(json.dumps(codes), flush=True)


def be_rank(name: str) -> None:
    """Exchange values with the other rank, and leave as a run does."""
    world = backends.load(name).world(Execution.of({"device": "cpu", "distributed": "native"}))
    for value in range(3):
        assert world.same(value)
    world.wait()
    world.close()


if __name__ == "__main__":
    name, what = sys.argv[1:]
    if what == "start":
        start_ranks(name)
    elif what == "rank":
        be_rank(name)
    else:
        failed = run_pairs(name, int(what))
        print(f"{name}: {what} pairs of ranks, {len(failed)} ranks failed: {failed}")
