"""Launching: start, watch and stop ranks, and connect several machines."""
