"""The process group, and torchrun."""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.backends import HostQuestions, refuse_horovod
from lockstep.errors import BackendError, LockstepError
from lockstep.launched import EXIT_CODE_FOLDER, code_of_ranks
from lockstep.recipes import Execution


class TorchWorld(HostQuestions):
    """This process among those of `torchrun`, or alone. The rendezvous is torchrun's own environment."""

    def __init__(self, execution: Execution) -> None:
        refuse_horovod(execution.distributed)
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.torch_device = _device(execution, int(os.environ.get("LOCAL_RANK", "0")))
        self.device = device_name(self.torch_device)
        self.on_gpu = self.torch_device.type == "cuda"
        self._host_group: dist.ProcessGroup | None = None
        if self.ranks > 1:
            dist.init_process_group("nccl" if self.on_gpu else "gloo")
            # Questions between hosts must not queue behind the device's work.
            self._host_group = dist.new_group(backend="gloo")

    def _largest(self, values: list[int]) -> list[int]:
        if self._host_group is None:
            return values
        tensor = torch.tensor(values)
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._host_group)
        except RuntimeError as error:  # how gloo says that a peer has gone
            raise LockstepError("another rank has ended; its own message says why") from error
        return tensor.tolist()

    def close(self) -> None:
        """Leave the process group."""
        if self.ranks > 1:
            dist.destroy_process_group()


def _device(execution: Execution, local_rank: int) -> torch.device:
    found = torch.cuda.is_available()
    if execution.device == "cpu" or (execution.device == "auto" and not found):
        return torch.device("cpu")
    if not found:
        raise BackendError("device is cuda, but PyTorch finds no GPU here; use --set device=cpu or see `lockstep doctor`")
    if local_rank >= torch.cuda.device_count():
        raise BackendError(
            f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()}; launch fewer processes"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def device_name(device: torch.device) -> str:
    """Return the device as a person would name it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def launch(processes: int, arguments: list[str], distributed: str) -> int:
    """Run `lockstep <arguments>` in so many processes on this machine under torchrun; return the exit code.

    SIGTERM, SIGINT and SIGUSR1 reach every rank. The code goes by `lockstep.launched.code_of_ranks`.
    """
    refuse_horovod(distributed)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # A rank's own message says what went wrong; torchrun's report of its exit code would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Otherwise torchrun gives every rank one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // processes, 1)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
        max_restarts=0,
        shutdown_timeout=3600,  # a step and a save may take minutes; the default kills after 30 s
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ[EXIT_CODE_FOLDER] = folder
        try:
            elastic_launch(config, sys.executable)("-m", "lockstep", *arguments)
        except (ChildFailedError, SignalException) as error:
            if isinstance(error, SignalException) and all(file.read_text() == "0" for file in Path(folder).iterdir()):
                return 128 + int(signal.Signals(error.sigval))
            return code_of_ranks(Path(folder))
        finally:
            del os.environ[EXIT_CODE_FOLDER]
    return 0
