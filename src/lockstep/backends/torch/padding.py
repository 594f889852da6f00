"""TensorFlow's SAME padding."""

from torch import Tensor


def same_padding(x: Tensor, kernel: int, stride: int) -> tuple[int, int, int, int]:
    """Return left, right, top and bottom padding so that a length n becomes ceil(n / stride). An
    odd pixel comes last."""

    def both(length: int) -> tuple[int, int]:
        total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
        return total // 2, total - total // 2

    return both(x.shape[3]) + both(x.shape[2])
