"""What a run computes, decided before anything runs: recipe, learning rates, initial weights, and the order of images."""

from lockstep.recipes.recipe import Execution, Recipe, difference, load_recipe, parse_settings

__all__ = ["Execution", "Recipe", "difference", "load_recipe", "parse_settings"]
