"""Fused batch norms against float64: PyTorch's own batch norm with autograd, within the bounds of
rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import kernels as part
from lockstep.backends.torch.fused_batch_norm import FusedBatchNorm, fuse
from lockstep.backends.torch.kernels import batch_norm, operators
from lockstep.backends.torch.kernels.batch_norm import Tiling
from lockstep.models.architectures import MODELS
from tests.backends.kernels.bounds import STORAGE, Storage
from tests.backends.kernels.device import DEVICE
from tests.backends.kernels.errors import (
    ADD_RELU,
    EPS,
    PLAIN,
    RELU,
    Case,
    draw_case,
    flatten_rows,
    largest_shares,
)

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


def compute(c: Case, tiling: Tiling = batch_norm.DEFAULT) -> dict[str, Tensor]:
    """Return what the kernels compute, by the names of `largest_shares`."""
    y, statistics = batch_norm.forward(
        c.x, c.residual, c.weight, c.bias, EPS, relu=c.relu, tiling=tiling
    )
    kept = None if c.residual is None else y
    dx, dz, gradients = batch_norm.backward(
        c.dy, c.x, kept, c.weight, c.bias, statistics, relu=c.relu, tiling=tiling
    )
    results = {
        "y": y,
        "mean": statistics[0],
        "rstd": statistics[1],
        "unbiased": statistics[2],
        "dx": dx,
    }
    results |= {"weight_gradient": gradients[0], "bias_gradient": gradients[1]}
    return results if c.residual is None else results | {"dz": dz}


def shares(c: Case, results: dict[str, Tensor]) -> dict[str, float]:
    # Triton's interpreter cuts bits off where a GPU rounds to the nearest bfloat16.
    cut_off = (
        Storage(2.0**-7, STORAGE["bfloat16"].smallest)
        if c.x.dtype == BF16 and DEVICE == "cpu"
        else None
    )
    return largest_shares(c, results, cut_off)


# Every number of channels that ResNet and ResNeXt have, at fewer and odd numbers of rows.
SIZES: list[tuple[tuple[int, ...], str, torch.dtype]] = [
    ((3, 64, 5, 7), RELU, BF16),
    ((1, 64, 9, 8), RELU, FP32),
    ((1, 128, 7, 5), RELU, FP16),
    ((2, 256, 3, 3), ADD_RELU, BF16),
    ((5, 256, 1, 1), PLAIN, BF16),
    ((1, 512, 3, 3), ADD_RELU, FP32),
    ((2, 512, 2, 2), RELU, FP16),
    ((1, 1024, 3, 3), ADD_RELU, FP16),
    ((1, 2048, 2, 2), ADD_RELU, BF16),
    ((7, 70, 3, 5), PLAIN, FP16),
    ((1, 1, 2, 1), RELU, FP32),
    ((2, 3, 1, 1), ADD_RELU, FP32),
]


@pytest.mark.parametrize(("shape", "kind", "dtype"), SIZES, ids=str)
def test_results_are_within_rounding_of_float64(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    # Other tiles for many channels: the interpreter computes what is masked, too, and takes a
    # millisecond for a program.
    c = draw_case(shape, kind, dtype, DEVICE)
    tiling = (
        Tiling() if shape[1] < 128 else Tiling(rows=16, channels=512, sums=2, sums_channels=512)
    )
    assert max(shares(c, compute(c, tiling)).values()) <= 1


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        # 6 tiles for 2 programs, the last tile short.
        ((2, 20, 9, 5), Tiling(rows=16, channels=16, programs=4)),
        # 8 programs, more than are added up at once.
        ((1, 4, 9, 7), Tiling(rows=8, channels=4, sums=4)),
        ((1, 8, 7, 7), Tiling(rows=32, channels=8, programs=1)),
    ],
    ids=["few programs", "many programs", "one program"],
)
def test_results_are_the_same_however_work_is_split(shape: tuple[int, ...], tiling: Tiling) -> None:
    c = draw_case(shape, ADD_RELU, FP32, DEVICE)
    assert max(shares(c, compute(c, tiling)).values()) <= 1


SEVERAL = Tiling(rows=16, channels=16, programs=3)
"""Programs that have several tiles each."""


@pytest.mark.parametrize(
    ("level", "spread", "first"),
    [(1000.0, 0.01, None), (-3.0, 1.0, 1e4), (0.0, 1e-4, None)],
    ids=["mean", "first", "small"],
)
def test_a_large_mean_costs_only_rounding(level: float, spread: float, first: float | None) -> None:
    c = draw_case((2, 8, 8, 9), RELU, FP32, DEVICE)
    c.x.copy_(level + spread * torch.randn(c.x.shape))
    if first is not None:
        c.x[0, :, 0, 0] = first
    results = compute(c, SEVERAL)
    assert max(shares(c, results).values()) <= 1
    # The bound is sharp enough: the mean of squares minus the square of the mean is outside of it.
    x = flatten_rows(c.x).float()
    variance = (x * x).mean(0) - x.mean(0) ** 2
    naive = results | {"unbiased": variance * len(x) / (len(x) - 1)}
    assert level == 0 or first is not None or shares(c, naive)["unbiased"] > 100


def test_equal_values_have_no_variance() -> None:
    c = draw_case((2, 8, 6, 6), RELU, FP32, DEVICE)
    c.x.fill_(0.1)
    results = compute(c, SEVERAL)
    assert not results["unbiased"].any()
    assert torch.equal(results["y"], c.bias.clamp(min=0).view(1, -1, 1, 1).expand_as(results["y"]))
    assert max(shares(c, results).values()) <= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("value", "kind", "dtype"),
    [
        (torch.nan, RELU, BF16),
        (torch.inf, RELU, FP32),
        (torch.nan, ADD_RELU, FP32),
        (-torch.inf, ADD_RELU, BF16),
    ],
    ids=str,
)
def test_not_finite_values_spread_as_without(value: float, kind: str, dtype: torch.dtype) -> None:
    c = draw_case((2, 3, 3, 3), kind, dtype, DEVICE)
    c.x[1, 1, 0, 2] = value
    if c.residual is not None:
        c.residual[0, 2, 1, 1] = value
    results = compute(c)
    x, weight, bias = (t.detach().clone().requires_grad_() for t in (c.x.float(), c.weight, c.bias))
    norm = F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    y = F.relu(norm if c.residual is None else norm + c.residual.float())
    y.backward(c.dy.float())
    assert x.grad is not None
    for actual, plain in (
        (results["y"], y),
        (results["dx"], x.grad),
        (results["weight_gradient"], weight.grad),
    ):
        assert plain is not None
        assert torch.equal(actual.isfinite(), plain.isfinite())
        assert torch.equal(actual.isnan(), plain.isnan())


@pytest.mark.parametrize("kind", [RELU, ADD_RELU])
def test_relu_passes_no_gradient_at_exactly_0(kind: str) -> None:
    c = draw_case((2, 4, 3, 3), kind, BF16, DEVICE)
    c.weight.zero_()
    c.bias.copy_(torch.tensor([0.0, -0.0, 1e-3, -1e-3]))
    if c.residual is not None:
        c.residual.zero_()
    results = compute(c)
    passes = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64, device=DEVICE)
    assert torch.equal(results["y"].amax(dim=(0, 2, 3)) > 0, passes > 0)
    assert torch.equal(results["bias_gradient"] != 0, passes != 0)


def test_a_result_that_is_rounded_to_0_passes_no_gradient() -> None:
    # As in the plain path, whose ReLU sees what batch norm has rounded. 1e-9 is 0 in fp16.
    c = draw_case((2, 2, 3, 3), RELU, FP16, DEVICE)
    c.weight.zero_()
    c.bias.copy_(torch.tensor([1e-9, 1e-3]))
    results = compute(c)
    assert (results["bias_gradient"] != 0).tolist() == [False, True]


# Bytes


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter counts what is read and written")
@pytest.mark.parametrize("kind", [PLAIN, RELU, ADD_RELU])
def test_activations_are_moved_as_documented(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    moved: list[int] = []

    def counting(method: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(self: Any, pointers: Any, *arguments: Any) -> Any:
            # Neither parameters nor sums.
            if pointers.get_element_ty().name == "bf16" and pointers.data.ndim == 2:
                moved.append(int(arguments[place].data.sum()))
            return method(self, pointers, *arguments)

        return call

    monkeypatch.setattr(Builder, "create_masked_load", counting(Builder.create_masked_load, 0))
    monkeypatch.setattr(Builder, "create_masked_store", counting(Builder.create_masked_store, 1))
    c = draw_case((2, 6, 5, 7), kind, BF16, DEVICE)
    kept = compute(c)["y"].numel()
    assert sum(moved) == sum(part.PASSES[kind]) * kept


def test_every_batch_norm_of_a_model_is_measured() -> None:
    counts = part.count_layers(MODELS["resnet50"], 224)
    scales = [t for t in MODELS["resnet50"].list_tensors(1000) if t.role == "bn_scale"]
    assert sum(counts.values()) == len(scales) == 53
    result = sum(count * layer.channels for layer, count in counts.items())
    assert result == sum(t.shape[0] for t in scales)
    # Of the paper's table: 16 blocks end with a sum, 4 have a projection, and layer 4 has 7 x 7
    # pixels.
    kinds = {
        kind: sum(count for layer, count in counts.items() if layer.kind == kind)
        for kind in part.PASSES
    }
    assert kinds == {PLAIN: 4, RELU: 33, ADD_RELU: 16}
    assert counts[part.Layer(ADD_RELU, 2048, 7)] == 3
    assert counts[part.Layer(RELU, 64, 112)] == 1


# The operators and the module


def test_finite_differences_agree_with_the_gradients() -> None:
    c = draw_case((2, 4, 3, 3), ADD_RELU, FP32, DEVICE)
    assert c.residual is not None
    c.residual.add_(3 * c.residual.sign())  # far from where ReLU switches
    inputs = [t.clone().requires_grad_() for t in (c.x, c.residual, c.weight, c.bias)]

    def results(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        y = operators.batch_norm_add_relu(*parts, EPS)[0]
        return (y.double() * c.dy.double()).sum(), y > 0

    value, passes = results(inputs)
    for changed, gradient in enumerate(torch.autograd.grad(value, inputs)):
        direction = torch.randn_like(inputs[changed])
        step = 2e-3
        ends = []
        for sign in (1, -1):
            parts = [
                t.detach() + sign * step * direction if i == changed else t.detach()
                for i, t in enumerate(inputs)
            ]
            value, still = results(parts)
            assert torch.equal(still, passes)  # no ReLU switches
            ends.append(float(value))
        # 72 values of size 5 with a rounding of 3e-7 each make 1e-3 over the step. The gradients
        # are of size 10.
        result = (ends[0] - ends[1]) / (2 * step)
        assert result == pytest.approx(float((gradient * direction).sum()), abs=1e-2)


def plain_and_fused(channels: int) -> tuple[nn.BatchNorm2d, FusedBatchNorm]:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(channels, eps=EPS, momentum=0.3).to(DEVICE)
    nn.init.normal_(plain.weight)
    holder = nn.Sequential(nn.BatchNorm2d(channels, eps=EPS, momentum=0.3)).to(DEVICE)
    holder[0].load_state_dict(plain.state_dict())
    fuse(holder)
    assert isinstance(holder[0], FusedBatchNorm)
    return plain, holder[0]


def test_a_fused_module_has_the_tensors_and_statistics_of_a_plain_one() -> None:
    plain, fused = plain_and_fused(6)
    x = torch.randn(2, 6, 3, 3, device=DEVICE).contiguous(memory_format=torch.channels_last)
    for scale in (1.0, 3.0):
        plain(scale * x)
        fused(scale * x)
    state = fused.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)
    plain.load_state_dict(state)
    assert torch.equal(plain.eval()(x), fused.eval()(x))


def test_images_in_another_layout_are_rearranged() -> None:
    plain, fused = plain_and_fused(6)
    x = torch.randn(2, 6, 3, 4, device=DEVICE)
    results = []
    for norm in (plain, fused):
        image = x.clone().requires_grad_()
        # The gradient of a mean has strides of 0.
        norm(image).mean(dim=(2, 3)).square().sum().backward()
        results.append(image.grad)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_one_value_of_a_channel_has_no_variance_and_is_refused() -> None:
    for norm in plain_and_fused(3):
        with pytest.raises(ValueError, match=r"more than 1 value|several values"):
            norm(torch.ones(1, 3, 1, 1, device=DEVICE))


def test_only_what_the_gradient_needs_is_kept() -> None:
    c = draw_case((2, 8, 4, 4), ADD_RELU, BF16, DEVICE)
    assert c.residual is not None
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        x = c.x.requires_grad_()
        residual = c.residual.requires_grad_()
        y, _ = operators.batch_norm_add_relu(x, residual, c.weight, c.bias, EPS)
        large = {t.data_ptr() for t in kept if t.dim() == 4}
        assert large == {x.data_ptr(), y.data_ptr()}  # y is what the next convolution keeps, too
        kept.clear()
        operators.batch_norm(x, c.weight.requires_grad_(), c.bias, EPS, True)
        assert {t.data_ptr() for t in kept if t.dim() == 4} == {x.data_ptr()}


def test_a_compiler_is_told_the_shapes_and_strides_of_the_results() -> None:
    c = draw_case((2, 6, 3, 5), ADD_RELU, BF16, DEVICE)
    y, statistics = operators.batch_norm(c.x, c.weight, c.bias, EPS, True)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.batch_norm, (c.x, c.weight, c.bias, EPS, True)),
        (operators.batch_norm, (c.x.contiguous(), c.weight, c.bias, EPS, False)),
        (operators.batch_norm_add_relu, (c.x, c.residual, c.weight, c.bias, EPS)),
        (operators.batch_norm_backward, (c.dy, c.x, c.weight, c.bias, statistics, True)),
        (operators.batch_norm_add_relu_backward, (c.dy, c.x, y, c.weight, c.bias, statistics)),
    ]
    for operator, arguments in calls:
        real = operator(*arguments)
        on_paper = operator(*(t.to("meta") if isinstance(t, Tensor) else t for t in arguments))
        for a, b in zip(real, on_paper, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
