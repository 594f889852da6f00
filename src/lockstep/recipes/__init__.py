"""What decides the result of a run before it starts: recipe, learning rates, initial weights, and the order of images."""

from lockstep.recipes.execution import Execution
from lockstep.recipes.loading import load_recipe, parse_settings
from lockstep.recipes.recipe import Recipe, difference

__all__ = ["Execution", "Recipe", "difference", "load_recipe", "parse_settings"]
