"""The rate that a machine cannot exceed."""

from lockstep.models.operations import Work


def limit_images_per_sec(work: Work, gemm_gflops: float, copy_gb_per_sec: float) -> float:
    """Return the largest rate, in images per second, that matrix products and memory allow.

    >>> limit_images_per_sec(Work(flops=2e9, bytes=1e8), gemm_gflops=100, copy_gb_per_sec=10)
    50.0
    """
    return 1 / max(work.flops / (gemm_gflops * 1e9), work.bytes / (copy_gb_per_sec * 1e9))
