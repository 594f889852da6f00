"""How large the fields of a recipe and of an execution may be, and why.

The limits lie far above what trains anything. Beyond them a run would end in an allocator's words, or not begin for hours.
"""

from pydantic import AfterValidator

MOST_STEPS = 50_000_000
"""Of a run: a week at 80 a second, and 400 MB of learning rates."""
MOST_EPOCHS = 1_000_000
MOST_PARAMETERS = 1_000_000_000
"""Of a model: 4 GB in float32, and as much for gradients, velocities and what is saved."""


def at_most(most: int, reason: str) -> AfterValidator:
    """Return a validator that refuses greater numbers and says why."""

    def check(value: float) -> float:
        if value > most:
            raise ValueError(f"expected at most {most:,} ({reason})")
        return value

    return AfterValidator(check)


EPOCHS = at_most(MOST_EPOCHS, "the learning rate of every step is held in memory")
STEPS = at_most(MOST_STEPS, "no run has more steps")
LOGITS = at_most(2**20, "no data set is read with more classes")
GLOBAL_BATCH = at_most(2**20, "so many images of 224 px are 150 GB")
COUNTED = at_most(2**31 - 1, "engines count in 32 bits")
SIDE = at_most(4096, "the first activations of one image of that size are 1 GB")
ATTEMPTS = at_most(10_000, "an image that nothing fits costs that many draws")
THREADS = at_most(1024, "more threads than that a system may refuse")
BATCHES_AHEAD = at_most(1024, "each is held in memory")
EXCHANGE_MB = at_most(4_000, "the gradients of no model here are larger")
TRACED_STEPS = at_most(10_000, "a trace has megabytes a step")
