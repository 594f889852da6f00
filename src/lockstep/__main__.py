"""`python -m lockstep`."""

import sys

# `python -m` looks for modules in the current folder first: a numbers.py there would replace
# Python's own. The folder is removed unless Lockstep itself comes from it. Nothing that such a file
# could replace is imported before this.
if not sys.flags.safe_path and __file__ != f"{sys.path[0]}/lockstep/__main__.py":
    del sys.path[0]

from lockstep.cli import run

run()
