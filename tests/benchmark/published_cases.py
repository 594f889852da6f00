"""A small made-up benchmark report, as `lockstep benchmark train -o` writes it."""

from typing import Any

CELL: dict[str, Any] = {
    "what": "train",
    "backend": "torch",
    "model": "resnet50-v1.5",
    "dtype": "fp16",
    "batch": 208,
    "ranks": 1,
    "data": "synthetic",
    "runtime": "native",
    "status": "ok",
    "reason": None,
    "iterations": 4,
    "epochs": 1,
    "warmup_epochs": 1,
    "times_sec": [0.25, 0.25, 0.5, 1.0],
    "images_per_sec": 721.3,
    "interval": [700.0, 740.0],
    "latency_ms": {
        "mean": 500.0,
        "p50": 250.0,
        "p90": 900.0,
        "p95": 950.0,
        "p99": 990.0,
        "p100": 1000.0,
    },
    "steady": True,
}


def report(*changes: dict[str, Any], gpu: str | None = None) -> dict[str, Any]:
    """Return a report with a cell for each set of changes."""
    environment = {"processor": "AMD EPYC 9R14", "cores": 2, "gpus": [{"gpu": gpu}] if gpu else []}
    cells = [CELL | change for change in changes]
    report = {
        "kind": "lockstep-benchmark",
        "version": 1,
        "command": "c",
        "environment": environment,
        "cells": cells,
    }
    return report | {"settings": {"recipe": "resnet50-mxnet-90ep", "changes": {}}}
