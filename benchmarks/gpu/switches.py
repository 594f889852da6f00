"""PyTorch's switches of a process that change which kernels run. Contenders in one process set
theirs before each turn."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Switches:
    """Values of the switches."""

    deterministic: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    cudnn_tf32: bool
    matmul_tf32: bool

    @classmethod
    def now(cls) -> "Switches":
        """Return the values that are set, such as those that an engine has just set."""
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cuda.matmul.allow_tf32,
        )

    @classmethod
    def of_a_careful_user(cls, precision: str) -> "Switches":
        """Return the fastest values. TensorFloat-32 is off where fp32 is measured, and irrelevant
        in bf16 and fp16."""
        return cls(False, False, True, precision != "fp32", precision != "fp32")

    def set(self) -> None:
        """Set these values."""
        torch.use_deterministic_algorithms(self.deterministic, warn_only=True)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
