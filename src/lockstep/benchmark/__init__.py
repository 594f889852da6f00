"""Measuring Lockstep beside what people would pick instead, in one run."""
