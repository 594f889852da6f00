"""Fine-tunings that kill themselves with SIGKILL: `python -m tests.runs.killing CASES`.

CASES is a JSON list of arguments of `train_and_die`. Every case runs in a child process, forked
once the framework is imported. The exit code is 1 if one ends in another way.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

import lockstep
from lockstep.recipes import Execution
from lockstep.runs import linear_probe
from lockstep.runs.folds import train_folds
from lockstep.runs.resuming import complete_settings
from lockstep.weights import checkpoint

FOLDS = 2
EXECUTION = Execution(save_every_steps=2, log_every_steps=1, loggers=())
FITTING = "fitting"
"""The moment when the linear probe is fitted, of which there is no event."""
WRITING = "writing"
"""The moment when the first checkpoint is written, of which there is no event either."""


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL does not return")


def train(
    out: Path,
    data: Path,
    weights: Path,
    changes: dict[str, Any],
    *,
    folds: bool = False,
    listener: Any = print,
) -> None:
    """Fine-tune, or cross-validate."""
    if not folds:
        options = {"weights": weights, "changes": changes, "execution": EXECUTION}
        lockstep.train(data=data, out=out, listener=listener, **options)
        return

    def complete(folder: Path, fields: dict[str, Any]) -> Any:
        return complete_settings(folder, None, data, EXECUTION, changes=changes | fields)

    train_folds(out, FOLDS, complete, weights=weights, listener=listener)


def train_and_die(moment: dict[str, Any], **options: Any) -> None:
    """Train until the first event that has all items of `moment`, in the run `moment["run"]`."""
    if moment.get("kind") == FITTING:
        linear_probe.fit_classifier = die  # type: ignore[assignment]
    if moment.get("kind") == WRITING:
        checkpoint.flush = die  # type: ignore[assignment]
    runs = []

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "start":
            runs.append(event)
        present = event | {"run": len(runs)}
        if all(present.get(name) == value for name, value in moment.items()):
            die()

    train(**options, listener=listen)


def main() -> int:
    torch.set_num_threads(1)
    for case in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            for name in ("out", "data", "weights"):
                case[name] = Path(case[name])
            train_and_die(**case)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            print(f"not killed: {case['moment']}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
