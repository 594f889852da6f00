"""A folder of data sets, such as ImageNet-C's 75 or the three of ImageNet-V2: one result with the
means."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data import sources
from lockstep.data.class_folders import list_class_folders
from lockstep.inference.evaluation_result import Evaluation
from lockstep.models.class_metrics import ClassCounts, summarise_classes
from lockstep.weights import Weights
from lockstep.weights.class_names import find_imagenet

_DEEPEST = 3
"""Data sets are looked for in this many levels of folders: GROUP/CORRUPTION/SEVERITY."""
_SEVERITIES = ["1", "2", "3", "4", "5"]
_CLASSES = 1000
_ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""Errors of AlexNet on ImageNet-C, as google-research/augmix has them in `imagenet.py`, "taken from
https://github.com/hendrycks/robustness"."""


def find_sets(where: str | Path, weights: Weights, *, has_labels: bool) -> dict[str, Path]:
    """Return the data sets in a folder by their places in it. Empty if it is itself one, holds
    fewer than two, or has folders that are not classes of the weights: folders inside class folders
    are not data sets."""
    data = Path(where)
    has_split = sources.holds_split(data, "train") or sources.holds_split(data, "val")
    if sources.find_url(where) is not None or not data.is_dir() or has_split:
        return {}
    if (
        sources.find_source(data).format != sources.FOLDER
        or sources.find_store_folder(data) is not None
    ):
        return {}
    places = []
    with suppress(OSError):  # whoever reads the images says why they cannot be read
        places = _list_sets(data, "", _DEEPEST)
    if len(places) < 2:
        return {}
    names = list_class_folders(data / places[0])
    is_known = not set(names).isdisjoint(weights.classes)
    if not (has_labels or is_known or find_imagenet(names)):
        return {}
    return dict(zip(places, map(data.joinpath, places), strict=True))


def _list_sets(data: Path, place: str, depth: int) -> list[str]:
    """Return the places of folders of class folders: those in which a folder holds a file."""
    folders, _ = sources.list_visible(data / place)
    inner = []
    for name in folders:
        if sources.list_visible(data / place / name)[1]:
            return [place]
        if depth:
            inner += _list_sets(data, f"{place}/{name}".removeprefix("/"), depth - 1)
    return inner


def average_sets(data: str, sets: dict[str, Evaluation]) -> Evaluation:
    """Return the means of the results of data sets, each of which counts the same.

    The interval is the mean of their intervals: it holds even if they are alike. ImageNet-C
    has the same images in every data set.
    """
    results = list(sets.values())
    first = results[0]
    metrics: dict[str, Any] = {}
    for key in first.metrics:
        values: list[Any] = [result.metrics.get(key) for result in results]
        if None not in values:
            metrics[key] = float(np.mean(values))
    images = metrics["images"] = sum(result.images for result in results)
    seconds = sum(result.images / result.speed["images_per_sec"] for result in results)
    low, high = np.mean([result.interval for result in results], axis=0).tolist()
    per_class = _add_counts(sets)
    quarantined = []
    for name, result in sets.items():
        quarantined += [bad | {"file": f"{name}/{bad['file']}"} for bad in result.quarantined]
    return replace(
        first,
        data=data,
        metrics=metrics,
        interval=(low, high),
        classes=first.classes if per_class["images"] else [],
        per_class=per_class,
        class_summary=summarise_classes(per_class)
        | {name: metrics.get(name) for name in ("balanced_accuracy_percent", "macro_f1_percent")},
        class_orders=[],
        published=None,
        quarantined=quarantined,
        trained_images=sum(result.trained_images for result in results),
        speed=first.speed | {"images_per_sec": images / seconds, "latency_ms": None},
        remarks=_join_remarks(sets),
        sets=sets,
        corruption_errors=_compare_corruptions(sets),
    )


def _join_remarks(sets: dict[str, Evaluation]) -> list[str]:
    """Return the remarks on all data sets, then those on single ones with their names."""
    names = defaultdict(list)
    for name, result in sets.items():
        for remark in result.remarks:
            names[remark].append(name)
    remarks = []
    for remark, places in names.items():
        remarks.append(remark if len(places) == len(sets) else f"{', '.join(places)}: {remark}")
    return remarks


def _add_counts(sets: dict[str, Evaluation]) -> ClassCounts:
    """Return the counts of all data sets together; empty if they have other classes."""
    counts: Any = {"images": [], "top1": [], "top5": [], "predicted": []}
    first, *others = sets.values()
    if all(result.classes == first.classes for result in others):
        for key in counts:
            columns = [result.per_class[key] for result in sets.values()]
            counts[key] = np.sum(columns, axis=0).tolist()
    return counts


def group_sets(sets: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return data sets by the folder that holds them, and by their own names in it."""
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, result in sets.items():
        group, _, own = name.rpartition("/")
        groups[group][own] = result
    return dict(groups)


def _compare_corruptions(sets: dict[str, Evaluation]) -> dict[str, float]:
    """Return the mean errors of ImageNet-C's corruptions in percent of AlexNet's, and their mean,
    mCE. Empty unless all 15 are there in all severities with all classes."""
    errors = {}
    for group, members in group_sets(sets).items():
        name = group.rpartition("/")[2]
        is_whole = sorted(members) == _SEVERITIES
        for result in members.values():
            is_whole &= len(result.classes) == _CLASSES and 0 not in result.per_class["images"]
        if name in _ALEXNET_ERRORS and is_whole:
            error = 100 - float(np.mean([result.top1 for result in members.values()]))
            errors[name] = error / _ALEXNET_ERRORS[name]
    if errors.keys() != _ALEXNET_ERRORS.keys():
        return {}
    return errors | {"mean": float(np.mean(list(errors.values())))}
