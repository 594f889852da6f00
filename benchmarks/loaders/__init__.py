"""Lockstep's loaders next to those of others: `python -m benchmarks.loaders`."""
