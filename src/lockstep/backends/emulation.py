"""Which precisions an engine emulates on a processor, and how much slower that is."""

from dataclasses import dataclass

from lockstep.backends.frameworks import FRAMEWORKS
from lockstep.system import machine
from lockstep.system.machine import Arithmetic


@dataclass(frozen=True)
class Emulation:
    """A precision that an engine computes by means of others on this processor."""

    precision: str
    slower: str
    """How much slower than fp32 it was measured to be, such as "7 to 16 times"."""
    instead: str
    """The precision to use instead."""

    def __str__(self) -> str:
        return f"{self.precision} is emulated on this processor, {self.slower} slower than fp32"


def find_emulation(
    precision: str, *, on_gpu: bool, backend: str, processor: Arithmetic | None = None
) -> Emulation | None:
    """Return what an engine emulates when it computes in a precision; None where hardware
    multiplies it.

    `processor` is the arithmetic of a processor; by default, of this one.
    """
    if on_gpu or precision not in ("bf16", "fp16"):
        return None
    processor = processor or machine.arithmetic()
    row = FRAMEWORKS[backend]
    if precision in processor.precisions and precision not in row.always_emulates:
        return None
    slower = row.slower.get(precision)
    if "AVX-512" in processor.extensions:
        slower = row.slower_with_avx_512.get(precision, slower)
    return None if slower is None else Emulation(precision, slower, processor.pays)
