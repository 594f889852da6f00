"""The campaign on a GPU: see docs/how-to/gpu.md."""
