"""Defaults that the command line shows before it loads anything else."""

DEFAULT_BACKEND = "torch"
