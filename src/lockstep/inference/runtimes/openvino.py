"""OpenVINO on CPUs."""

import io
from collections.abc import Mapping
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

_HINTS = {"fp32": "f32", "bf16": "bf16"}
"""OpenVINO's names of precisions. Without a hint it computes in bf16 where the processor can."""


class OpenVino(Runtime):
    """A compiled model of OpenVINO."""

    name = "openvino"
    on_gpu = False

    def __init__(self, setup: RuntimeSetup) -> None:
        recipe = setup.weights.recipe
        self.precision = recipe.precision
        self._side = recipe.eval_crop
        self.device = describe_cpu()
        core = _import().Core()
        options = {
            "INFERENCE_PRECISION_HINT": _HINTS[self.precision],
            "INFERENCE_NUM_THREADS": count_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
        }
        try:
            data, self._weights = setup.build_model_apart(as_inputs=True)
            model = core.read_model(io.BytesIO(data))
            _put_weights(model, self._weights)
            model.reshape([-1, self._side, self._side, 3])
            compiled = core.compile_model(model, "CPU", options)
        except RuntimeError as error:
            raise BackendError(
                f"OpenVINO cannot run this model: {str(error).strip().splitlines()[-1]:.300}"
            ) from error
        self._request = compiled.create_infer_request()

    def __exit__(self, *error: object) -> None:
        self._request = None
        self._weights = {}

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float32 [N, logits], of uint8 images [N, size, size, 3]."""
        outputs = self._request.infer([check_images(images, self._side)])
        return np.array(outputs[0], np.float32)


RUNTIME = OpenVino


def choose_device(execution: Execution) -> str:
    """Return "cpu". Raises `BackendError` if the execution asks for a GPU."""
    if execution.device == "cuda":
        raise BackendError(
            "device is cuda, but OpenVINO computes on CPUs here; use --runtime onnxruntime or"
            " tensorrt"
        )
    return "cpu"


def _put_weights(model: Any, weights: Mapping[str, np.ndarray]) -> None:
    """Replace inputs of a model by constants. These may share the memory of the arrays, which must
    outlive the model."""
    constant = import_package("openvino.op", "OpenVINO").Constant
    for parameter in model.get_parameters():
        name = parameter.get_friendly_name()
        if name in weights:
            value = constant(weights[name], shared_memory=True)
            parameter.output(0).replace(value.output(0))
            model.remove_parameter(parameter)


def _import() -> Any:
    return import_package("openvino", "OpenVINO")
