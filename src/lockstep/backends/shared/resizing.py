"""What programs that resize images inside have in common."""

from lockstep.recipes import Recipe
from lockstep.recipes.recipe import own_geometry
from lockstep.system.errors import CheckpointError


def samples_itself(recipe: Recipe, program: str) -> bool:
    """Return whether a program must sample images itself, as its framework's resize has another geometry than evaluation.

    `program` is what the program is called in the message. Raises `CheckpointError` if it would also have to filter, or to
    sample bicubically.
    """
    own = own_geometry(recipe)
    if own and (recipe.eval_antialias or recipe.interpolation == "bicubic"):
        fields = {"interpolation": recipe.interpolation, "eval_antialias": str(recipe.eval_antialias).lower()}
        described = ", ".join(f"{name}: {value}" for name, value in (own | fields).items())
        raise CheckpointError(
            f"{program} resizes images, and cannot do so with {described}; expected interpolation: bilinear and "
            "eval_antialias: false with this geometry; export to onnx, which leaves the resize to you"
        )
    return bool(own)
