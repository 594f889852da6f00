"""ONNX Runtime: on CPUs, and on GPUs through its providers for CUDA and TensorRT. The GPU code
has not been run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.inference.runtimes import (
    Runtime,
    RuntimeSetup,
    check_images,
    count_threads,
    describe_cpu,
    import_package,
)
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.system.files import user_cache
from lockstep.system.machine import gpu

Provider = str | tuple[str, dict[str, str]]
"""A provider of ONNX Runtime, with its options."""
_CPU, _CUDA, _TENSORRT = (f"{name}ExecutionProvider" for name in ("CPU", "CUDA", "Tensorrt"))
_SPIN = "session.intra_op.spin_duration_us", "100"
"""For runtimes that share the cores: how long a thread looks for work in a loop. By default a
server's other threads lose a fifth of the processor's time to it."""
_ERRORS = 3
"""The severity from which ONNX Runtime prints messages."""


class OnnxRuntime(Runtime):
    """A session of ONNX Runtime."""

    name = "onnxruntime"

    def __init__(self, setup: RuntimeSetup) -> None:
        recipe = setup.weights.recipe
        self.precision = recipe.precision
        self._side = recipe.eval_crop
        self.on_gpu = choose_device(setup.execution) == "cuda"
        chosen: Sequence[Provider] = (_CPU,)
        if self.on_gpu:
            available = _import().get_available_providers()
            quantised = bool(setup.weights.scales)
            chosen = choose_providers(self.precision, available, quantised=quantised)
        model, self._weights = setup.build_model_apart(as_inputs=False)
        self._session = open_session(model, self._weights, chosen, shares_cores=setup.shares_cores)
        used = self._session.get_providers()[0]
        if self.on_gpu and used == _CPU:
            raise BackendError(
                "ONNX Runtime cannot use this GPU; it would compute on the CPU; use --set"
                " device=cpu"
            )
        self.device = describe_cpu()
        if self.on_gpu:
            self.device = f"GPU, {used.removesuffix('ExecutionProvider')}"

    def __exit__(self, *error: object) -> None:
        self._session = None
        self._weights = {}

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        [logits] = self._session.run(None, {"images": check_images(images, self._side)})
        return np.asarray(logits, np.float32)


RUNTIME = OnnxRuntime


def open_session(
    model: bytes,
    weights: Mapping[str, np.ndarray] | None = None,
    providers: Sequence[Provider] = (_CPU,),
    *,
    shares_cores: bool = False,
) -> Any:
    """Return a session of ONNX Runtime. Raises `BackendError` if it cannot run the model.

    `weights` are initializers whose data are not in the model. It may share their memory, so they
    must outlive it.
    """
    library = _import()
    options = library.SessionOptions()
    options.intra_op_num_threads = count_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS
    if shares_cores:
        options.add_session_config_entry(*_SPIN)
    if weights:
        values = [library.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
        options.add_external_initializers([*weights], values)
    try:
        return library.InferenceSession(model, options, providers=list(providers))
    except Exception as error:  # its exceptions have no common base
        raise BackendError(
            f"ONNX Runtime cannot run this model: {str(error).splitlines()[0]:.300}"
        ) from error


def choose_device(execution: Execution) -> str:
    """Return "cuda" if the package has CUDA, the machine a GPU, and the execution allows it; else
    "cpu"."""
    if execution.device == "cpu":
        return "cpu"
    has_cuda = _CUDA in _import().get_available_providers()
    if execution.device == "cuda" and not has_cuda:
        raise BackendError(
            "device is cuda, but this onnxruntime has no CUDA; install onnxruntime-gpu in its"
            " place, or use --set device=cpu"
        )
    if execution.device == "cuda" and gpu() is None:
        raise BackendError(
            "device is cuda, but no GPU is found; use --set device=cpu or see `lockstep doctor`"
        )
    return "cuda" if has_cuda and gpu() is not None else "cpu"


def choose_providers(precision: str, available: list[str], *, quantised: bool) -> list[Provider]:
    """Return the providers to use on a GPU, the preferred one first, with their options.

    TensorRT fuses more than CUDA, and has int8. It takes minutes to prepare, so fp32 and tf32 are
    left to CUDA. Without a path, its timings are in the current folder, which can be anyone's.

    >>> choose_providers("tf32", ["CUDAExecutionProvider"], quantised=False)
    [('CUDAExecutionProvider', {'use_tf32': '1'})]
    """
    providers: list[Provider] = [(_CUDA, {"use_tf32": str(int(precision == "tf32"))})]
    if _TENSORRT in available and (precision == "fp16" or quantised):
        timings = {"trt_timing_cache_enable": "True", "trt_timing_cache_path": str(user_cache())}
        providers.insert(0, (_TENSORRT, timings))
    return providers


def _import() -> Any:
    return import_package("onnxruntime", "ONNX Runtime")
