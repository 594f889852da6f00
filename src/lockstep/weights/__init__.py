"""Weights on disk: checkpoints, files of other programs, conversion, pruning."""
