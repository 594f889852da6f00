"""Tests for PyTorch alone: memory, flags and the compiler."""

import ast
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.backends import torch as torch_backend
from lockstep.backends.torch.compiled_step import pays_on_cpu, settle_cache
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import BackendError
from lockstep.system.machine import Arithmetic
from lockstep.verification.bounds import BOUNDS, distance
from tests.backends.cases import BASIC, statistics
from tests.backends.conftest import Start, make_backend_fixture
from tests.backends.drawing import draw_batch, draw_images
from tests.soak import in_a_soak

SOURCE = Path(torch_backend.__file__).parent

backend = make_backend_fixture("torch")


# The step


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", ["bottleneck", "basic"])
def test_gradients_and_velocities_lie_in_memory_as_their_weights_do(
    start: Start, tiny_recipe: Recipe, precision: str, model: str
) -> None:
    # Fused SGD goes through weights, gradients and velocities together, in the order of memory.
    spec = {"block": model, "expansion": 2 if model == "bottleneck" else 1, "groups": 1}
    narrow = tiny_recipe.replace(precision=precision, model=tiny_recipe.fields()["model"] | spec)
    engine: Any = start(narrow)
    lying = {}

    def note(name: str, weight: torch.Tensor) -> None:
        lying[name] = (places(weight), places(weight.grad), places(engine._velocity[name]))

    for name, parameter in engine.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(note, name))
    engine.train([draw_batch(narrow, mixup="sample")], 0)
    assert lying.keys() == engine.read().momentum.keys()
    for name, (weight, gradient, velocity) in lying.items():
        assert weight == gradient == velocity, name


def places(tensor: torch.Tensor | None) -> list[int]:
    """Return the strides of axes longer than one. The others do not matter."""
    assert tensor is not None
    return [
        stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1
    ]


def test_kernels_and_images_are_channels_last(start: Start, tiny_recipe: Recipe) -> None:
    engine: Any = start(tiny_recipe)
    seen: list[bool] = []
    for module in engine.model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(
                lambda conv, inputs, output: seen.extend(map(is_channels_last, (*inputs, output)))
            )
            assert is_channels_last(module.weight)
    engine.train([draw_batch(tiny_recipe, mixup="sample", size=64)], 0)
    assert seen
    assert all(seen)


def is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("precision", "convolution", "norm"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16, torch.float16),
    ],
)
def test_activations_have_the_precision_of_the_recipe(
    start: Start, tiny_recipe: Recipe, precision: str, convolution: torch.dtype, norm: torch.dtype
) -> None:
    engine: Any = start(tiny_recipe.replace(precision=precision))
    seen: dict[type, set[torch.dtype]] = {torch.nn.Conv2d: set(), torch.nn.BatchNorm2d: set()}
    for module in engine.model.modules():
        if type(module) in seen:
            module.register_forward_hook(
                lambda module, _, output: seen[type(module)].add(output.dtype)
            )
    engine.train([draw_batch(tiny_recipe)], 0)
    assert seen == {torch.nn.Conv2d: {convolution}, torch.nn.BatchNorm2d: {norm}}


class _Reading(TorchDispatchMode):
    """Records operations through which the host would read a value or wait for the device."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "equal",
        "is_nonzero",
        "unique",
        "masked_select",
        "item",
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.seen = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        if function.overloadpacket.__name__ in self.WAITING:
            self.calls.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema_decay": 0.9},
        {"precision": "fp16", "loss_scaling": "dynamic"},
        {"quantisation": "int8", "precision": "bf16"},
    ],
    ids=["fp32", "moving average", "dynamic fp16", "int8 and bf16"],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_no_value_is_read_while_training(
    start: Start, tiny_recipe: Recipe, changes: dict[str, Any], parts: int
) -> None:
    engine = start(tiny_recipe.replace(**changes), accumulation_steps=parts)
    with _Reading() as reading:
        engine.train([draw_batch(tiny_recipe, mixup="sample")] * 2, 0)
    assert reading.seen > 100
    assert reading.calls == []


WAITS = {"item", "numpy", "cpu", "tolist", "synchronize", "nonzero"}
MAY_WAIT = {
    "fetch",
    "_evaluate",
    "predict",
    "predict_in_training",
    "answer",
    "heat",
    "products",
    "profile",
    "read",
    "_largest",
    "_read_numbers",
    "_copy_to_numpy",
}
"""`_largest` uses the hosts' own process group, `_copy_to_numpy` and `_read_numbers` are part of
`read`, `_evaluate` of `evaluate`, `profile` ends with its last kernel, and `products` are timed.
`heat` is of `lockstep predict --explain`, `answer` of an export."""
MAY_WAIT |= {"wait", "_upload", "fit", "compute"}
"""`wait` is called before a captured step is forgotten. `compute` is of a
certificate. The others run in the thread of uploads."""


def calls(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names of the calling function and of the called function, for every call."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield inside, node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        yield from calls(node, node.name if isinstance(node, ast.FunctionDef) else inside)


@pytest.mark.parametrize(
    "file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE))
)
def test_only_some_functions_wait_for_the_device(file: Path) -> None:
    all_calls = set(calls(ast.parse(file.read_text(encoding="utf-8"))))
    assert {
        (inside, called)
        for inside, called in all_calls
        if called in WAITS and inside not in MAY_WAIT
    } == set()
    assert {inside for inside, called in all_calls if called == "_copy_to_numpy"} <= {"read"}


def test_the_search_for_waits_finds_them() -> None:
    assert ("step", "item") in set(
        calls(ast.parse("def step(x):\n    if x:\n        y = float(x.mean().item())"))
    )


@in_a_soak  # `test_torch_recompute` compiles a step
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_compiled_step_is_the_same(
    start: Start,
    tiny_recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
) -> None:
    # The compiler's last stage, which makes C++ and takes more than a minute, runs in a soak. The
    # graphs are the same.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    batch = draw_batch(tiny_recipe, mixup="sample")
    losses = []
    states = []
    # With basic blocks, which have two convolutions: the C++ compiler needs a second for every
    # different kernel.
    recipe = tiny_recipe.replace(weight_decay=0.0, model=replace(BASIC, layers=(1, 1, 1, 1)))
    counters.clear()
    for compile in ("off", "on"):
        engine = start(recipe, compile=compile, new=True)
        losses.append(engine.fetch(engine.train([batch], 0)).losses)
        states.append(engine.read())
        engine.evaluate([batch])
        assert bool(counters["stats"]["unique_graphs"]) == (compile == "on")
        with torch.compiler.set_stance("fail_on_recompile"):
            engine.train([draw_batch(tiny_recipe, seed=1, mixup="sample")], 1)
    graphs = counters["stats"]["unique_graphs"]
    larger = [draw_batch(tiny_recipe, mixup="sample", size=size) for size in (48, 64)]
    engine.train(larger, 2)
    assert counters["stats"]["unique_graphs"] == graphs + 2  # none is for all sizes
    with torch.compiler.set_stance("fail_on_recompile"):
        engine.train([batch, *larger], 4)
    torch.compiler.reset()
    assert losses[1] == pytest.approx(losses[0], rel=BOUNDS["loss"].value)
    assert distance(states[1].momentum, states[0].momentum) < BOUNDS["compiled"].value
    assert distance(statistics(states[1]), statistics(states[0])) < BOUNDS["statistics"].value
    assert not counters["graph_break"]


@pytest.mark.parametrize(("compile", "expected"), [("off", False), ("on", True), ("auto", False)])
def test_the_compiler_is_used_when_asked_and_left_alone_on_a_cpu(
    tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, compile: Any, expected: bool
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda module, **how: compiled.append(module) or module)
    execution = Execution(device="cpu", compile=compile)
    torch_backend.engine(tiny_recipe, np.zeros(1), torch_backend.world(execution), execution)
    assert bool(compiled) == expected


RESNET50 = Recipe(precision="fp32", global_batch_images=32)
AVX2 = Arithmetic(("AVX2",), ("fp32",), "fp32")
AVX_512 = Arithmetic(("AVX2", "AVX-512"), ("fp32",), "fp32")


def pays(
    recipe: Recipe = RESNET50,
    steps: int = 10_000,
    ranks: int = 1,
    arithmetic: Arithmetic = AVX2,
    cxx: str = "true",
) -> bool:
    return pays_on_cpu(
        recipe, steps, ranks=ranks, cores=2, arithmetic=arithmetic, environment={"CXX": cxx}
    )


def test_a_long_epoch_in_fp32_is_compiled_on_a_processor_with_avx2_alone() -> None:
    assert pays()
    assert not pays(arithmetic=AVX_512)
    assert not pays(arithmetic=Arithmetic(("NEON",), ("fp32",), "fp32"))


def test_what_compiling_was_not_measured_to_help_is_not_compiled() -> None:
    assert not pays(RESNET50.replace(precision="bf16"))
    assert not pays(ranks=2)


def test_without_a_compiler_for_cpp_nothing_is_compiled() -> None:
    assert not pays(cxx="no-such-compiler")


def test_an_epoch_must_make_up_for_the_time_it_takes_to_compile() -> None:
    # 3.8 images/s before and 4.3 after compiling, on two cores: of the 120 s to compile, an image
    # saves 1 / 3.8 - 1 / 4.3 s.
    enough = 120 / (1 / 3.8 - 1 / 4.3) / 32
    assert not pays(steps=int(0.9 * enough))
    assert pays(steps=int(1.1 * enough))


def test_small_images_take_a_longer_epoch_to_make_up_for_compiling() -> None:
    assert not pays(RESNET50.replace(image_size=64), steps=1000)
    assert pays(steps=1000)


def test_the_engine_compiles_where_that_pays_for_an_epoch_however_many_there_are(
    tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda module, **how: compiled.append(module) or module)
    engine = sys.modules["lockstep.backends.torch.engine"]
    monkeypatch.setattr(engine, "pays_on_cpu", lambda recipe, steps, **how: steps > 7)
    execution = Execution(device="cpu")
    for epochs in (1, 3):
        recipe = tiny_recipe.replace(epochs=epochs, warmup_epochs=0)
        for steps in (7, 8):
            compiled.clear()
            torch_backend.engine(
                recipe, np.zeros(epochs * steps), torch_backend.world(execution), execution
            )
            assert len(compiled) == steps - 7


def test_compiled_code_is_only_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(variable, str(tmp_path / "chosen"))
    settle_cache()
    assert cache_dir() == str(tmp_path / "chosen")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(variable)
    planted = tmp_path / f"lockstep-torchinductor-{os.geteuid()}"
    planted.symlink_to(tmp_path / "chosen")
    with pytest.raises(BackendError, match=f"cannot keep compiled code: .* Set {variable}"):
        settle_cache()
    planted.unlink()
    planted.mkdir(mode=0o777)
    settle_cache()
    assert cache_dir() == str(planted)
    assert planted.stat().st_mode & 0o777 == 0o700


def test_buckets_have_the_asked_size(tiny_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {}

    def wrap(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        arguments.update(options)
        return module

    monkeypatch.setattr(
        sys.modules["lockstep.backends.torch.engine"], "DistributedDataParallel", wrap
    )
    execution = Execution(device="cpu", compile="off", all_reduce_mb=7)
    world = torch_backend.world(execution)
    world.ranks = 2
    torch_backend.engine(tiny_recipe, np.zeros(1), world, execution)
    assert arguments["bucket_cap_mb"] == 7  # of 2**20 bytes


@pytest.mark.parametrize(("layout", "expected"), [("auto", True), ("nhwc", True), ("nchw", False)])
def test_all_activations_have_the_layout_that_is_asked_for(
    start: Start, tiny_recipe: Recipe, layout: str, expected: bool
) -> None:
    engine: Any = start(tiny_recipe, layout=layout)
    seen: list[tuple[bool, bool]] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        for tensor in (inputs[0], output, module.weight):
            # Otherwise both layouts are the same.
            if min(tensor.shape[1], max(tensor.shape[2:])) > 1:
                last = tensor.is_contiguous(memory_format=torch.channels_last)
                seen.append((last, tensor.is_contiguous()))

    for module in engine.model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    engine.fetch(engine.train([draw_batch(tiny_recipe)], 0))
    engine.predict(draw_images(2))
    assert set(seen) == {(expected, not expected)}


def test_both_layouts_compute_the_same(start: Start, tiny_recipe: Recipe) -> None:
    batches = [draw_batch(tiny_recipe, seed=seed) for seed in range(2)]
    losses = {}
    for layout in ("nhwc", "nchw"):
        engine = start(tiny_recipe, layout=layout)
        losses[layout] = engine.fetch(engine.train(batches, 0)).losses
    np.testing.assert_allclose(losses["nchw"], losses["nhwc"], rtol=1e-5)


@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_are_chosen_if_they_may_differ(tiny_recipe: Recipe, deterministic: bool) -> None:
    execution = Execution(device="cpu", compile="off", deterministic=deterministic)
    torch_backend.engine(tiny_recipe, np.zeros(1), torch_backend.world(execution), execution)
    assert torch.backends.cudnn.deterministic == deterministic
    assert torch.backends.cudnn.benchmark != deterministic
