"""JAX. The functions of `lockstep.backends.Backend`."""

from lockstep.backends.jax import framework_import  # before all modules that import the framework

# isort: split
from lockstep.backends.jax.engine import JaxEngine as engine
from lockstep.backends.jax.instruments import libraries, products, profile
from lockstep.backends.jax.model import load_module
from lockstep.backends.jax.rank_setup import prepare_ranks
from lockstep.backends.jax.world import JaxWorld, devices
from lockstep.backends.jax.worlds_of_devices import DevicesWorld, Workers
from lockstep.recipes import Execution
from lockstep.system.ranks import count_ranks


def world(execution: Execution) -> JaxWorld:
    """Join the process group and choose the devices."""
    if count_ranks() > 1:
        return Workers(execution)
    world = JaxWorld(execution)
    return world if len(world.jax_devices) == 1 else DevicesWorld(execution)
