"""`Evaluation`: what an evaluation of weights or an export returns."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.inference.runtimes.scores import Speed
from lockstep.models.accuracy_interval import format_accuracy
from lockstep.recipes.published_accuracies import Comparison
from lockstep.system.text import format_count


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result of an evaluation. Every image counts once."""

    source: str
    """The weights, or the export."""
    data: str
    """What the images are called."""
    runtime: str
    """What computed."""
    precision: str
    metrics: dict[str, Any]
    """Numbers of all images by their keys, such as `top1_percent` and `loss`: the usual ones, the
    recipe's `selection`, and those that the execution names."""
    interval: tuple[float, float]
    """The 95 % interval of top-1, in percent."""
    classes: list[str]
    per_class: Any
    """Numbers of images by class, as a mapping: `images`, those of them that are right (`top1`) or
    in the first five (`top5`), and those of any class that are taken for it (`predicted`)."""
    class_summary: Any
    """Shares in percent: `recall_percent` and `precision_percent` by class, and their means."""
    class_orders: Any
    """The accuracy in other orders of folders (`label_matching`)."""
    published: Comparison | None
    """The top-1 next to published ones; None if there are none."""
    quarantined: list[Any]
    """Images that cannot be read, which are left out."""
    trained_images: int
    """How many of the images the run was trained on, by their bytes; 0 if that is not known."""
    speed: Speed
    remarks: list[str]
    calibration: dict[str, Any] = field(default_factory=dict)
    """What was stored with the checkpoint (`inference.calibrator`); empty if that was not asked
    for."""
    sets: dict[str, "Evaluation"] = field(default_factory=dict)
    """The results of a folder of data sets by name, of which this one has the means; empty for a
    single data set."""
    corruption_errors: dict[str, float] = field(default_factory=dict)
    """The errors of ImageNet-C's corruptions in percent of AlexNet's, and their mean as `mean`;
    empty for other data."""

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.metrics["images"])

    @property
    def top1(self) -> float:
        """The share of images whose likeliest class is their label, in percent."""
        return float(self.metrics["top1_percent"])

    @property
    def top5(self) -> float | None:
        """The share of images whose label is among the five likeliest classes, in percent; None if
        it is not computed."""
        return self.metrics.get("top5_percent")

    def __repr__(self) -> str:
        interval = self.interval if self.sets else None
        accuracy = format_accuracy(self.top1, self.images, interval)
        images = format_count(self.images, "image")
        return f"Evaluation(top-1 {accuracy} of {images} of {self.data})"

    def to_json(self) -> dict[str, Any]:
        """Return what `lockstep evaluate --json` prints."""
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
