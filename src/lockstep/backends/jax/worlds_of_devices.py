"""Worlds of several devices: those of this process, and those of several ranks.

The devices are a mesh of ranks and of the devices of each rank. Along its first axis every rank
computes by itself, as `jax.shard_map` does, and adds up where it says so. Along the second one XLA
divides the rows of the rank's batch and keeps the meaning of the whole: batch norm without
synchronisation normalises all images of a rank.

Arrays count as copies of each other along both axes, unless their rows are divided. Ranks may still
have different values, such as their own rows and running statistics: nothing compares them, and
only `sum` and `gather` exchange them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.backends.jax.connection import COORDINATOR, connect, is_connected, leave_service
from lockstep.backends.jax.world import JaxWorld
from lockstep.backends.shared import rank_connections
from lockstep.backends.shared.bound_sockets import refuse_open_sockets
from lockstep.backends.shared.import_side_effects import silence_output
from lockstep.backends.shared.rank_connections import meet_ranks
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.system.ranks import make_rank_error

_RANKS = "ranks"
_DEVICES = "devices"
_COPIES = PartitionSpec()
_DIVIDED = PartitionSpec(_DEVICES)
_BITS = {jnp.bfloat16: jnp.uint16, jnp.float16: jnp.uint16}
"""Types that are sent as bits: on CPUs, XLA would send sums of them as float32."""


class DevicesWorld(JaxWorld):
    """A single process with several devices."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution)
        self._packed_bytes = execution.all_reduce_mb * 2**20
        axes = (_RANKS, _DEVICES)
        self._mesh = Mesh(np.array(self._list_all_devices()).reshape(self.ranks, -1), axes)
        self._own_mesh = Mesh(np.array(self.jax_devices).reshape(1, -1), axes)

    def _list_all_devices(self) -> list[Any]:
        """Return the devices of all ranks, rank by rank."""
        return self.jax_devices

    def jit(
        self,
        function: Callable[..., Any],
        donate_argnums: int | tuple[int, ...] = (),
        compiler_options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Return a compiled function in which `sum` and `gather` may be called."""
        alone = len(self.jax_devices) == 1
        own = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=_COPIES,
            out_specs=_COPIES,
            axis_names={_RANKS, _DEVICES} if alone else {_RANKS},
            check_vma=False,
        )
        copies = NamedSharding(self._mesh, _COPIES)

        def run_on_all(*arguments: Any) -> Any:
            return lax.with_sharding_constraint(own(*arguments), copies)

        return super().jit(run_on_all, donate_argnums, compiler_options)

    def place(self, arrays: Any) -> Any:
        """Return this rank's arrays on the devices. Rows are divided among them if their number
        allows it."""

        def put(array: Any) -> Any:
            rows = np.shape(array)[:1]
            is_divided = rows and rows[0] % len(self.jax_devices) == 0
            return self._put(array, _DIVIDED if is_divided else _COPIES)

        return jax.tree.map(put, arrays)

    def replicate(self, arrays: Any) -> Any:
        """Return arrays on the devices, which are alike on all ranks."""
        return jax.tree.map(lambda array: self._put(array, _COPIES), arrays)

    def _put(self, array: Any, spec: PartitionSpec) -> Any:
        copy = np.array(array)
        sharding = NamedSharding(self._mesh, spec)
        return jax.make_array_from_callback(copy.shape, sharding, lambda index: copy[index])

    def take_local(self, arrays: Any) -> Any:
        """Return arrays for computations of this process alone, which other ranks do not join."""
        return jax.tree.map(self._take_local, arrays)

    def _take_local(self, array: Any) -> Any:
        if len(self.jax_devices) == 1:
            return array.addressable_data(0)
        sharding = NamedSharding(self._own_mesh, array.sharding.spec)
        pieces = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


class Workers(DevicesWorld):
    """This process as one of several, which `jax.distributed` and gloo connect; NCCL on GPUs."""

    def __init__(self, execution: Execution) -> None:
        _check_places()
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        places = (os.environ[rank_connections.ADDRESS], os.environ[rank_connections.KEY])
        self._connections = meet_ranks(self.rank, self.ranks, *places)
        is_new = not is_connected(self.ranks)
        if is_new:
            if execution.device == "cpu":
                jax.config.update("jax_platforms", "cpu")
            connect(self.rank, self.ranks, int(os.environ.get("LOCAL_RANK", "0")))
        super().__init__(execution)
        if is_new and not self.on_gpu:
            self._connect_gloo()
            self.wait()
            leave_service()
        refuse_open_sockets()

    def _list_all_devices(self) -> list[Any]:
        devices = jax.devices(self.jax_devices[0].platform)
        counts = {
            sum(device.process_index == rank for device in devices) for rank in range(self.ranks)
        }
        if len(counts) > 1:
            raise BackendError(
                "the ranks have different numbers of devices; give each rank the same number"
            )
        return sorted(devices, key=lambda device: (device.process_index, device.id))

    def _connect_gloo(self) -> None:
        """Exchange a number once in every group of devices: gloo connects a group when it is first
        used."""

        def exchange(number: Any) -> list[Any]:
            groups = (_RANKS, _DEVICES, (_RANKS, _DEVICES))
            return [lax.psum(number, group) for group in groups]

        run = jax.shard_map(
            exchange, mesh=self._mesh, in_specs=_COPIES, out_specs=_COPIES, check_vma=False
        )
        with self.explain_errors(), silence_output():  # gloo reports how many it has connected
            jax.block_until_ready(jax.jit(run)(np.float32(0)))

    def sum(self, arrays: Sequence[Any], sent: Any = None) -> list[Any]:
        """Return the sums over all ranks, within `jit`. They are sent between ranks in the dtype
        `sent`; None: as they are.

        Arrays are sent together, up to `all_reduce_mb` at a time.
        """
        sums = []
        for pack in self._pack(arrays):
            vector = jnp.concatenate([array.ravel() for array in pack])
            total = self._sum_rounded(vector, sent) if sent in _BITS else lax.psum(vector, _RANKS)
            ends = np.cumsum([array.size for array in pack])
            parts = jnp.split(total, ends[:-1])
            sums += [part.reshape(array.shape) for part, array in zip(parts, pack, strict=True)]
        return sums

    def _pack(self, arrays: Sequence[Any]) -> Iterator[list[Any]]:
        """Yield the arrays in lists of one dtype, each of which is sent in one exchange."""
        pack: list[Any] = []
        for array in arrays:
            size = sum(other.nbytes for other in pack) + array.nbytes
            if pack and (size > self._packed_bytes or array.dtype != pack[0].dtype):
                yield pack
                pack = []
            pack.append(array)
        if pack:
            yield pack

    def _sum_rounded(self, vector: Any, sent: Any) -> Any:
        """Return the sum over all ranks of vectors that are sent in a dtype of 16 bits.

        Every rank adds up its share of the vector in float32, and the sums are rounded once.
        """
        share = -(-len(vector) // self.ranks)
        padded = jnp.pad(vector.astype(sent), (0, share * self.ranks - len(vector)))
        rows = lax.bitcast_convert_type(padded, _BITS[sent]).reshape(self.ranks, share)
        received = lax.bitcast_convert_type(lax.all_to_all(rows, _RANKS, 0, 0), sent)
        total = jnp.sum(received.astype(jnp.float32), axis=0).astype(sent)
        bits = lax.all_gather(lax.bitcast_convert_type(total, _BITS[sent]), _RANKS, tiled=True)
        return lax.bitcast_convert_type(bits, sent)[: len(vector)].astype(vector.dtype)

    def gather(self, table: Any) -> Any:
        """Return the rows of all ranks, in order of ranks, within `jit`. All ranks must have the
        same number of rows."""
        return lax.all_gather(table, _RANKS, tiled=True) if len(table) else table

    @contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn the error of a failed exchange into one that says that another rank has ended."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if not any(name in str(error) for name in ("Gloo", "NCCL")):
                raise
            reason = str(error).splitlines()[0]
            raise make_rank_error(reason) from error

    def _largest(self, values: list[int]) -> list[int]:
        return self._connections.largest(values)

    def close(self) -> None:
        """Leave the other ranks."""
        self._connections.close()


def _check_places() -> None:
    """Raise `BackendError` if the variables are missing by which several ranks find each other."""
    names = ("RANK", COORDINATOR, rank_connections.ADDRESS, rank_connections.KEY)
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise BackendError(
            f"several ranks need {', '.join(missing)} to be set; start them with `lockstep launch`"
        )
