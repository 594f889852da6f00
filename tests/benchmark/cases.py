"""Made-up cells of reports and results of ranks."""

from typing import Any

from lockstep.benchmark.cells import Cell
from lockstep.benchmark.figures import NOTHING

CELL = Cell("train", "torch", "resnet50-v1.5", "fp32", batch=4, ranks=1, compile="auto")

PROCESSORS = {"processors": {"wall_sec": 1.0, "own_sec": 2.0, "busy_sec": 2.0}, "machine_cores": 2}


def timeline(*ends: float, began: float = 0.0, waited: float = 0.0) -> dict[str, Any]:
    return {"began": began, "ends": list(ends), "waited_sec": [waited] * len(ends)}


def rank(counted: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return what a rank measured."""
    result: dict[str, Any] = {
        "device": "CPU",
        "on_gpu": False,
        "warmup": timeline(),
        "counted": counted,
        "compute_only": None,
        "loader_only": None,
        "gemm_gflops": 100.0,
        "copy_gb_per_sec": 10.0,
        "remarks": [],
        "started": -2.0,
        "peak_memory_bytes": None,
    }
    return result | PROCESSORS | changes


def entry(
    rate: float = 10.0, interval: tuple[float, float] | None = None, **changes: Any
) -> dict[str, Any]:
    """Return a cell of a report, with figures."""
    figures = {
        "times_sec": [4 / rate] * 9,
        "images_per_sec": rate,
        "interval": list(interval or (rate * 0.99, rate * 1.01)),
        "latency_ms": dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "p100"), 4000 / rate),
        "data_wait_share": 0.0,
        "compute_only_images_per_sec": rate,
        "bound_by": "computing",
        "steady": True,
        "steady_reason": "",
        "roofline": {"share_of_limit": 0.5},
    }
    about = {"status": "ok", "reason": None, "remarks": []}
    return CELL.fields() | about | NOTHING | figures | changes
