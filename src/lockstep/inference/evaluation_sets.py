"""A folder of data sets, such as ImageNet-C's 75 or the three of ImageNet-V2: one result with the
means."""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.class_folders import list_class_folders
from lockstep.data.sources import (
    FOLDER,
    find_source,
    find_store_folder,
    find_url,
    holds_split,
    is_file,
    is_folder,
)
from lockstep.inference.evaluation_result import Evaluation
from lockstep.models.class_metrics import ClassCounts, summarise_classes
from lockstep.weights import Weights
from lockstep.weights.class_names import find_imagenet

_DEEPEST = 3
"""Data sets are looked for in folders within this many folders: GROUP/CORRUPTION/SEVERITY."""
_SEVERITIES = ("1", "2", "3", "4", "5")
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
    are no data sets."""
    data = Path(where)
    has_split = holds_split(data, "train") or holds_split(data, "val")
    if find_url(where) is not None or not data.is_dir() or has_split:
        return {}
    if find_source(data).format != FOLDER or find_store_folder(data) is not None:
        return {}
    sets = _list_sets(data, _DEEPEST)
    if len(sets) < 2 or data in sets:
        return {}
    names = list_class_folders(sets[0])
    is_known = not set(names).isdisjoint(weights.classes)
    if not (has_labels or is_known or find_imagenet(names)):
        return {}
    return {path.relative_to(data).as_posix(): path for path in sets}


def _list_sets(folder: Path, depth: int) -> list[Path]:
    """Return the folders of class folders: those in which a folder holds a file."""
    folders = _list_folders(folder)
    if any(map(_holds_file, folders)):
        return [folder]
    sets = []
    for part in folders if depth else []:
        sets += _list_sets(part, depth - 1)
    return sets


def _list_folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name[0] != "." and is_folder(entry)]
    return [folder / name for name in sorted(names, key=os.fsencode)]


def _holds_file(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name[0] != "." and is_file(entry) for entry in entries)


def average_sets(data: str, sets: dict[str, Evaluation]) -> Evaluation:
    """Return the means of the results of data sets, each of which counts the same.

    The interval is the mean of their intervals: it holds however much they are alike. ImageNet-C
    has the same images in every data set.
    """
    results = list(sets.values())
    first = results[0]
    metrics: dict[str, Any] = {}
    for key in first.metrics:
        if all(key in result.metrics for result in results):
            metrics[key] = _average([result.metrics[key] for result in results])
    metrics["images"] = sum(result.images for result in results)
    per_class = _add_counts(results)
    seconds = sum(result.images / result.speed["images_per_sec"] for result in results)
    return Evaluation(
        source=first.source,
        data=data,
        runtime=first.runtime,
        precision=first.precision,
        metrics=metrics,
        interval=(
            _average([result.interval[0] for result in results]),
            _average([result.interval[1] for result in results]),
        ),
        classes=first.classes if per_class["images"] else [],
        per_class=per_class,
        class_summary=summarise_classes(per_class),
        class_orders=[],
        published=None,
        quarantined=[bad for result in results for bad in result.quarantined],
        speed=first.speed | {"images_per_sec": metrics["images"] / seconds, "latency_ms": None},
        remarks=_join_remarks(sets),
        sets=sets,
        corruption_errors=_compare_corruptions(sets),
    )


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


def _join_remarks(sets: dict[str, Evaluation]) -> list[str]:
    """Return the remarks on all data sets, then those on single ones with their names."""
    shared = []
    single = []
    for name, result in sets.items():
        for remark in result.remarks:
            if any(remark not in other.remarks for other in sets.values()):
                single.append(f"{name}: {remark}")
            elif remark not in shared:
                shared.append(remark)
    return shared + single


def _add_counts(results: list[Evaluation]) -> ClassCounts:
    """Return the counts of all data sets together; empty if they have other classes."""
    counts: ClassCounts = {"images": [], "top1": [], "top5": [], "predicted": []}
    if any(result.classes != results[0].classes for result in results):
        return counts
    for key in counts:
        columns = np.array([result.per_class[key] for result in results])
        counts[key] = columns.sum(axis=0).tolist()  # type: ignore[literal-required]
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
        is_whole = all(len(result.classes) == _CLASSES for result in members.values())
        is_whole &= all(0 not in result.per_class["images"] for result in members.values())
        if name in _ALEXNET_ERRORS and tuple(sorted(members)) == _SEVERITIES and is_whole:
            mean = _average([100 - members[severity].top1 for severity in _SEVERITIES])
            errors[name] = mean / _ALEXNET_ERRORS[name]
    if errors.keys() != _ALEXNET_ERRORS.keys():
        return {}
    return errors | {"mean": _average(list(errors.values()))}
