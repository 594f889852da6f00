"""Measure training, inference and loaders."""
