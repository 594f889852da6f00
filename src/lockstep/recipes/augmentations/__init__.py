"""The augmentations of training images, one file each: the file's name is its name in a recipe.

A file has one class, derived from `lockstep.recipes.augmentation.Augmentation`. To add another one,
add a file.
"""
