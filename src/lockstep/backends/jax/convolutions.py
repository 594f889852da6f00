"""Convolutions, in the forms that XLA computes fast on each kind of device.

GPUs and TPUs have kernels for all of them. On CPUs, XLA is slow for three: groups of few channels,
the gradient of a grouped kernel, and convolutions that it passes to the library YNNPACK. The
figures are in benchmarks/notes/engines.md.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = Any
Padding = tuple[tuple[int, int], ...]
PACKED_CHANNELS = 32
"""Groups are put together until a pack of them has this many channels."""
BY_EIGEN = {
    "xla_cpu_experimental_ynn_fusion_type": (
        "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    )
}
"""XLA's option that leaves to YNNPACK what it has by default, except convolutions. Eigen computes
those."""


def convolve(
    x: Array,
    kernel: Array,
    strides: tuple[int, int],
    padding: Sequence[tuple[int, int]],
    groups: int,
    precision: lax.Precision | None = None,
    *,
    on_gpu: bool = False,
) -> Array:
    """Return the convolution of images [N, H, W, C] with a kernel [height, width, C / groups, O],
    padded with zeros before and after both axes.

    On a CPU, groups are computed in packs: a value that is not finite in a group makes those of the
    other groups of its pack NaN.
    """
    geometry = _Geometry(strides, tuple(padding), groups, precision)
    if groups == 1 or on_gpu:
        return _convolve(x, kernel, geometry)
    return _convolve_packs(x, kernel, geometry)


def list_cpu_options() -> dict[str, Any]:
    """Return XLA's options for programs with convolutions on a CPU; none if this version does not
    have them."""
    return keep_known_options(BY_EIGEN)


def keep_known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of XLA's options for a CPU that this version has."""
    return {name: value for name, value in options.items() if _is_known(name, value)}


@cache
def _is_known(name: str, value: Any) -> bool:
    device = jax.local_devices(backend="cpu")[0]
    trial = jax.jit(jnp.negative, compiler_options={name: value})
    try:
        with jax.default_device(device):
            trial.lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class _Geometry(NamedTuple):
    """How a convolution is computed, apart from its arrays."""

    strides: tuple[int, int]
    padding: Padding
    groups: int
    precision: lax.Precision | None
    dilation: tuple[int, int] = (1, 1)


def _convolve(x: Array, kernel: Array, geometry: _Geometry) -> Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        geometry.strides,
        geometry.padding,
        rhs_dilation=geometry.dilation,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=geometry.groups,
        precision=geometry.precision,
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _convolve_packs(x: Array, kernel: Array, geometry: _Geometry) -> Array:
    packs = _count_packs(kernel, geometry.groups)
    return _convolve(x, _widen(kernel, geometry.groups), geometry._replace(groups=packs))


def _keep(x: Array, kernel: Array, geometry: _Geometry) -> tuple[Array, tuple[Array, Array]]:
    return _convolve_packs(x, kernel, geometry), (x, kernel)


def _differentiate(
    geometry: _Geometry, kept: tuple[Array, Array], d_y: Array
) -> tuple[Array, Array]:
    x, kernel = kept
    packs = _count_packs(kernel, geometry.groups)
    in_packs = geometry._replace(groups=packs)
    wide = _widen(kernel, geometry.groups)
    (d_x,) = jax.linear_transpose(lambda x: _convolve(x, wide, in_packs), x)(d_y)

    # The gradient of the kernel is a convolution as well: of images whose batch axis are the
    # channels of a pack, with `d_y` as the kernel, and with the images of all packs as channels.
    images, height, width, channels = x.shape
    size = channels // packs
    by_channel = x.reshape(images, height, width, packs, size).transpose(4, 1, 2, 3, 0)
    pads = []
    for axis, (before, _) in enumerate(geometry.padding):
        reached = kernel.shape[axis] + geometry.strides[axis] * (d_y.shape[1 + axis] - 1)
        pads.append((before, reached - before - x.shape[1 + axis]))
    d_wide = _convolve(
        by_channel.reshape(size, height, width, packs * images),
        d_y.transpose(1, 2, 0, 3),
        _Geometry((1, 1), tuple(pads), packs, geometry.precision, dilation=geometry.strides),
    )
    return d_x, _narrow(d_wide.transpose(1, 2, 0, 3), kernel.shape, geometry.groups)


_convolve_packs.defvjp(_keep, _differentiate)


def _count_packs(kernel: Array, groups: int) -> int:
    """Return the smallest number of packs of a kernel's groups that have at most
    `PACKED_CHANNELS`; a larger group is a pack alone."""
    fitting = [
        packs
        for packs in range(1, groups + 1)
        if groups % packs == 0 and groups // packs * kernel.shape[2] <= PACKED_CHANNELS
    ]
    return min(fitting, default=groups)


def _widen(kernel: Array, groups: int) -> Array:
    """Return the kernel of packs: [height, width, C / packs, O], with 0 between groups."""
    height, width, channels, outputs = kernel.shape
    packs = _count_packs(kernel, groups)
    members = groups // packs
    own = kernel.reshape(height, width, 1, channels, packs, members, outputs // groups)
    wide = jnp.where(_is_own(members), own, 0)
    return wide.reshape(height, width, members * channels, outputs)


def _narrow(wide: Array, shape: tuple[int, ...], groups: int) -> Array:
    """Return what `_widen` put between the zeros, in the shape of a kernel."""
    height, width, channels, outputs = shape
    members = wide.shape[2] // channels
    parts = wide.reshape(
        height, width, members, channels, groups // members, members, outputs // groups
    )
    return jnp.sum(jnp.where(_is_own(members), parts, 0), axis=2).reshape(shape)


def _is_own(members: int) -> Array:
    """Return where input and output are of the same group of a pack, for values [height, width,
    groups of a pack, channels, packs, groups of a pack, outputs]."""
    return jnp.eye(members, dtype=bool)[:, None, None, :, None]
