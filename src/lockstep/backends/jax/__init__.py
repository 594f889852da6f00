"""JAX. The functions of `lockstep.backends.Backend`."""

from lockstep.backends.jax import loading  # before all modules that import the framework

# isort: split
from lockstep.backends.jax.engine import JaxEngine as engine
from lockstep.backends.jax.measuring import libraries, products
from lockstep.backends.jax.module import load_module
from lockstep.backends.jax.tracing import profile
from lockstep.backends.jax.world import JaxWorld as world
from lockstep.backends.jax.world import devices
