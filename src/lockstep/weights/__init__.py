"""Weights on disk: checkpoints, other programs' files, conversion, pruning."""
