"""The campaign on a GPU: see docs/gpu.md."""
