"""What `make soak` adds to `make test`: tests that take long, and that quicker tests stand for."""

import os

import pytest

SOAK = "LOCKSTEP_SOAK" in os.environ
"""Whether `make soak` runs the tests."""

in_a_soak = pytest.mark.skipif(not SOAK, reason="runs under make soak")
