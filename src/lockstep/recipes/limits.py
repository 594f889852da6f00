"""Upper limits for the fields of a recipe and of an execution, with the reasons.

The limits lie far above what any training uses. Beyond them a run would fail with an error of the
allocator, or would need hours to start.
"""

from pydantic import AfterValidator

MOST_STEPS = 50_000_000
"""Steps of a run: a week at 80 steps a second, and 400 MB of learning rates."""
MOST_EPOCHS = 1_000_000
MOST_PARAMETERS = 1_000_000_000
"""Parameters of a model: 4 GB in float32, and as much again for each of gradients, velocities and
what is saved."""


def at_most(most: int, reason: str) -> AfterValidator:
    """Return a validator that refuses greater numbers and gives the reason."""

    def check(value: float) -> float:
        if value > most:
            raise ValueError(f"expected at most {most:,} ({reason})")
        return value

    return AfterValidator(check)


EPOCHS = at_most(MOST_EPOCHS, "the learning rate of every step is held in memory")
STEPS = at_most(MOST_STEPS, "the most steps that a run may have")
LOGITS = at_most(2**20, "the most classes that a data set may have")
GLOBAL_BATCH = at_most(2**20, "that many images of 224 px need 150 GB")
COUNTED = at_most(2**31 - 1, "engines count in 32 bits")
SIDE = at_most(4096, "the first activations of one image of that size are 1 GB")
ATTEMPTS = at_most(10_000, "an image that no crop fits costs that many draws")
SHARDS = at_most(2**20, "the most files that a data set may have")
THREADS = at_most(1024, "a system may refuse to start more threads")
BATCHES_AHEAD = at_most(1024, "each is held in memory")
EXCHANGE_MB = at_most(4_000, "the gradients of every model here are smaller")
TRACED_STEPS = at_most(10_000, "a trace takes megabytes for each step")
