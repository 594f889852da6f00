"""Figures of a server in Prometheus' text format."""

from collections.abc import Callable
from functools import partial

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest

from lockstep.system.version import version

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # they double the figures
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        labels = ("method", "path", "status")
        self._requests = counter("lockstep_requests", "Requests answered.", labels)
        what = "Seconds from a request's headers to the end of its answer."
        self._seconds = histogram("lockstep_request_seconds", what, ("path",), buckets=_SECONDS)
        self._images = counter("lockstep_images", "Images computed by the runtime.")
        what = "Images per batch of the runtime."
        self._batches = histogram("lockstep_batch_images", what, buckets=_BATCHES)
        what = "Seconds per batch of the runtime."
        self._engine = histogram("lockstep_engine_seconds", what, buckets=_SECONDS)
        ProcessCollector(registry=registry)

    def describe(self, **labels: str) -> None:
        """Set the labels of the model, its runtime and precision."""
        Info("lockstep", "The served model.", registry=self._registry).info(
            {"version": version(), **labels}
        )

    def watch(self, name: str, what: str, value: Callable[[], float]) -> None:
        """Add a figure that is read when it is asked for."""
        Gauge(name, what, registry=self._registry).set_function(value)

    def count_request(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request. `method` and `path` must be of a small number, since each combination is
        kept."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_batch(self, images: int, seconds: float) -> None:
        """Count a batch."""
        self._images.inc(images)
        self._batches.observe(images)
        self._engine.observe(seconds)

    def text(self) -> bytes:
        """Return all figures."""
        return generate_latest(self._registry)
