"""`Evaluation`: what an evaluation of weights or an export returns."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.inference.runtimes.scores import Speed
from lockstep.models.accuracy_interval import format_accuracy
from lockstep.recipes.published_accuracies import Comparison
from lockstep.system.text import format_count


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result of an evaluation, in which every image counts once.

    >>> import lockstep
    >>> result = lockstep.load("run", checkpoint="best").evaluate("data")
    >>> result.images, result.interval[0] <= result.top1 <= result.interval[1]
    (20, True)
    """

    source: str
    """The path of the weights or of the export."""
    data: str
    """The images that were evaluated, such as "data/val"."""
    runtime: str
    """The name of the runtime that computed."""
    precision: str
    """The precision in which it computed, such as "fp32"."""
    metrics: dict[str, Any]
    """Figures of all images, such as `top1_percent` and `loss`, the recipe's `selection`, and the
    `metrics` of the execution."""
    interval: tuple[float, float]
    """The ends of the 95 % interval of top-1, in percent."""
    classes: list[str]
    """Names of the classes of the images, in the order of `per_class`."""
    per_class: Any
    """A mapping of lists with a count of images for each class: all of them (`images`), those whose
    top class is right (`top1`), those with the right class in the first five (`top5`), and
    those of any class for which the model predicts this class (`predicted`)."""
    class_summary: Any
    """Shares in percent: `recall_percent` and `precision_percent` by class, and their means."""
    class_orders: Any
    """The accuracy for other orders of the class folders; empty if the order is beyond doubt."""
    published: Comparison | None
    """Top-1 next to the published figures of the recipe; None if there are none."""
    quarantined: list[Any]
    """Images that cannot be read; they do not count."""
    trained_images: int
    """The number of these images that are training images of the run, or of the weights that it
    started from, by bytes; 0 if unknown."""
    speed: Speed
    """Images per second, the batch size and the latency."""
    remarks: list[str]
    """Notes on the weights and on the images."""
    calibration: dict[str, Any] = field(default_factory=dict)
    """The calibration that was stored with the checkpoint; empty unless you asked for one."""
    sets: dict[str, "Evaluation"] = field(default_factory=dict)
    """For a folder of data sets: the result of each set by name; this result holds their means.
    Otherwise empty."""
    corruption_errors: dict[str, float] = field(default_factory=dict)
    """For ImageNet-C: errors by corruption in percent of AlexNet's, and their `mean`. Otherwise
    empty."""

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.metrics["images"])

    @property
    def top1(self) -> float:
        """The share of images whose most likely class is their label, in percent."""
        return float(self.metrics["top1_percent"])

    @property
    def top5(self) -> float | None:
        """The share of images whose label is among the five most likely classes, in percent.

        None if it was not computed.
        """
        return self.metrics.get("top5_percent")

    def __repr__(self) -> str:
        interval = self.interval if self.sets else None
        accuracy = format_accuracy(self.top1, self.images, interval)
        images = format_count(self.images, "image")
        return f"Evaluation(top-1 {accuracy} of {images} of {self.data})"

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, as `lockstep evaluate --json` prints it."""
        values = asdict(replace(self, sets={}))
        del values["sets"]
        values |= values.pop("metrics")
        values |= values.pop("calibration")
        values["top1_interval_percent"] = list(values.pop("interval"))
        if not self.corruption_errors:
            del values["corruption_errors"]
        if self.sets:
            values["sets"] = {}
        for name, result in self.sets.items():
            interval = {"top1_interval_percent": list(result.interval)}
            values["sets"][name] = result.metrics | interval
        return values
