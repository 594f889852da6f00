"""Runtimes compute logits of images from trained weights. One protocol, one file for each runtime.

"native" is the engine of a backend (`lockstep.backends`). The others run one graph on one
machine: an ONNX model, or a program of Paddle. They need their own packages, and no training
framework.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from lockstep import backends
from lockstep.backends import FRAMEWORKS, Framework, check_installed
from lockstep.inference.engines import load_engine
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError, nearest
from lockstep.system.machine import arithmetic, first_number, share_of_cores
from lockstep.system.text import format_count
from lockstep.weights import Weights

if TYPE_CHECKING:
    from lockstep.inference.runtimes.exported import ExportedModel

NATIVE = "native"
AUTO = "auto"
PROGRAM = "program"
"""The name that stands for an exported program's own runtime."""


class Runtime(Protocol):
    """Computes logits; a context manager. Only one thread at a time may use it."""

    name: str
    precision: str
    """The precision that it computes in, such as "fp32"."""
    device: str
    """Name of the device that it computes on, for people."""
    on_gpu: bool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]; size is the
        recipe's `eval_crop`."""


@dataclass(frozen=True)
class RuntimeSetup:
    """What a runtime is opened for."""

    weights: Weights
    """The precision of their recipe is the one to compute in."""
    execution: Execution
    most_images: int
    """The largest batch to prepare for. Only TensorRT refuses a larger one."""
    exported: "ExportedModel | None" = None
    """The ONNX model to run; None: it is made from the weights."""
    shares_cores: bool = False
    """Whether other threads need the cores between two batches, as in a server. Then a runtime's
    threads wait without computing."""

    def build_model(self) -> bytes:
        """Return an ONNX model from `images`, uint8 [N, S, S, 3], to `logits`, float32."""
        if self.exported is not None:
            return self.exported.model()
        from lockstep.inference import onnx_model

        weights = self.weights
        return onnx_model.logits_model(weights.recipe, weights.tensors, weights.scales)

    def build_model_apart(self, *, as_inputs: bool) -> tuple[bytes, dict[str, np.ndarray]]:
        """Return the same model, and weights by name that are not in it
        (`onnx_model.logits_model_apart`)."""
        if self.exported is not None:
            if as_inputs:
                return self.exported.model(), {}
            return self.exported.skeleton, self.exported.arrays
        from lockstep.inference import onnx_model

        weights = self.weights
        return onnx_model.logits_model_apart(
            weights.recipe, weights.tensors, weights.scales, as_inputs=as_inputs
        )


@dataclass(frozen=True)
class RuntimeRow:
    """One runtime, as far as it can be described without its package."""

    module: str
    """The module of this package. `choose_device(execution)` of it returns "cpu" or "cuda",
    and `RUNTIME` is the class of the runtime, which takes a `RuntimeSetup`."""
    distributions: tuple[str, ...]
    """Distributions of which one must be installed; empty for the native runtime, which needs the
    framework."""
    install: str
    """What to type to install it."""
    precisions: Mapping[str, tuple[str, ...]]
    """The precisions that it computes in, by device. The native runtime's are not listed."""
    extra: str = ""
    """Lockstep's extra that installs it."""
    framework: str = ""
    """The backend whose framework it loads; "" for none."""
    runs_onnx: bool = True
    """Whether it runs ONNX models, and so also those that `lockstep export --to onnx` wrote."""
    quantises: bool = True
    """Whether it computes weights that were trained with quantisation in int8."""

    def version(self) -> str | None:
        """Return the version of its package, without importing it; None if it is missing."""
        return Framework(self.distributions, self.install).version()

    def is_missing(self) -> bool:
        """Return whether its package, or the package onnx that it needs, is not installed."""
        needs_onnx = self.runs_onnx and Framework(("onnx",), "").version() is None
        return needs_onnx or self.version() is None

    def load_function(self, name: str) -> Callable[..., Any]:
        """Return a function of its module. Raises `BackendError` if the package is missing."""
        if self.is_missing():
            raise BackendError(
                f"the runtime {self.name} needs {' or '.join(self.distributions)}: {self.install}"
            )
        function: Callable[..., Any] = getattr(
            importlib.import_module(f"{__name__}.{self.module}"), name
        )
        return function

    @property
    def name(self) -> str:
        """The name of the runtime."""
        return self.module.replace("_", "-")


def _list_rows() -> list[RuntimeRow]:
    """Return the runtimes that are not native."""
    programs = "paddle-inference"
    owner = next(name for name, framework in FRAMEWORKS.items() if programs in framework.exports)
    return [
        RuntimeRow(
            "onnxruntime",
            ("onnxruntime", "onnxruntime-gpu"),
            "pip install onnxruntime==1.31.1 onnx==1.23.2",
            {"cpu": ("fp32",), "cuda": ("fp32", "tf32", "fp16")},
            extra="onnxruntime",
        ),
        RuntimeRow(
            "openvino",
            ("openvino",),
            "pip install openvino==2026.4.1 onnx==1.23.2",
            {"cpu": ("fp32", "bf16")},
            extra="openvino",
            # It merges QuantizeLinear and DequantizeLinear into its own int8, which rounds
            # elsewhere: a third of what quantisation itself changes (2026.4, AVX2).
            quantises=False,
        ),
        RuntimeRow(
            programs.replace("-", "_"),
            FRAMEWORKS[owner].distributions,
            FRAMEWORKS[owner].install,
            {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "fp16")},
            extra=owner,
            framework=owner,
            runs_onnx=False,
            quantises=False,
        ),
        RuntimeRow(
            "tensorrt",
            ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
            "pip install tensorrt==11.4.0.106 cuda-bindings==13.5.0 onnx==1.23.2",
            {"cuda": ("fp32", "tf32", "fp16")},
            extra="tensorrt",
        ),
    ]


RUNTIMES: dict[str, RuntimeRow] = {row.name: row for row in _list_rows()}
"""The runtimes other than the native one, by name. The versions are those that are tested together
(`constraints.txt`)."""


def find_row(name: str) -> RuntimeRow:
    """Return the row of a runtime that is not native. Raises `BackendError` if there is none of
    that name."""
    if name not in RUNTIMES:
        raise BackendError(
            f"there is no runtime {name!r}. {nearest(name, [NATIVE, AUTO, *RUNTIMES])}"
        )
    return RUNTIMES[name]


def list_installed(backend: str) -> list[str]:
    """Return the names of the installed runtimes, first the native one if that framework
    is installed."""
    names = [name for name, row in RUNTIMES.items() if not row.is_missing()]
    if backend in FRAMEWORKS and FRAMEWORKS[backend].version() is not None:
        names.insert(0, NATIVE)
    return names


def check_runtime(name: str, backend: str) -> None:
    """Raise `BackendError` if there is no such runtime or what it needs is missing. Nothing is
    imported."""
    if name == NATIVE:
        check_installed(backend)
    elif name != AUTO:
        find_row(name).load_function("choose_device")


def choose_device(name: str, execution: Execution) -> str:
    """Return the device that a runtime other than the native one uses: "cpu" or "cuda".

    Raises `BackendError` if its package is missing, or the execution asks for a device that it does
    not have.
    """
    return str(find_row(name).load_function("choose_device")(execution))


def start_import(name: str, execution: Execution) -> None:
    """Import the packages of a runtime that runs ONNX models in a thread; for other names, do
    nothing.

    Meanwhile this thread can read weights. Errors are left to `open_runtime`.
    """

    def load() -> None:
        with suppress(Exception):
            choose_device(name, execution)
            importlib.import_module("onnx")

    if name in RUNTIMES and RUNTIMES[name].runs_onnx:
        # Not a daemon: a process must not end while a library is being loaded.
        Thread(target=load, name="lockstep-import", daemon=False).start()


class Native(Runtime):
    """The engine of a backend as a runtime, and the world that it computes in."""

    name = NATIVE

    def __init__(self, setup: RuntimeSetup) -> None:
        self.precision = setup.weights.recipe.precision
        with ExitStack() as stack:
            backend = backends.load(setup.execution.backend)
            world = stack.enter_context(closing(backend.world(setup.execution)))
            engine = load_engine(setup.weights, world, setup.execution)
            self._engine = stack.enter_context(engine)
            self._stack = stack.pop_all()
        self.device = world.device
        self.on_gpu = world.on_gpu

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        return self._engine.predict(images)


def open_runtime(
    name: str,
    weights: Weights,
    execution: Execution | None = None,
    *,
    most_images: int = 32,
    exported: "ExportedModel | None" = None,
    shares_cores: bool = False,
) -> Runtime:
    """Return a runtime that holds the weights, and computes in the precision of their recipe.

    `most_images` is the largest batch to prepare for. `exported` is the ONNX model to run
    instead of the weights. With `shares_cores`, the runtime leaves the cores to other threads
    between two batches.

    Raises `BackendError` if a package is missing, or if the runtime does not have the device, the
    precision or the quantisation.

    >>> from lockstep.weights import open_weights
    >>> with open_runtime("onnxruntime", open_weights("run")) as runtime:
    ...     runtime.predict(np.zeros((2, 32, 32, 3), np.uint8)).shape
    (2, 10)
    """
    execution = execution or Execution()
    setup = RuntimeSetup(weights, execution, most_images, exported, shares_cores)
    if name == NATIVE:
        return Native(setup)
    row = find_row(name)
    device = choose_device(name, execution)
    if why := explain_refusal(name, weights.recipe.precision, device):
        raise BackendError(why)
    if weights.scales and not row.quantises:
        raise BackendError(
            f"the runtime {name} computes in float, and the weights were trained for"
            f" {weights.recipe.quantisation}; use --runtime {NATIVE} or"
            f" {' or '.join(other.name for other in RUNTIMES.values() if other.quantises)}"
        )
    opened: Runtime = row.load_function("RUNTIME")(setup)
    return opened


def explain_refusal(name: str, precision: str, device: str) -> str:
    """Return why a runtime other than the native one cannot compute in a precision on a device; ""
    if it can."""
    where = {"cpu": "a CPU", "cuda": "a GPU"}[device]
    known = find_row(name).precisions.get(device, ())
    if precision not in known:
        return (
            f"the runtime {name} does not compute in {precision} on {where}; use --set"
            f" precision={' or '.join(known)}"
        )
    if device == "cpu" and precision not in arithmetic().precisions:
        return (
            f"{name} computes in {precision} only on processors with {precision} instructions,"
            " which this one lacks; use --set precision=fp32"
        )
    return ""


def import_package(name: str, runtime: str) -> Any:
    """Import a package of a runtime. Raises `BackendError` if it does not load."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # installed, but not for this machine
        raise BackendError(
            f"{runtime} cannot be loaded: {error}; install it again, or use --runtime {NATIVE}"
        ) from error


def count_threads() -> int:
    """Return the number of threads to compute with on a CPU: that of OMP_NUM_THREADS, else this
    process's share of cores."""
    return first_number(os.environ.get("OMP_NUM_THREADS", "")) or share_of_cores()


def check_images(images: np.ndarray, side: int) -> np.ndarray:
    """Return images in one piece of memory. Raises `ValueError` unless they are uint8 [1 or more,
    side, side, 3]."""
    images = np.ascontiguousarray(images)
    if images.dtype != np.uint8 or images.shape[1:] != (side, side, 3) or len(images) == 0:
        raise ValueError(
            f"images are {images.dtype} {images.shape}, expected uint8 (N, {side}, {side}, 3)"
        )
    return images


def describe_cpu() -> str:
    """Return the name of the device of a runtime on a CPU, for people."""
    return f"CPU, {format_count(count_threads(), 'thread')}"
