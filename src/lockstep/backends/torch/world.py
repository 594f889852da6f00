"""The process group: of `lockstep launch`, of torchrun, or of a single process."""

import os

import torch
import torch.distributed as dist

from lockstep.backends import HostQuestions, refuse_horovod
from lockstep.backends.shared.device import chosen_gpu
from lockstep.backends.shared.loopback import refuse_open_sockets
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError, LockstepError
from lockstep.system.ranks import is_on_one_machine


class TorchWorld(HostQuestions):
    """This process: one of those of `lockstep launch` or `torchrun`, or a single one."""

    def __init__(self, execution: Execution) -> None:
        refuse_horovod(execution.distributed)
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.torch_device = _device(execution, int(os.environ.get("LOCAL_RANK", "0")))
        self.device = device_name(self.torch_device)
        self.on_gpu = self.torch_device.type == "cuda"
        self._host_group: dist.ProcessGroup | None = None
        if self.ranks > 1:
            _check_addresses()
            backend = "nccl" if self.on_gpu else "gloo"
            try:
                self._meet(backend)
                # Questions between hosts must not wait for the device's work.
                self._host_group = dist.new_group(backend="gloo")
            except (RuntimeError, OSError) as error:  # also if a disk is full or has no locks
                where = os.environ.get(STORE) or "the place that MASTER_ADDR and MASTER_PORT name"
                raise BackendError(f"the ranks cannot meet at {where}: {error}. Set TMPDIR to use another disk") from error
            if is_on_one_machine():
                refuse_open_sockets()

    def _meet(self, backend: str) -> None:
        if STORE in os.environ:
            store = dist.FileStore(os.environ[STORE], self.ranks)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks)
        else:  # torchrun sets MASTER_ADDR and MASTER_PORT
            dist.init_process_group(backend)

    def _largest(self, values: list[int]) -> list[int]:
        if self._host_group is None:
            return values
        tensor = torch.tensor(values)
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._host_group)
        except RuntimeError as error:  # gloo's error when another rank has ended
            raise LockstepError("another rank has ended; its own message says why") from error
        return tensor.tolist()

    def close(self) -> None:
        """Leave the process group."""
        if self.ranks > 1:
            dist.destroy_process_group()


def _check_addresses() -> None:
    """Raise `BackendError` if the variables are missing by which several ranks find each other."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and STORE not in os.environ:
        raise BackendError(f"several ranks, but no {', '.join(missing)}; start them with `lockstep launch` or torchrun")


def _device(execution: Execution, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = chosen_gpu(execution, "PyTorch", gpus=gpus, local_rank=local_rank)
    if gpu is None:
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def device_name(device: torch.device) -> str:
    """Return the name of a device, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


STORE = "LOCKSTEP_TORCH_STORE"
"""Environment variable: the file through which ranks on one machine meet. A `TCPStore` would listen on all interfaces."""
