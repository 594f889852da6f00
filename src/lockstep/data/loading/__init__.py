"""Loaders, which turn the plans of `lockstep.recipes.order` into batches."""
