"""Batch norm with ReLU and the sum of a residual block, in training: kernels for activations in
channels_last.

They are seen as [rows, C] with rows = N * H * W, and are float32, bfloat16 or float16. All else is
float32 [C], and sums are float32. Each pass over the activations is one kernel:

    forward    statistics: reads x               apply: reads x (and the residual), writes y
    backward   sums: reads dy and x              gradient: reads dy and x, writes dx
    with a residual:  reads dy, x, y, writes dz            reads dz and x, writes dx

z is the value before ReLU and dz its gradient, which is also that of the residual. ReLU's mask is y
> 0. Without a residual it is computed again from x by the same operations in the same order, so y
is not read.

The result is the same to the last bit each time: tiles of rows are dealt out to a number of
programs that depends on the shape alone, each program writes its sums, and one kernel adds those up
in a fixed order. So there are no atomics, and no block size is chosen by a timing. Neighbouring
programs have the same rows and other channels: together they read whole rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"enable_fp_fusion": False}
"""Products and sums are fused only where `tl.fma` says so. What Triton does by default depends on
its version."""


@dataclass(frozen=True)
class Tiling:
    """How kernels divide their work. Other values give other roundings, so a run must keep them;
    they are not tuned."""

    rows: int = 64
    channels: int = 64
    """Channels of a tile; in bf16 and fp16, 64 are 128 bytes, a whole line of the cache."""
    programs: int = 1024
    """At most this many programs reduce a tensor: about eight for each multiprocessor of an H100,
    which has 132."""
    sums: int = 256
    """The sums of this many programs are added up at once."""
    sums_channels: int = 16
    """For this many channels by one program: the fewer, the more programs share what nothing else
    can overlap."""
    warps: int = 8


@triton.jit
def _count_rows(program, rows, programs, ROWS: tl.constexpr):
    """Return how many rows a program has: of the tiles of ROWS rows it has each `programs`-th, and
    the last may be short."""
    tiles = (rows + ROWS - 1) // ROWS
    missing = tl.where((tiles - 1) % programs == program, tiles * ROWS - rows, 0)
    return ((tiles - program + programs - 1) // programs * ROWS - missing).to(tl.float32)


@triton.jit
def _tile(first, rows, column, exists, channels, ROWS: tl.constexpr):
    """Return the offsets of a tile from row `first` on, and which of them exist. A tensor may have
    over 2^31 values."""
    row = first + tl.arange(0, ROWS)
    return row.to(tl.int64)[:, None] * channels + column[None, :], (row < rows)[:, None] & exists[
        None, :
    ]


@triton.jit
def _normalise(x, mean, rstd, weight, bias):
    """Return (x - mean) / deviation * weight + bias.

    Forward and backward must round alike, so that both find the same sign. An explicit fma leaves
    the compiler no choice.
    """
    return tl.fma(x - mean[None, :], (rstd * weight)[None, :], bias[None, :])


@triton.jit
def _round(z, TYPE: tl.constexpr):
    """Return values as TYPE stores them: a very small one is 0 there. They are float32 again, since
    Triton's interpreter compares bfloat16 as integers."""
    return z.to(TYPE).to(tl.float32)


@triton.jit
def _statistics(
    x,
    partials,
    rows,
    channels,
    blocks,
    programs,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write mean and summed squares of deviations of each program's rows to `partials`, float32 [2,
    programs, C].

    Each lane of the tile has a mean and a sum of squares, by Welford's rule. Values are counted
    from the first row's, which makes a mean that is much larger than the deviation small without
    rounding.
    """
    program = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    exists = column < channels
    shift = tl.load(x + column, mask=exists, other=0.0).to(tl.float32)
    mean = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    squares = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    count = 0.0
    for first in range(program * ROWS, rows, programs * ROWS):
        offsets, there = _tile(first, rows, column, exists, channels, ROWS)
        value = tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - shift[None, :]
        count += 1.0
        change = tl.where(there, value - mean, 0.0)
        mean += change * (1.0 / count)
        squares += change * (value - mean)
    # A lane has each `programs * ROWS`-th row from this one on.
    before = program * ROWS + tl.arange(0, ROWS)
    of_lane = ((rows - before + programs * ROWS - 1) // (programs * ROWS)).to(tl.float32)[:, None]
    centre = tl.sum(mean * of_lane, axis=0) / _count_rows(program, rows, programs, ROWS)
    apart = mean - centre[None, :]
    tl.store(partials + program * channels + column, centre, mask=exists)
    total = tl.sum(squares + of_lane * apart * apart, axis=0)
    tl.store(partials + (programs + program) * channels + column, total, mask=exists)


@triton.jit
def _finish_statistics(
    x,
    partials,
    statistics,
    rows,
    channels,
    programs,
    eps,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write mean, 1 / deviation and unbiased variance of all rows to `statistics`, float32 [3, C],
    by Chan's rule."""
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = column < channels
    weighted = tl.full([PROGRAMS, CHANNELS], 0.0, tl.float32)
    for first in range(0, programs, PROGRAMS):
        offsets, there = _tile(first, programs, column, exists, channels, PROGRAMS)
        count = _count_rows(first + tl.arange(0, PROGRAMS), rows, programs, ROWS)[:, None]
        weighted += tl.where(there, count, 0.0) * tl.load(partials + offsets, mask=there, other=0.0)
    centre = tl.sum(weighted, axis=0) / rows
    squares = tl.full([PROGRAMS, CHANNELS], 0.0, tl.float32)
    for first in range(0, programs, PROGRAMS):
        offsets, there = _tile(first, programs, column, exists, channels, PROGRAMS)
        count = _count_rows(first + tl.arange(0, PROGRAMS), rows, programs, ROWS)[:, None]
        apart = tl.load(partials + offsets, mask=there, other=0.0) - centre[None, :]
        squares += tl.load(partials + programs * channels + offsets, mask=there, other=0.0)
        squares += tl.where(there, count, 0.0) * apart * apart
    total = tl.sum(squares, axis=0)
    shift = tl.load(x + column, mask=exists, other=0.0).to(tl.float32)
    deviation = tl.sqrt_rn(total / rows + eps)
    tl.store(statistics + column, shift + centre, mask=exists)
    tl.store(
        statistics + channels + column,
        tl.div_rn(tl.full([CHANNELS], 1.0, tl.float32), deviation),
        mask=exists,
    )
    tl.store(statistics + 2 * channels + column, total / (rows - 1), mask=exists)


@triton.jit
def _apply(
    x,
    residual,
    weight,
    bias,
    statistics,
    y,
    rows,
    channels,
    blocks,
    ADDS: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write y. Tiles are in reverse order: the last rows that the statistics have read may still be
    in the cache."""
    tile = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    exists = column < channels
    offsets, there = _tile(((rows - 1) // ROWS - tile) * ROWS, rows, column, exists, channels, ROWS)
    mean = tl.load(statistics + column, mask=exists, other=0.0)
    rstd = tl.load(statistics + channels + column, mask=exists, other=0.0)
    scale = tl.load(weight + column, mask=exists, other=0.0)
    offset = tl.load(bias + column, mask=exists, other=0.0)
    z = _normalise(
        tl.load(x + offsets, mask=there, other=0.0).to(tl.float32), mean, rstd, scale, offset
    )
    if ADDS:
        z += tl.load(residual + offsets, mask=there, other=0.0).to(tl.float32)
    if RELU:
        z = tl.where(z <= 0.0, 0.0, z)  # NaN stays NaN
    tl.store(y + offsets, z.to(y.dtype.element_ty), mask=there)


@triton.jit
def _gradient_sums(
    dy,
    x,
    y,
    weight,
    bias,
    statistics,
    dz,
    partials,
    rows,
    channels,
    blocks,
    programs,
    ADDS: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the sums of dz and of dz * (x - mean) over each program's rows to `partials`, and dz if
    ADDS."""
    program = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    exists = column < channels
    mean = tl.load(statistics + column, mask=exists, other=0.0)
    rstd = tl.load(statistics + channels + column, mask=exists, other=0.0)
    scale = tl.load(weight + column, mask=exists, other=0.0)
    offset = tl.load(bias + column, mask=exists, other=0.0)
    plain = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    product = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    for first in range(program * ROWS, rows, programs * ROWS):
        offsets, there = _tile(first, rows, column, exists, channels, ROWS)
        gradient = tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32)
        value = tl.load(x + offsets, mask=there, other=0.0).to(tl.float32)
        if ADDS:
            result = tl.load(y + offsets, mask=there, other=0.0).to(tl.float32)
            gradient = tl.where(result <= 0.0, 0.0, gradient)
            tl.store(dz + offsets, gradient.to(dz.dtype.element_ty), mask=there)
        elif RELU:
            result = _round(_normalise(value, mean, rstd, scale, offset), x.dtype.element_ty)
            gradient = tl.where(result <= 0.0, 0.0, gradient)
        plain += gradient
        product += gradient * (value - mean[None, :])
    tl.store(partials + program * channels + column, tl.sum(plain, axis=0), mask=exists)
    tl.store(
        partials + (programs + program) * channels + column, tl.sum(product, axis=0), mask=exists
    )


@triton.jit
def _finish_gradient_sums(
    partials,
    statistics,
    gradients,
    channels,
    programs,
    PROGRAMS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write the gradients of weight and bias to `gradients`, float32 [2, C]."""
    column = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = column < channels
    plain = tl.full([PROGRAMS, CHANNELS], 0.0, tl.float32)
    product = tl.full([PROGRAMS, CHANNELS], 0.0, tl.float32)
    for first in range(0, programs, PROGRAMS):
        offsets, there = _tile(first, programs, column, exists, channels, PROGRAMS)
        plain += tl.load(partials + offsets, mask=there, other=0.0)
        product += tl.load(partials + programs * channels + offsets, mask=there, other=0.0)
    rstd = tl.load(statistics + channels + column, mask=exists, other=0.0)
    tl.store(gradients + column, tl.sum(product, axis=0) * rstd, mask=exists)
    tl.store(gradients + channels + column, tl.sum(plain, axis=0), mask=exists)


@triton.jit
def _input_gradient(
    dy,
    x,
    weight,
    bias,
    statistics,
    gradients,
    dx,
    rows,
    channels,
    blocks,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write dx = weight / deviation * (dz - mean of dz - xhat * mean of (dz * xhat)), in the order
    of `_apply`."""
    tile = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    exists = column < channels
    offsets, there = _tile(((rows - 1) // ROWS - tile) * ROWS, rows, column, exists, channels, ROWS)
    mean = tl.load(statistics + column, mask=exists, other=0.0)
    rstd = tl.load(statistics + channels + column, mask=exists, other=0.0)
    scale = tl.load(weight + column, mask=exists, other=0.0)
    value = tl.load(x + offsets, mask=there, other=0.0).to(tl.float32)
    gradient = tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32)
    if RELU:
        offset = tl.load(bias + column, mask=exists, other=0.0)
        result = _round(_normalise(value, mean, rstd, scale, offset), x.dtype.element_ty)
        gradient = tl.where(result <= 0.0, 0.0, gradient)
    slope = tl.load(gradients + column, mask=exists, other=0.0) * rstd / rows
    level = tl.load(gradients + channels + column, mask=exists, other=0.0) / rows
    rest = gradient - level[None, :] - (value - mean[None, :]) * slope[None, :]
    tl.store(dx + offsets, (rest * (scale * rstd)[None, :]).to(dx.dtype.element_ty), mask=there)


class Launches:
    """How the kernels cover a tensor [N, C, H, W] in channels_last."""

    def __init__(self, x: Tensor, tiling: Tiling) -> None:
        self.rows = x.numel() // x.shape[1]
        self.channels = x.shape[1]
        all_channels = triton.next_power_of_2(self.channels)
        width = min(tiling.channels, all_channels)
        width_of_sums = min(tiling.sums_channels, all_channels)
        self.blocks = triton.cdiv(self.channels, width)
        self.tiles = triton.cdiv(self.rows, tiling.rows)
        self.programs = min(self.tiles, max(tiling.programs // self.blocks, 1))
        """Number of programs that share the rows, for each block of channels."""
        self.tile = {"ROWS": tiling.rows, "CHANNELS": width, "num_warps": tiling.warps} | OPTIONS
        self.blocks_of_sums = triton.cdiv(self.channels, width_of_sums)
        self.tile_of_sums = {
            "PROGRAMS": tiling.sums,
            "CHANNELS": width_of_sums,
            "num_warps": tiling.warps,
        } | OPTIONS

    def partials(self, x: Tensor) -> Tensor:
        """Return memory for two sums of each program: float32 [2, programs, C]."""
        return x.new_empty((2, self.programs, self.channels), dtype=torch.float32)


DEFAULT = Tiling()


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    relu: bool,
    tiling: Tiling = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Return y, and float32 [3, C]: mean, 1 / deviation (with the biased variance and `eps`),
    unbiased variance.

    `x` and `residual` are [N, C, H, W] in channels_last and of one type, `weight` and `bias`
    float32 [C]. All are on the current device. y = x normalised * weight + bias, plus the residual,
    then ReLU if `relu`, rounded once to the type of x.
    """
    launch = Launches(x, tiling)
    y = torch.empty_like(x)
    partials = launch.partials(x)
    statistics = x.new_empty((3, launch.channels), dtype=torch.float32)
    rows = launch.rows
    channels = launch.channels
    programs = launch.programs
    adds = residual is not None
    _statistics[(programs * launch.blocks,)](
        x, partials, rows, channels, launch.blocks, programs, **launch.tile
    )
    _finish_statistics[(launch.blocks_of_sums,)](
        *(x, partials, statistics, rows, channels, programs, eps),
        ROWS=launch.tile["ROWS"],
        **launch.tile_of_sums,
    )
    _apply[(launch.tiles * launch.blocks,)](
        *(x, residual if adds else x, weight, bias, statistics, y, rows, channels, launch.blocks),
        ADDS=adds,
        RELU=relu,
        **launch.tile,
    )
    return y, statistics


def backward(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    *,
    relu: bool,
    tiling: Tiling = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dz, and float32 [2, C]: the gradients of weight and bias.

    The arguments are those of `forward` and its results. With a residual, `y` is the output and dz
    the residual's gradient; without one, `y` is None and the dz that is returned is `dy` itself.
    """
    launch = Launches(x, tiling)
    dx = torch.empty_like(x)
    partials = launch.partials(x)
    gradients = x.new_empty((2, launch.channels), dtype=torch.float32)
    adds = y is not None
    dz = dy if y is None else torch.empty_like(dy)
    rows = launch.rows
    channels = launch.channels
    programs = launch.programs
    _gradient_sums[(programs * launch.blocks,)](
        *(
            dy,
            x,
            y if adds else x,
            weight,
            bias,
            statistics,
            dz,
            partials,
            rows,
            channels,
            launch.blocks,
            programs,
        ),
        ADDS=adds,
        RELU=relu,
        **launch.tile,
    )
    _finish_gradient_sums[(launch.blocks_of_sums,)](
        partials, statistics, gradients, channels, programs, **launch.tile_of_sums
    )
    _input_gradient[(launch.tiles * launch.blocks,)](
        *(dz, x, weight, bias, statistics, gradients, dx, rows, channels, launch.blocks),
        RELU=relu and not adds,
        **launch.tile,
    )
    return dx, dz, gradients
