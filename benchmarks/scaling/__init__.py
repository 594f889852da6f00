"""A model of the speed of several ranks: `python -m benchmarks.scaling` predicts, `python -m
benchmarks.scaling.campaign` measures steps that check it."""
