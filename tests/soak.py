"""What `make soak` adds to `make test`: tests that take long, and that quicker tests stand for."""

import os

import pytest
from hypothesis import HealthCheck, settings

SOAK = "LOCKSTEP_SOAK" in os.environ
"""Whether `make soak` runs the tests."""

# A busy machine needs long for an example. Only a soak searches with other numbers each time.
PROFILE = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not SOAK
)
EXAMPLES = settings(PROFILE, max_examples=100 if SOAK else 30)
"""How many inputs a property is tested with. `make fuzz` damages ten thousand files of every
format."""

in_a_soak = pytest.mark.skipif(not SOAK, reason="runs under make soak")
