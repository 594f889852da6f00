"""TensorRT on GPUs, from an ONNX model. This has not been run, because no GPU was available.

The network is strongly typed: the types in the ONNX model are those that TensorRT computes in. A
model that is quantised has QuantizeLinear and DequantizeLinear. A timing cache in the user's cache
folder makes the next build faster.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.inference.runtimes import Runtime, RuntimeSetup, check_images, import_package
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.system.files import user_cache, write_bytes
from lockstep.system.machine import gpu
from lockstep.system.regular_files import WEIGHTS, read_regular


class Plan:
    """What TensorRT built, on the GPU of this machine: its context, and memory that grows with the
    batches."""

    def __init__(self, data: bytes) -> None:
        library = _import()
        self._cuda = import_package("cuda.bindings.runtime", "CUDA's package for Python")
        self._runtime = library.Runtime(_make_logger(library))  # must outlive the engine
        engine = self._runtime.deserialize_cuda_engine(data)
        self._engine = engine
        if engine is None:
            raise BackendError(
                "TensorRT cannot load the engine that it has built; see its messages above"
            )
        self._context = engine.create_execution_context()
        names = [str(engine.get_tensor_name(number)) for number in range(engine.num_io_tensors)]
        [self._input] = [
            name for name in names if engine.get_tensor_mode(name) == library.TensorIOMode.INPUT
        ]
        self._outputs = {
            name: library.nptype(engine.get_tensor_dtype(name))
            for name in names
            if name != self._input
        }
        self._stream = self._check(self._cuda.cudaStreamCreate())
        self._memory: dict[str, tuple[Any, int]] = {}

    def close(self) -> None:
        """Free the GPU's memory."""
        for address, _ in self._memory.values():
            self._check(self._cuda.cudaFree(address))
        self._check(self._cuda.cudaStreamDestroy(self._stream))
        self._memory = {}

    def run(self, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the outputs of a batch by name. Raises `BackendError` if it fails, such as for a
        batch of another size."""
        kinds = self._cuda.cudaMemcpyKind
        self._context.set_input_shape(self._input, inputs.shape)
        outputs = {
            name: np.empty(tuple(self._context.get_tensor_shape(name)), kind)
            for name, kind in self._outputs.items()
        }
        for name, array in {self._input: inputs, **outputs}.items():
            self._reserve(name, array.nbytes)
        self._copy(
            self._memory[self._input][0],
            inputs.ctypes.data,
            inputs.nbytes,
            kinds.cudaMemcpyHostToDevice,
        )
        if not self._context.execute_async_v3(int(self._stream)):
            raise BackendError("TensorRT cannot run a batch; see its messages above")
        for name, array in outputs.items():
            self._copy(
                array.ctypes.data, self._memory[name][0], array.nbytes, kinds.cudaMemcpyDeviceToHost
            )
        self._check(self._cuda.cudaStreamSynchronize(self._stream))
        return outputs

    def _reserve(self, name: str, size: int) -> None:
        """Make room for an input or output of this many bytes."""
        address, there = self._memory.get(name, (None, 0))
        if there >= size:
            return
        if address is not None:
            self._check(self._cuda.cudaFree(address))
        self._memory[name] = self._check(self._cuda.cudaMalloc(size)), size
        self._context.set_tensor_address(name, int(self._memory[name][0]))

    def _copy(self, to: Any, source: Any, size: int, kind: Any) -> None:
        self._check(self._cuda.cudaMemcpyAsync(to, source, size, kind, self._stream))

    def _check(self, answer: tuple[Any, ...]) -> Any:
        """Return what a CUDA function returned after its status. Raises `BackendError` if it
        failed."""
        status, *values = answer
        if int(status):
            raise BackendError(
                f"CUDA failed: {status}; use a smaller batch, or see what else uses the GPU"
            )
        return values[0] if values else None


class TensorRT(Runtime):
    """A runtime that runs a plan."""

    name = "tensorrt"
    on_gpu = True

    def __init__(self, setup: RuntimeSetup) -> None:
        recipe = setup.weights.recipe
        self.precision = recipe.precision
        self._side = recipe.eval_crop
        self._most = setup.most_images
        self.device = "GPU, TensorRT"
        shape = (self._side, self._side, 3)
        self._plan = Plan(
            build_plan(setup.build_model(), shape, (1, self._most), tf32=self.precision == "tf32")
        )

    def __exit__(self, *error: object) -> None:
        self._plan.close()

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]. N is at most the
        largest batch."""
        images = check_images(images, self._side)
        if len(images) > self._most:
            raise ValueError(
                f"{len(images)} images in a batch, but this plan was built for at most {self._most}"
            )
        [logits] = self._plan.run(images).values()
        return np.asarray(logits, np.float32)


RUNTIME = TensorRT


def choose_device(execution: Execution) -> str:
    """Return "cuda". Raises `BackendError` if the execution asks for a CPU, or there is no GPU."""
    if execution.device == "cpu":
        raise BackendError(
            "device is cpu, but TensorRT computes on GPUs; use --runtime onnxruntime or openvino"
        )
    if gpu() is None:
        raise BackendError("TensorRT finds no GPU here; use --runtime onnxruntime or openvino")
    return "cuda"


def build_plan(
    model: bytes, shape: tuple[int, ...], batches: tuple[int, int], *, tf32: bool
) -> bytes:
    """Return a plan of an ONNX model whose input is [N, *shape].

    `batches` are the smallest and the largest N; the plan is tuned for the largest. Raises
    `BackendError` if the model cannot be built.
    """
    library = _import()
    logger = _make_logger(library)
    builder = library.Builder(logger)
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, logger)
    if not parser.parse(model):
        reasons = "; ".join(str(parser.get_error(number)) for number in range(parser.num_errors))
        raise BackendError(f"TensorRT cannot read this model: {reasons:.300}")
    config = builder.create_builder_config()
    if not tf32:
        # It is on by default, and rounds the factors of fp32.
        config.clear_flag(library.BuilderFlag.TF32)
    fewest, most = batches
    profile = builder.create_optimization_profile()
    profile.set_shape(network.get_input(0).name, (fewest, *shape), (most, *shape), (most, *shape))
    config.add_optimization_profile(profile)
    file = user_cache() / f"tensorrt-{library.__version__}.timings"
    cache = config.create_timing_cache(_read_timings(file))
    config.set_timing_cache(cache, ignore_mismatch=False)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BackendError("TensorRT cannot build an engine of this model; see its messages above")
    with suppress(OSError):  # the next build is slower, and nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, bytes(cache.serialize()), is_flushed=False)
    return bytes(plan)


def _import() -> Any:
    return import_package("tensorrt", "TensorRT")


def _make_logger(library: Any) -> Any:
    return library.Logger(library.Logger.ERROR)


def _read_timings(file: Path) -> bytes:
    try:
        return read_regular(file, WEIGHTS)
    except OSError:
        return b""
