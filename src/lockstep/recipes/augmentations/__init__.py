"""The augmentations of training images, one file each: the file's name is its name in a recipe.

A file has one class, derived from `lockstep.recipes.augmentation.Augmentation`. Nothing else has to
be changed for another one.
"""
