"""Using trained weights: evaluate, predict, export."""
