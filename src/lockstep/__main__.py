"""`python -m lockstep`."""

from lockstep.cli import run

run()
