"""The update of all tensors in one kernel, and the search for overflows in another one.

Both find tensors by tables of their addresses; 0 stands for none. Each program has a block of one
tensor. The update reads gradient, weight and velocity and writes the last two; a moving average is
read and written with them. Each operation is rounded separately, as the protocol's rule is in
float32, so the result is the same to the last bit on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.backends.torch.kernels.batch_norm import OPTIONS

BLOCK = 1024
"""Values of a program."""
LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest float32."""


@dataclass(frozen=True)
class Row:
    """What belongs to one tensor of the state. All are float32 with the same strides, `removed` is
    bool."""

    weight: Tensor
    """A parameter, or a statistic of a batch norm, which has only an average."""
    velocity: Tensor | None = None
    average: Tensor | None = None
    removed: Tensor | None = None
    """True where a mask removes weights."""
    decay: float = 0.0
    factor: float = 1.0
    """Factor of the learning rate."""


@triton.jit
def _find_overflow(gradients, masks, counts, owners, firsts, overflow, SIZE: tl.constexpr):
    """Set `overflow` to 1 if a gradient that is not removed is not finite."""
    owner = tl.load(owners + tl.program_id(0))
    at = tl.load(firsts + tl.program_id(0)) + tl.arange(0, SIZE)
    inside = at < tl.load(counts + owner)
    gradient = tl.load(gradients + owner)
    if gradient != 0:
        g = tl.load(gradient.to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0.0)
        removed = tl.load(masks + owner)
        if removed != 0:
            g = tl.where(
                tl.load(removed.to(tl.pointer_type(tl.int8)) + at, mask=inside, other=0) != 0,
                0.0,
                g,
            )
        # Programs that find one write the same number to the same place.
        tl.store(overflow + at * 0, 1.0, mask=(tl.abs(g) <= LARGEST) == 0)


@triton.jit
def _update(
    gradients,
    weights,
    velocities,
    averages,
    masks,
    counts,
    decays,
    factors,
    owners,
    firsts,
    rates,
    changes,
    number,
    scale,
    overflow,
    momentum,
    NESTEROV: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Move a block of a tensor and of its velocity, unless it overflows; then its average."""
    owner = tl.load(owners + tl.program_id(0))
    at = tl.load(firsts + tl.program_id(0)) + tl.arange(0, SIZE)
    inside = at < tl.load(counts + owner)
    step = tl.load(number)
    weight = tl.load(weights + owner).to(tl.pointer_type(tl.float32)) + at
    w = tl.load(weight, mask=inside, other=0.0)
    gradient = tl.load(gradients + owner)
    if (gradient != 0) & (tl.load(overflow) == 0):
        g = tl.load(gradient.to(tl.pointer_type(tl.float32)) + at, mask=inside, other=0.0)
        g = tl.div_rn(g, tl.load(scale))
        removed = tl.load(masks + owner)
        if removed != 0:
            g = tl.where(
                tl.load(removed.to(tl.pointer_type(tl.int8)) + at, mask=inside, other=0) != 0,
                0.0,
                g,
            )
        g += tl.load(decays + owner) * w
        velocity = tl.load(velocities + owner).to(tl.pointer_type(tl.float32)) + at
        v = momentum * tl.load(velocity, mask=inside, other=0.0) + g
        tl.store(velocity, v, mask=inside)
        if NESTEROV:
            v = g + momentum * v
        w -= tl.load(rates + step) * tl.load(factors + owner) * v
        tl.store(weight, w, mask=inside)
    average = tl.load(averages + owner)
    if average != 0:
        place = average.to(tl.pointer_type(tl.float32)) + at
        a = tl.load(place, mask=inside, other=0.0)
        tl.store(place, a + tl.load(changes + step) * (w - a), mask=inside)


class UpdateKernel:
    """The kernels for the tensors of a run."""

    def __init__(self, rows: Sequence[Row], momentum: float, *, nesterov: bool) -> None:
        """Take the tensors. The first ones must be parameters, in the order in which gradients are
        given."""
        # rows: so that no memory is freed
        self._rows = rows
        self._momentum = momentum
        self._nesterov = nesterov
        device = rows[0].weight.device
        self._tables = []
        for kind in ("weight", "velocity", "average", "removed"):
            addresses = [_address(getattr(row, kind)) for row in rows]
            self._tables.append(torch.tensor(addresses, device=device))
        counts = [row.weight.numel() for row in rows]
        self._counts = torch.tensor(counts, dtype=torch.int32, device=device)
        self._decays = torch.tensor([row.decay for row in rows], dtype=torch.float32, device=device)
        self._factors = torch.tensor(
            [row.factor for row in rows], dtype=torch.float32, device=device
        )
        blocks: list[tuple[int, int]] = []
        for owner, count in enumerate(counts):
            blocks += [(owner, first) for first in range(0, count, BLOCK)]
        self._owners, self._firsts = torch.tensor(
            blocks, dtype=torch.int32, device=device
        ).T.contiguous()
        self._gradients = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self._overflow = torch.zeros((), device=device)
        self._addresses: list[int] = []

    def point_to(self, gradients: Sequence[Tensor], *, is_captured: bool) -> None:
        """Take the gradients of the next step. Autograd gives them the strides of their parameters.

        They must exist until the kernels were called.

        If the step `is_captured`, the device reads their addresses only when the graph is replayed,
        so `upload` does the rest. A copy from the host would be captured, and would read memory
        that the host has used for something else.
        """
        self._addresses = [_address(gradient) for gradient in gradients]
        if not is_captured:
            self.upload()

    def upload(self) -> None:
        """Copy the addresses of gradients to the device."""
        addresses = torch.tensor(self._addresses)
        if self._gradients.is_cuda:
            addresses = addresses.pin_memory()
        self._gradients[: len(self._addresses)].copy_(addresses, non_blocking=True)

    def find_overflow(self) -> Tensor:
        """Return float32 []: 1 if a gradient is not finite, else 0."""
        masks = self._tables[-1]
        find_overflow(
            self._gradients, masks, self._counts, self._owners, self._firsts, self._overflow
        )
        return self._overflow

    def __call__(
        self, scale: Tensor, overflow: Tensor, rates: Tensor, changes: Tensor, number: Tensor
    ) -> None:
        """Take a step, whose gradients are divided by `scale`.

        `scale` and `overflow` are float32 []. `rates` and `changes`, the shares of the way that
        averages go to their tensors, are float32 [steps]. `number`, int64 [1], is that of the step.
        """
        update(
            *(
                self._gradients,
                *self._tables,
                self._counts,
                self._decays,
                self._factors,
                self._owners,
                self._firsts,
            ),
            *(rates, changes, number, scale, overflow, self._momentum, self._nesterov),
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# They are PyTorch's operators so that its profiler names them.
@torch.library.custom_op("lockstep::find_overflow", mutates_args=("overflow",))
def find_overflow(
    gradients: Tensor,
    masks: Tensor,
    counts: Tensor,
    owners: Tensor,
    firsts: Tensor,
    overflow: Tensor,
) -> None:
    """Set `overflow` to 1 if a gradient is not finite, else to 0."""
    overflow.zero_()
    _find_overflow[(len(owners),)](gradients, masks, counts, owners, firsts, overflow, SIZE=BLOCK)


@torch.library.custom_op("lockstep::update", mutates_args=())
def update(
    gradients: Tensor,
    weights: Tensor,
    velocities: Tensor,
    averages: Tensor,
    masks: Tensor,
    counts: Tensor,
    decays: Tensor,
    factors: Tensor,
    owners: Tensor,
    firsts: Tensor,
    rates: Tensor,
    changes: Tensor,
    number: Tensor,
    scale: Tensor,
    overflow: Tensor,
    momentum: float,
    nesterov: bool,
) -> None:
    """Take a step. It changes the tensors that the tables name."""
    _update[(len(owners),)](
        *(gradients, weights, velocities, averages, masks, counts, decays, factors, owners, firsts),
        *(rates, changes, number, scale, overflow, momentum),
        NESTEROV=nesterov,
        SIZE=BLOCK,
        **OPTIONS,
    )
