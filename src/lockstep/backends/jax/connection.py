"""Connect JAX's ranks, each at its own address only.

`jax.distributed` has a service in rank 0, where ranks tell each other their devices and where gloo
listens. On CPUs all ranks leave it as soon as gloo has connected them. Nothing needs it then, and
as long as they are in it, the end of rank 0 aborts the others within JAX's own code.

Two things have no public function in JAX 0.10: the address at which gloo listens, by default that
of the host's name, and the number of ranks before devices are used.
"""

import os

import jax
from jax.extend.backend import register_backend_factory

from lockstep.backends.shared.import_side_effects import keep_sigterm, silence_output
from lockstep.system.errors import BackendError
from lockstep.system.ranks import LOOPBACK, listen_address

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
"""Environment variable: where rank 0 has the service of `jax.distributed`, as host:port."""
_MEETING_SEC = 120
"""Seconds until all ranks have joined, or have left. Their hosts are connected already, so that
they join and leave at the same time."""


def is_connected(ranks: int) -> bool:
    """Return whether an earlier world of this process has connected it to this many ranks."""
    from jax._src.xla_bridge import backends_are_initialized  # asking for devices would initialise

    return backends_are_initialized() and jax.process_count() == ranks


def connect(rank: int, ranks: int, local_rank: int) -> None:
    """Join the service at `COORDINATOR`, so that JAX finds the devices of all ranks.

    All is given here, so that JAX looks for no launcher. Raises `BackendError` if ranks are
    missing, or if JAX was used before.
    """
    place = os.environ[COORDINATOR]
    # It would replace the handler of SIGTERM, with which a run saves its state.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with keep_sigterm(), silence_output():
            jax.distributed.initialize(
                place,
                ranks,
                rank,
                local_device_ids=[local_rank],
                cluster_detection_method="deactivate",
                initialization_timeout=_MEETING_SEC,
                shutdown_timeout_seconds=_MEETING_SEC,
                coordinator_bind_address=place,
            )
            _confine_gloo(listen_address() or LOOPBACK)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise BackendError(f"the ranks cannot meet at {place}: {reason:.300}") from error


def _confine_gloo(address: str) -> None:
    """Let gloo listen at this address. Raises `BackendError` if this JAX has no way to do it."""
    try:
        from jax._src.distributed import global_state
        from jax._src.lib import _jax
        from jax._src.xla_bridge import make_cpu_client

        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=global_state.client, hostname=address
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise BackendError(
            f"JAX {jax.__version__} has no way to choose gloo's address: {error}; install the"
            " version in constraints.txt"
        ) from error
    register_backend_factory("cpu", lambda: make_cpu_client(collectives), fail_quietly=False)


def leave_service() -> None:
    """Leave the service, together with all ranks."""
    with silence_output():
        jax.distributed.shutdown()
