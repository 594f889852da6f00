"""The process group: of `lockstep launch`, of torchrun, or of a single process."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the process group of the time of their import as a default. Imported before there is one (DDP imports
# it), it keeps no group alive.
import torch.distributed.nn.functional

from lockstep.backends import HostQuestions, refuse_horovod
from lockstep.backends.shared.device import chosen_gpu
from lockstep.backends.shared.loopback import refuse_open_sockets
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError, LockstepError
from lockstep.system.ranks import listen_address


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
                raise BackendError(f"the ranks cannot meet at {_place_and_advice(error)}") from error
            refuse_open_sockets()

    def _meet(self, backend: str) -> None:
        if STORE in os.environ:
            store = dist.FileStore(os.environ[STORE], self.ranks)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks)
        elif listen_address() is not None:
            dist.init_process_group(backend, store=_store(self.rank), rank=self.rank, world_size=self.ranks)
        elif (started := _start_of_torchrun()) is not None:
            dist.init_process_group(backend, store=started, rank=self.rank, world_size=self.ranks)
        else:  # MASTER_ADDR and MASTER_PORT are set
            dist.init_process_group(backend)

    def _largest(self, values: list[int]) -> list[int]:
        if self._host_group is None:
            return values
        tensor = torch.tensor(values)
        with self.watched():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._host_group)
        return tensor.tolist()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn the error of a failed exchange into one that says that another rank has ended."""
        try:
            yield
        except RuntimeError as error:
            if self.ranks == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise LockstepError("another rank has ended; its own message says why") from error

    def close(self) -> None:
        """Leave the process group, and wait until its threads have ended.

        A thread of gloo may still hold a tensor of the last exchange. If the interpreter ends before it lets go, the process
        aborts. `destroy_process_group` leaves groups alone to which something refers.
        """
        if self.ranks > 1:
            self._host_group = None
            dist.destroy_process_group()
            gc.collect()  # engines have cycles


def _store(rank: int) -> Any:
    """Return the store of ranks on several machines. Rank 0 listens for it, at its own address only.

    By itself a `TCPStore` listens on all interfaces.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank > 0:
        return dist.TCPStore(address, port)  # type: ignore[attr-defined]
    listener = socket.create_server((address, port)).detach()  # the store closes it
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=True, master_listen_fd=listener, wait_for_workers=False
    )


def _place_and_advice(error: Exception) -> str:
    """Return where the ranks meet, why they cannot, and what to do."""
    if STORE in os.environ:
        return f"{os.environ[STORE]}: {error}. Set TMPDIR to use another disk"
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return f"{place}: {error}. Check that all ranks are started and that no firewall is between"


def _start_of_torchrun() -> Any:
    """Return the store of this start of the ranks by torchrun on one machine; None if torchrun did not start them there.

    torchrun has one store for all starts. A rank that is started again could read in it where one that has ended listened.
    On several machines torchrun does not number the starts alike (docs/reliability.md says what helps).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]


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
