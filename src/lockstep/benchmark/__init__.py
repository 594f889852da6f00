"""Measure Lockstep and what people would use instead, in one run."""
