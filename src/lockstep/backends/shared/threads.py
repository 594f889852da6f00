"""The threads of ranks that share a machine."""

import os

from lockstep.launch.nodes import Table
from lockstep.system.machine import share_of_cores


def share_cores(variable: str, table: Table) -> dict[str, str]:
    """Return the environment variable that gives each rank of this machine an equal share of its
    cores, unless the user has set it."""
    return {variable: os.environ.get(variable) or str(share_of_cores(table.own.processes))}
