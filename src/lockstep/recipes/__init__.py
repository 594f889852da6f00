"""What decides the result of a run before it starts: recipe, learning rates, initial weights, and
the order of images."""

from lockstep.recipes.execution import Execution
from lockstep.recipes.field_validation import format_value
from lockstep.recipes.recipe import Recipe, difference
from lockstep.recipes.recipe_files import load_recipe, parse_settings

__all__ = ["Execution", "Recipe", "difference", "format_value", "load_recipe", "parse_settings"]
