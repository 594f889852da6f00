"""Horovod, if it is installed: one of the two ways in which NVIDIA's code uses several GPUs."""

import os
import secrets
import socket

import mxnet as mx
import numpy as np

from lockstep.backends.mxnet.world import Array, Ranks
from lockstep.backends.shared import rank_connections
from lockstep.backends.shared.horovod import join_horovod
from lockstep.backends.shared.rank_connections import RankConnections
from lockstep.launch.connections import reach
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError

try:
    import horovod.mxnet as hvd
except ImportError as error:
    raise BackendError(
        f"distributed is horovod, which is not installed here: {error}. `make mxnet-horovod` builds"
        " it in .venv-mxnet"
    ) from None

_FAILS_WITH = ("Horovod has been shut down", "gloo")
"""Words in Horovod's error on every rank when one of them has ended."""
_LETTER_BYTES = 512


class HorovodWorld(Ranks):
    """This process: one of those of `horovodrun` or `lockstep launch --distributed horovod`, or a
    single one."""

    def __init__(self, execution: Execution) -> None:
        join_horovod(hvd)
        super().__init__(execution, _meet())

    def refuse_loss(self, reason: str = "") -> None:
        """Raise `LockstepError` if a rank has ended. `reason` is MXNet's error.

        Horovod fails on all ranks at once. Without it, the ranks other than 0 would notice only the
        end of rank 0.
        """
        super().refuse_loss()
        if any(words in reason for words in _FAILS_WITH):
            raise self._connections.give_up()

    def _exchange(self, key: str, array: Array) -> None:
        hvd.allreduce_(array, op=hvd.Sum, name=key)

    def close(self) -> None:
        """Leave the process group."""
        super().close()
        if not self.lost:
            mx.nd.waitall()
            hvd.shutdown()


def _meet() -> RankConnections:
    """Connect the hosts of the ranks, since Horovod answers only after all work that MXNet has
    enqueued.

    Rank 0 listens. It sends its address and a shared secret to the others through Horovod.
    """
    if hvd.rank() > 0:
        host, port, key = _broadcast(b"").decode().split()
        return RankConnections(
            hvd.rank(), hvd.size(), [reach(host, int(port), key, rank_connections.PATIENCE_SEC)]
        )
    host = _own_host()
    key = secrets.token_hex()
    try:
        server = rank_connections.open_server(host, 0, hvd.size())
    except OSError as error:
        raise BackendError(
            f"rank 0 cannot listen at {host}, where the other ranks would reach it: {error}"
        ) from None
    _broadcast(f"{host} {server.getsockname()[1]} {key}".encode())
    return RankConnections(0, hvd.size(), rank_connections.accept_ranks(server, hvd.size(), key))


def _own_host() -> str:
    """Return a name of this machine that all ranks can resolve."""
    if hvd.size() == hvd.local_size():
        return "localhost"
    named = os.environ.get("HOROVOD_HOSTNAME", "localhost")
    return socket.getfqdn() if named == "localhost" else named


def _broadcast(letter: bytes) -> bytes:
    """Return the letter of rank 0. It is bytes, not a Python object, since unpickling an object can
    execute code."""
    padded = np.frombuffer(letter.ljust(_LETTER_BYTES, b" "), np.uint8)
    return bytes(
        hvd.broadcast(mx.nd.array(padded, mx.cpu(), np.uint8), root_rank=0, name="hosts").asnumpy()
    ).strip()
