"""Benchmarks of Lockstep, and the campaign on a GPU."""
