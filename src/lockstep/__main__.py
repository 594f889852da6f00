"""`python -m lockstep`."""

import sys

# `python -m` looks for modules in the current folder first: a numbers.py there would be taken for Python's own. The folder
# stays only where Lockstep itself comes from it. Nothing that could lie there is imported before this.
if not sys.flags.safe_path and __file__ != f"{sys.path[0]}/lockstep/__main__.py":
    del sys.path[0]

from lockstep.cli import run

run()
