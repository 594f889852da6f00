"""The size of training images in each epoch."""

from lockstep.recipes.recipe import Recipe


def find_size(recipe: Recipe, epoch: int) -> int:
    """Return height and width of the training images of an epoch, counted from 0.

    >>> find_size(Recipe(image_sizes=[[0, 160], [71, 192]]), epoch=70)
    160
    """
    size = recipe.image_size
    for first_epoch, later_size in recipe.image_sizes:
        if epoch >= first_epoch:
            size = later_size
    return size


def list_sizes(recipe: Recipe) -> list[int]:
    """Return the sizes that the training images of a run have, the smallest first."""
    sizes = {size for epoch, size in recipe.image_sizes if epoch < recipe.epochs}
    return sorted(sizes or {recipe.image_size})


def fix_size(recipe: Recipe, size: int) -> Recipe:
    """Return a recipe whose training images have this size in all epochs, and the same
    evaluation."""
    evaluation = {"eval_resize": recipe.eval_resize, "eval_crop": recipe.eval_crop}
    return recipe.replace(image_size=size, **evaluation)
