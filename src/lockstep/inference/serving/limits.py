"""A server's limits: sizes, images at the same time, and times."""

from dataclasses import dataclass, fields

from lockstep.system.errors import UserError

MB = 2**20
HELD_BODIES = 8
"""Bodies of the largest size that fit in memory at the same time. Requests beyond it are answered
with 429."""
LARGEST_JSON = 8 * MB
"""Tensors as JSON take 20 times as much memory while they are parsed. Larger requests must be in
binary."""
HEAD_SEC = 10.0
"""The seconds from the first byte of a request to the end of its headers; less if
`Limits.timeout_sec` is."""
KEEP_ALIVE_SEC = 75
"""The seconds that a connection may stay open between two requests. Many clients reuse connections
for up to 60."""
STALLED_SEC = 1.0
"""The seconds without a byte after which an upload gives way to other bodies or connections if
there are too many."""
LINGER_SEC = 2.0
"""The seconds in which the rest of a refused body is read, so that its sender sees the answer and
not a reset."""


@dataclass(frozen=True)
class Limits:
    """A server's limits. Raises `UserError` for a value out of range."""

    max_batch: int = 32
    """The largest batch that the runtime gets, and the most images of one request."""
    max_wait_ms: float = 2.0
    """How long a batch waits for images that are being received or decoded. Without such images it
    does not wait."""
    max_queue: int = 256
    """Images that are decoded, waiting or computed at the same time. More are refused with 429."""
    max_body_mb: int = 32
    """Size of a request's body."""
    max_megapixels: float = 50.0
    """Size of an image, decoded."""
    timeout_sec: float = 30.0
    """The time to send a request's body, and the time to decode and compute its images."""
    max_connections: int = 512
    """Open connections. For another one, the one that has waited longest for its client is
    closed."""
    drain_sec: float = 1.0
    """How long requests are still accepted after a signal to stop, while the server reports that it
    is not ready."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("max_wait_ms", "drain_sec") else 1
            if not least <= value <= 1e9:  # false for NaN
                raise UserError(f"{field.name} is {value}; expected at least {least}")
        if self.max_queue < self.max_batch:
            raise UserError(
                f"max_queue is {self.max_queue}, but a batch has {self.max_batch}; use a"
                " longer queue"
            )

    @property
    def body_bytes(self) -> int:
        """Size of a request's body in bytes."""
        return self.max_body_mb * MB

    @property
    def all_bodies_bytes(self) -> int:
        """Size of all bodies that are in memory at the same time."""
        return HELD_BODIES * self.body_bytes

    @property
    def head_sec(self) -> float:
        """The seconds from the first byte of a request to the end of its headers."""
        return min(HEAD_SEC, self.timeout_sec)

    @property
    def pixels(self) -> int:
        """Pixels of an image."""
        return int(self.max_megapixels * 1e6)
