"""TensorRT on GPUs, from an ONNX model. This has not been run, because no GPU was available.

The network is strongly typed: the types in the ONNX model are those that TensorRT computes in. A model that is quantised has
QuantizeLinear and DequantizeLinear. A timing cache in the user's cache folder makes the next build faster.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from lockstep.inference.engines import Order, checked, package
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.system.files import user_cache, write_bytes
from lockstep.system.machine import gpu


class TensorRT:
    """An engine that TensorRT built on this machine, its context, and its memory on the GPU."""

    name = "tensorrt"
    on_gpu = True

    def __init__(self, order: Order) -> None:
        recipe = order.weights.recipe
        self.precision, self._side, self._most = recipe.precision, recipe.eval_crop, order.most_images
        self.device = "GPU, TensorRT"
        self._library = package("tensorrt", "TensorRT")
        self._cuda = package("cuda.bindings.runtime", "CUDA's package for Python")
        logger = self._library.Logger(self._library.Logger.ERROR)
        plan = _plan(self._library, logger, order)
        self._runtime = self._library.Runtime(logger)  # must outlive the engine
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise BackendError("TensorRT cannot load the engine that it has built; see its messages above")
        self._context = self._engine.create_execution_context()
        [self._output] = [name for name in self._names() if name != "images"]
        self._logits = int(self._engine.get_tensor_shape(self._output)[1])
        self._stream = self._done(self._cuda.cudaStreamCreate())
        self._memory = {
            "images": self._done(self._cuda.cudaMalloc(self._most * self._side * self._side * 3)),
            self._output: self._done(self._cuda.cudaMalloc(self._most * self._logits * 4)),
        }
        for name, address in self._memory.items():
            self._context.set_tensor_address(name, int(address))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for address in self._memory.values():
            self._done(self._cuda.cudaFree(address))
        self._done(self._cuda.cudaStreamDestroy(self._stream))
        self._memory = {}

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]. N is at most the largest batch."""
        images = checked(images, self._side)
        if len(images) > self._most:
            raise ValueError(f"{len(images)} images in a batch, but this engine was built for at most {self._most}")
        kinds, stream = self._cuda.cudaMemcpyKind, self._stream
        logits = np.empty((len(images), self._logits), np.float32)
        self._context.set_input_shape("images", images.shape)
        self._copy(self._memory["images"], images.ctypes.data, images.nbytes, kinds.cudaMemcpyHostToDevice)
        if not self._context.execute_async_v3(int(stream)):
            raise BackendError("TensorRT cannot run a batch; see its messages above")
        self._copy(logits.ctypes.data, self._memory[self._output], logits.nbytes, kinds.cudaMemcpyDeviceToHost)
        self._done(self._cuda.cudaStreamSynchronize(stream))
        return logits

    def _names(self) -> list[str]:
        return [str(self._engine.get_tensor_name(number)) for number in range(self._engine.num_io_tensors)]

    def _copy(self, to: Any, source: Any, size: int, kind: Any) -> None:
        self._done(self._cuda.cudaMemcpyAsync(to, source, size, kind, self._stream))

    def _done(self, answer: tuple[Any, ...]) -> Any:
        """Return what a function of CUDA returned besides its status. Raises `BackendError` if it failed."""
        status, *values = answer
        if int(status):
            raise BackendError(f"CUDA failed: {status}; use a smaller batch, or see whether the GPU is in use")
        return values[0] if values else None


def opened(order: Order) -> TensorRT:
    """Return an engine that holds the weights. Building it takes minutes the first time."""
    return TensorRT(order)


def device(execution: Execution) -> str:
    """Return "cuda". Raises `BackendError` if the execution asks for a CPU, or there is no GPU."""
    if execution.device == "cpu":
        raise BackendError("device is cpu, but TensorRT computes on GPUs; use --engine onnxruntime or openvino")
    if gpu() is None:
        raise BackendError("TensorRT finds no GPU here; use --engine onnxruntime or openvino")
    return "cuda"


def _plan(library: Any, logger: Any, order: Order) -> Any:
    """Build an engine and return it as bytes. Its batches are of 1 to `most_images` images."""
    builder = library.Builder(logger)
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, logger)
    if not parser.parse(order.model()):
        reasons = "; ".join(str(parser.get_error(number)) for number in range(parser.num_errors))
        raise BackendError(f"TensorRT cannot read this model: {reasons:.300}")
    config = builder.create_builder_config()
    if order.weights.recipe.precision != "tf32":
        config.clear_flag(library.BuilderFlag.TF32)  # it is on by default
    side, most = order.weights.recipe.eval_crop, order.most_images
    profile = builder.create_optimization_profile()
    profile.set_shape("images", *((count, side, side, 3) for count in (1, most, most)))
    config.add_optimization_profile(profile)
    file = user_cache() / f"tensorrt-{library.__version__}.timings"
    cache = config.create_timing_cache(_bytes(file))
    config.set_timing_cache(cache, ignore_mismatch=False)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BackendError("TensorRT cannot build an engine of this model; see its messages above")
    with suppress(OSError):  # the next build is slower, and nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, bytes(cache.serialize()), is_flushed=False)
    return plan


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
