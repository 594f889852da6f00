"""Resuming in mid-epoch next to other libraries: `python -m benchmarks.resume_beside_peers`."""
