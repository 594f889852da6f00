"""The process group: of `lockstep launch`, of torchrun, or of a single process."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Its functions default to the process group at the time of their import. Imported before there is
# one (DDP imports it), it keeps no group alive.
import torch.distributed.nn.functional
from torch.distributed.rendezvous import rendezvous

from lockstep.backends import HostQuestions
from lockstep.backends.shared.device import choose_gpu
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError, UserError
from lockstep.system.ranks import count_ranks, listen_address, make_rank_error
from lockstep.system.text import format_count


class TorchWorld(HostQuestions):
    """This process: one of those of `lockstep launch` or `torchrun`, or a single one."""

    def __init__(self, execution: Execution) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.ranks = count_ranks()
        self.torch_device = _device(execution, int(os.environ.get("LOCAL_RANK", "0")))
        self.device = device_name(self.torch_device)
        self.on_gpu = self.torch_device.type == "cuda"
        self._host_group: dist.ProcessGroup | None = None
        if self.ranks > 1:
            _check_addresses()
            backend = "nccl" if self.on_gpu else "gloo"
            try:
                self._host_group = self._meet(backend)
            except (RuntimeError, OSError) as error:  # also if a disk is full or has no locks
                if dist.is_initialized():  # NCCL connects later than gloo
                    dist.destroy_process_group()
                raise BackendError(
                    f"the ranks cannot meet at {_place_and_advice(error)}"
                ) from error
            from lockstep.backends.shared.bound_sockets import refuse_open_sockets

            refuse_open_sockets()

    def _meet(self, backend: str) -> dist.ProcessGroup:
        """Join the process group; return another for exchanges between hosts, which must not wait
        for the device's work."""
        store = self._store_of_launcher()
        connecting = None  # PyTorch's own time
        if store is None:  # MASTER_ADDR and MASTER_PORT are set
            store, _, _ = next(rendezvous("env://", self.rank, self.ranks, timeout=COMING))
            choose_interface(store, self.rank, self.ranks, os.environ["MASTER_ADDR"])
            connecting = CONNECTING
        is_gloo = backend == "gloo"  # NCCL connects later
        now = connecting if is_gloo else None
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.ranks, timeout=now
        )
        hosts = dist.new_group(backend="gloo", timeout=connecting)
        if connecting is not None:
            for group in [hosts, dist.group.WORLD] if is_gloo else [hosts]:
                dist.distributed_c10d._set_pg_timeout(WAITING, group)  # PyTorch has no other way
        return hosts

    def _store_of_launcher(self) -> Any:
        """Return the store of `lockstep launch`, or of torchrun on one machine; None for other
        launchers."""
        if STORE in os.environ:
            return dist.FileStore(os.environ[STORE], self.ranks)  # type: ignore[attr-defined]
        if listen_address() is not None:
            return _store(self.rank)
        return _start_of_torchrun()

    def _largest(self, values: list[int]) -> list[int]:
        if self._host_group is None:
            return values
        tensor = torch.tensor(values)
        with self.explain_errors():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._host_group)
        return tensor.tolist()

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn the error of a failed exchange into one that says that another rank has ended."""
        try:
            yield
        except RuntimeError as error:
            if self.ranks == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise make_rank_error() from error

    def close(self) -> None:
        """Leave the process group, and wait until its threads have ended.

        A thread of gloo may still hold a tensor of the last exchange. If the interpreter ends
        before it lets go, the process aborts. `destroy_process_group` leaves groups alone to which
        something refers.
        """
        if self.ranks > 1:
            self._host_group = None
            dist.destroy_process_group()
            gc.collect()  # engines have cycles


COMING = timedelta(minutes=10)
"""Ranks of another launcher wait this long for each other."""
CONNECTING = timedelta(seconds=20)
"""Once all ranks have joined, they wait this long to be connected. With a wrong address some of
them receive nothing. gloo tries five times, so that they end after 100 s."""
WAITING = timedelta(minutes=30)
"""Ranks wait this long for an exchange, as is PyTorch's default for gloo."""


def choose_interface(store: Any, rank: int, ranks: int, leading: str) -> None:
    """Wait until all ranks have joined, and make gloo use the network interface on the way to them.

    By default gloo takes the address of the host's name, which is loopback in /etc/hosts of many
    systems. `leading` is the host of rank 0. There it may be a name of loopback, too; the rank then
    looks for the way to one of the others. Ranks that are all on one machine stay on loopback. A
    variable that the user has set stays as it is. Raises `RuntimeError` if ranks are missing after
    `COMING`.
    """
    places = [f"lockstep-address-{number}" for number in range(ranks)]
    store.set(places[rank], _own_address(leading))
    store.wait(places, COMING)
    addresses = [store.get(place).decode() for place in places]
    from lockstep.launch.nodes import find_interface

    interface = find_interface([leading, *filter(None, addresses)])
    if IFNAME not in os.environ and interface is not None:
        os.environ[IFNAME] = interface


IFNAME = "GLOO_SOCKET_IFNAME"
"""Environment variable: the network interface that gloo uses."""


def _own_address(leading: str) -> str:
    """Return this machine's address on the way to a host; "" if it is not known."""
    from lockstep.launch.nodes import find_address

    try:
        return find_address(leading)
    except UserError:
        return ""


def _store(rank: int) -> Any:
    """Return the store of ranks on several machines. Rank 0 listens for it, at its own address
    only.

    By default a `TCPStore` listens on all interfaces.
    """
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
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
    return (
        f"{place}: {error}. Check that all ranks are started, that no firewall is between them, and"
        f" that {IFNAME}, if it is set, names the interface that reaches them"
    )


def _start_of_torchrun() -> Any:
    """Return the store of this start of the ranks by torchrun on one machine; None if torchrun did
    not start them there.

    torchrun has one store for all starts. A rank that is started again could read in it where one
    that has ended listened. On several machines torchrun does not number the starts alike
    (docs/how-to/resume.md says what helps).
    """
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        or os.environ.get("GROUP_WORLD_SIZE") != "1"
    ):
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # type: ignore[attr-defined]
    return dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]


def _check_addresses() -> None:
    """Raise `BackendError` if the variables are missing by which several ranks find each other."""
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and STORE not in os.environ:
        raise BackendError(
            f"several ranks need {', '.join(missing)} to be set; start them with `lockstep launch`"
            " or torchrun"
        )


def _device(execution: Execution, local_rank: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpu = choose_gpu(execution, "PyTorch", gpus=gpus, local_rank=local_rank)
    if gpu is None:
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def device_name(device: torch.device) -> str:
    """Return the name of a device to show."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {format_count(torch.get_num_threads(), 'thread')}"


def devices() -> list[str]:
    """Return the devices that PyTorch sees."""
    gpus = [device_name(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    return [*gpus, device_name(torch.device("cpu"))]


STORE = "LOCKSTEP_TORCH_STORE"
"""Environment variable: the file through which ranks on one machine meet. A `TCPStore` would listen
on all interfaces."""
