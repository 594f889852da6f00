"""Exported programs in Paddle Inference: with oneDNN on CPUs, with TensorRT on GPUs.

The code for GPUs has not been run, because no GPU was available.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import paddle
from paddle import inference, static

from lockstep.backends.paddle import framework_import
from lockstep.backends.shared.host_memory import keep_freed_memory
from lockstep.system.errors import BackendError, CheckpointError
from lockstep.system.machine import arithmetic

PRECISIONS = {
    "cpu": {"fp32": inference.PrecisionType.Float32, "bf16": inference.PrecisionType.Bfloat16},
    "cuda": {
        "fp32": inference.PrecisionType.Float32,
        "fp16": inference.PrecisionType.Half,
        "int8": inference.PrecisionType.Int8,
    },
}
"""The precisions of each device, with Paddle's names for them."""


@dataclass(frozen=True)
class Options:
    """How Paddle Inference runs a program. The options of TensorRT apply only to GPUs."""

    device: Literal["cpu", "cuda"] = "cpu"
    precision: str = "fp32"
    """fp32 or bf16 on CPUs; fp32, fp16 or int8 on GPUs. bf16 needs oneDNN and a CPU with bf16
    instructions: Paddle fails on others that have AVX-512, and uses fp32 on those without it."""
    onednn: bool = True
    """Whether a CPU computes with oneDNN. If false, it computes with Paddle's own kernels."""
    max_batch_images: int = 32
    """The largest batch that TensorRT prepares for."""
    workspace_bytes: int = 1 << 30
    """Memory in bytes that TensorRT may use to choose its kernels."""
    min_subgraph: int = 3
    """Minimum number of operations in a TensorRT engine."""
    use_static: bool = False
    """Whether TensorRT's engines are saved in the folder, so that the next predictor can load them.
    """
    use_calib: bool = False
    """Whether int8 is calibrated on the first predicted images."""


def open_predictor(folder: str | Path, options: Options | None = None) -> "Predictor":
    """Open a program that `lockstep export --to paddle-inference` wrote. On a CPU the process then
    keeps freed memory.

    Raises `CheckpointError` if the folder holds no such program, and `BackendError` if Paddle
    cannot run it with these options.
    """
    options = options or Options()
    _check(options)
    program, weights = (Path(folder) / name for name in ("model.json", "model.pdiparams"))
    for path in (program, weights):
        if not path.is_file():
            raise CheckpointError(
                f"there is no {path}; expected a folder that `lockstep export --to"
                " paddle-inference` wrote"
            )
    side = _side(program)
    config = inference.Config(str(program), str(weights))
    config.disable_glog_info()
    # `enable_memory_optim` is not used. With programs in JSON it needs the result of a pass that
    # does not run ("Not find predictor_id 0 and pass_name memory_optimize_pass"), unless
    # `enable_new_executor` is set.
    if options.device == "cuda":
        _configure_gpu(config, options, side)
    else:
        _configure_cpu(config, options)
    return Predictor(config, side)


class Predictor:
    """A program in Paddle Inference. Only one thread at a time may use it."""

    def __init__(self, config: inference.Config, side: int | None) -> None:
        self._side = side
        self._predictor = inference.create_predictor(config)
        self._images = self._predictor.get_input_handle("images")
        self._outputs = [
            self._predictor.get_output_handle(name) for name in self._predictor.get_output_names()
        ]

    def predict(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return classes, int64 [N], and probabilities, float32 [N, logits], of uint8 RGB images
        [N, H, W, 3].

        N is 1 or more. It may differ from call to call, as height and width may, unless the program
        has fixed them. Raises `ValueError` for other shapes or types.
        """
        classes, probabilities = self.outputs(images)
        return classes, probabilities

    def outputs(self, images: np.ndarray) -> list[np.ndarray]:
        """Return all outputs of the program, for images as `predict` takes them."""
        images = np.ascontiguousarray(images)
        is_of_size = self._side is None or images.shape[1:3] == (self._side, self._side)
        if (
            images.dtype != np.uint8
            or images.ndim != 4
            or images.shape[3] != 3
            or not images.size
            or not is_of_size
        ):
            size = "H, W" if self._side is None else f"{self._side}, {self._side}"
            raise ValueError(
                f"images are {images.dtype} {images.shape}, expected uint8 (N, {size}, 3)"
            )
        self._images.copy_from_cpu(images)
        self._predictor.run()
        return [output.copy_to_cpu() for output in self._outputs]


def _check(options: Options) -> None:
    if options.device not in PRECISIONS:
        raise BackendError(f"device is {options.device!r}, expected one of {', '.join(PRECISIONS)}")
    known = PRECISIONS[options.device]
    if options.precision not in known:
        raise BackendError(
            f"precision is {options.precision!r}, expected on {options.device} one of"
            f" {', '.join(known)}"
        )
    if options.precision == "bf16" and not options.onednn:
        raise BackendError("Paddle's own kernels compute in fp32 on a CPU; bf16 needs onednn=True")
    if options.device == "cpu" and options.precision not in arithmetic().precisions:
        raise BackendError(
            "Paddle Inference computes in bf16 only on processors with bf16 instructions, which"
            " this one lacks; use precision='fp32'"
        )
    if options.device == "cuda" and not paddle.is_compiled_with_cuda():
        raise BackendError(
            "device is cuda, but this Paddle has no CUDA; install paddlepaddle-gpu, or use"
            " device='cpu'"
        )


def _side(path: Path) -> int | None:
    """Return the height and width, in pixels, of the images that a program takes; None: any."""
    program = static.Program()
    paddle.base.core.deserialize_pir_program(str(path), program)
    for operation in program.global_block().ops:
        if operation.name() == "pd_op.data":
            side = int(operation.result(0).shape[1])
            return side if side > 0 else None
    raise CheckpointError(
        f"{path} takes no images; expected a program that `lockstep export --to paddle-inference`"
        " wrote"
    )


def _configure_cpu(config: inference.Config, options: Options) -> None:
    keep_freed_memory()
    config.disable_gpu()
    config.set_cpu_math_library_num_threads(framework_import.threads)
    if not options.onednn:
        config.disable_onednn()  # it is on by default
        return
    config.enable_onednn()
    if options.precision == "bf16":
        config.enable_onednn_bfloat16()


def _configure_gpu(config: inference.Config, options: Options, side: int | None) -> None:
    """Make TensorRT compute what it can, or without a `side` Paddle's own kernels.

    This has not been run. According to Paddle 3's manual, programs in JSON must first be converted
    by `paddle.tensorrt.convert`, which Paddle without CUDA does not have.
    """
    config.enable_use_gpu(256)  # initial MB
    if side is None:
        return
    config.enable_tensorrt_engine(
        workspace_size=options.workspace_bytes,
        max_batch_size=options.max_batch_images,
        min_subgraph_size=options.min_subgraph,
        precision_mode=PRECISIONS["cuda"][options.precision],
        use_static=options.use_static,
        use_calib_mode=options.use_calib,
    )
    one, most = ({"images": [count, side, side, 3]} for count in (1, options.max_batch_images))
    config.set_trt_dynamic_shape_info(one, most, most)
