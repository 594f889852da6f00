"""The plans of `lockstep.recipes.order` to batches."""
