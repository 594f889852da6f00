"""The kernels of the update: the protocol's rule to the last bit."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.backends.torch.engine import canonical_tensors
from lockstep.backends.torch.kernels.update import Row, UpdateKernel
from lockstep.backends.torch.model import Model
from lockstep.backends.torch.step_graph import WARM_UP, StepGraph
from lockstep.backends.torch.update import Update
from lockstep.recipes import Recipe
from tests.backends.capturer import CudaEvents, TapeCapturer
from tests.backends.kernels.device import NARROW

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda", 0)
Arrays = dict[str, np.ndarray]

# The rule of the protocol (docs/reference/backend-protocol.md, "One step"), in float32, rounded
# after each operation.

SHAPES = [(1,), (5,), (1023,), (1024,), (1025,), (3000,), (6, 4, 3, 3), (10, 7)]
STATISTIC = (33,)
MOMENTUM = 0.9
SCALE = 96.0
RATES = (1.0, 0.25, 0.03)
CHANGES = (0.5, 0.9, 0.0001)
STEP = 2


def draw_inputs(seed: int = 0) -> list[Arrays]:
    """Return what belongs to each parameter, and at last to a statistic."""
    random = np.random.default_rng(seed)
    kinds = [("weight", "gradient", "velocity", "average")] * len(SHAPES) + [("weight", "average")]
    return [
        {kind: random.normal(0, 1, shape).astype(np.float32) for kind in of_one}
        for shape, of_one in zip([*SHAPES, STATISTIC], kinds, strict=True)
    ]


def choose_decay(number: int) -> float:
    return 0.01 * (number % 3)


def choose_factor(number: int) -> float:
    return (1.0, 0.3, 7.0)[number % 3]


def take_steps(
    of_one: Arrays, number: int, *, nesterov: bool, overflow: bool, averages: bool
) -> Arrays:
    w = of_one["weight"]
    changed = dict(of_one)
    if "gradient" in of_one and not overflow:
        g = of_one["gradient"] / np.float32(SCALE)
        if "removed" in of_one:
            g = np.where(of_one["removed"], np.float32(0), g)
        g = g + np.float32(choose_decay(number)) * w
        changed["velocity"] = np.float32(MOMENTUM) * of_one["velocity"] + g
        direction = (
            g + np.float32(MOMENTUM) * changed["velocity"] if nesterov else changed["velocity"]
        )
        rate = np.float32(RATES[STEP]) * np.float32(choose_factor(number))
        changed["weight"] = w - rate * direction
    if averages:
        changed["average"] = of_one["average"] + np.float32(CHANGES[STEP]) * (
            changed["weight"] - of_one["average"]
        )
    return changed


def run_kernel(arrays: list[Arrays]) -> list[dict[str, torch.Tensor]]:
    """Return the arrays as tensors; those with four axes are channels_last."""
    arrays_of_tensors = [
        {kind: torch.tensor(value, device=DEVICE) for kind, value in of_one.items()}
        for of_one in arrays
    ]
    return [
        {
            kind: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
            for kind, t in of_one.items()
        }
        for of_one in arrays_of_tensors
    ]


def make_kernel(
    tensors: list[dict[str, torch.Tensor]], *, nesterov: bool, averages: bool = True
) -> UpdateKernel:
    kinds = ("weight", "velocity", *(["average"] if averages else []), "removed")
    rows = [
        Row(
            **{kind: arrays[kind] for kind in kinds if kind in arrays},
            decay=choose_decay(number),
            factor=choose_factor(number),
        )
        for number, arrays in enumerate(tensors)
    ]
    kernel = UpdateKernel(rows, MOMENTUM, nesterov=nesterov)
    kernel.point_to(
        [arrays["gradient"] for arrays in tensors if "gradient" in arrays], is_captured=False
    )
    return kernel


def mask(arrays: list[Arrays]) -> None:
    """Remove some values of two tensors, with gradients that are not finite."""
    for number in (5, 6):
        removed = np.random.default_rng(number).random(arrays[number]["weight"].shape) < 0.5
        arrays[number]["removed"] = removed
        for kind, value in (("weight", 0), ("velocity", 0), ("average", 0), ("gradient", np.inf)):
            arrays[number][kind][removed] = value


@pytest.mark.parametrize("overflow", [False, True], ids=["", "overflow"])
@pytest.mark.parametrize(
    ("nesterov", "masked", "averages"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_an_update_is_the_rule_to_the_last_bit(
    nesterov: bool, masked: bool, averages: bool, overflow: bool
) -> None:
    arrays = draw_inputs()
    if masked:
        mask(arrays)
    tensors = run_kernel(arrays)
    kernel = make_kernel(tensors, nesterov=nesterov, averages=averages)
    numbers = [
        torch.tensor(value, device=DEVICE)
        for value in (SCALE, float(overflow), RATES, CHANGES, [STEP])
    ]
    kernel(*numbers)
    for number, (before, after) in enumerate(zip(arrays, tensors, strict=True)):
        expected = take_steps(
            before, number, nesterov=nesterov, overflow=overflow, averages=averages
        )
        for kind, value in expected.items():
            assert after[kind].cpu().contiguous().numpy().tobytes() == value.tobytes(), (
                number,
                kind,
            )


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_gradient_that_is_not_finite_is_found(bad: float) -> None:
    for number, place in ((0, 0), (3, 1023), (4, 1024), (7, 69)):
        arrays = draw_inputs()
        arrays[number]["gradient"].reshape(-1)[place] = bad
        tensors = run_kernel(arrays)
        assert make_kernel(tensors, nesterov=False).find_overflow().item() == 1


def test_what_is_finite_or_removed_or_no_gradient_is_no_overflow() -> None:
    arrays = draw_inputs()
    mask(arrays)
    arrays[-1]["weight"][:], arrays[1]["weight"][:], arrays[2]["gradient"][:] = (
        np.nan,
        np.inf,
        -3.4e38,
    )
    tensors = run_kernel(arrays)  # a kernel keeps no gradients
    kernel = make_kernel(tensors, nesterov=False)
    kernel._overflow.fill_(1)
    assert kernel.find_overflow().item() == 0


def test_gradients_of_a_captured_step_are_uploaded_afterwards() -> None:
    tensors = run_kernel(draw_inputs())
    kernel = make_kernel(tensors, nesterov=False)
    before = kernel._gradients.tolist()
    others = [arrays["gradient"].clone() for arrays in tensors if "gradient" in arrays]
    kernel.point_to(others, is_captured=True)
    assert kernel._gradients.tolist() == before
    kernel.upload()
    assert kernel._gradients.tolist() == [*(gradient.data_ptr() for gradient in others), 0]


# The engine's update

RECIPE = NARROW.replace(
    precision="fp16",
    loss_scaling="dynamic",
    loss_scale=64.0,
    loss_scale_growth_steps=2,
    ema_decay=0.9,
    weight_decay=0.01,
)
MASKED = "layer4.0.conv2.weight"


def make_update(recipe: Recipe, *, is_fused: bool) -> tuple[Update, Model]:
    torch.manual_seed(0)
    model = Model(recipe.spec, recipe).to(DEVICE)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = dict(model.named_parameters())
    update = Update(
        recipe,
        parameters,
        canonical_tensors(model),
        np.linspace(0.01, 0.1, 9),
        DEVICE,
        is_fused=is_fused,
    )
    update.mask({MASKED: np.random.default_rng(0).random((8, 8, 3, 3)) < 0.5})
    update.begin(1)
    return update, model


def read_all(update: Update, model: Model) -> dict[str, np.ndarray]:
    kinds = {"tensor": canonical_tensors(model), "velocity": update.velocity, "average": update.ema}
    return {
        f"{kind} {name}": t.detach().cpu().numpy()
        for kind, tensors in kinds.items()
        for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nesterov": True, "ema_decay": 0.0},
        {"loss_scaling": "none", "precision": "bf16", "momentum": 0.0},
    ],
    ids=str,
)
def test_fused_steps_are_plain_steps(changes: dict[str, Any]) -> None:
    recipe = RECIPE.replace(**changes)
    states = []
    scales = []
    for is_fused in (False, True):
        update, model = make_update(recipe, is_fused=is_fused)
        random = torch.Generator().manual_seed(1)
        for step in range(4):
            for name, parameter in model.named_parameters():
                drawn = torch.randn(parameter.shape, generator=random).to(DEVICE)
                parameter.grad = torch.empty_like(parameter).copy_(drawn)
                if step == 2 and name == "fc.bias" and recipe.loss_scaling == "dynamic":
                    parameter.grad[-1] = torch.inf
            update.apply()
        states.append(read_all(update, model))
        scales.append(update.scale.read())
    assert scales[0] == scales[1]
    assert scales[0].get("scale", 64.0) == 64.0  # it grew once and shrank once
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        # PyTorch's SGD may contract products and sums: a few roundings in each of four steps.
        bound = 32 * np.finfo(np.float32).eps * np.abs(value).max()
        np.testing.assert_allclose(states[1][name], value, rtol=0, atol=bound, err_msg=name)


def bytes_after(capturer: Any, columns: Sequence[Tensor]) -> dict[str, bytes]:
    """Return the bytes of all sums and tensors after steps on gradients 2 * scale * column**2 *
    weight."""
    update, model = make_update(RECIPE, is_fused=True)

    def step(columns: Sequence[Tensor]) -> Tensor:
        squares = torch.stack(
            [(parameter * columns[0]).square().sum() for parameter in model.parameters()]
        )
        (squares.sum() * update.scale.value).backward()
        update.apply(is_captured=graph.is_capturing)
        return squares.detach()

    graph = StepGraph(step, capturer, update.finish_capture)
    sums = torch.stack([graph([column]) for column in columns]).cpu().numpy()
    return {
        name: value.tobytes() for name, value in ({"sums": sums} | read_all(update, model)).items()
    }


def test_captured_steps_have_the_bits_of_steps_that_are_not() -> None:
    capturer = TapeCapturer() if DEVICE.type == "cpu" else CudaEvents(DEVICE)
    columns = [
        torch.tensor(value, device=DEVICE) for value in (1.0, 2.0, 0.5, 3.0, torch.inf, 0.25)
    ]
    assert bytes_after(capturer, columns) == bytes_after(None, columns)
    assert capturer.events == ["warm-up"] * WARM_UP + ["capture"] + ["replay"] * 3
