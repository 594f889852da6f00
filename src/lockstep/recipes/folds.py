"""Folds of cross-validation: every training image is for validation in one of several runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fold:
    """Which part of the images a run holds out for validation."""

    number: int
    """From 1."""
    count: int
    """The number of folds."""
    seed: int
    """The seed of the recipe: another one gives other folds."""

    def __str__(self) -> str:
        return f"fold {self.number} of {self.count}"
