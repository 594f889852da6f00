"""`model.plan`: an engine that TensorRT builds for this machine's GPU. This has not been run, because no GPU was available.

The network is strongly typed: TensorRT computes in the types of the ONNX model. A plan runs only on the kind of GPU and with
the version of TensorRT that built it.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.inference.targets import TARGETS, Answers, Wanted
from lockstep.inference.targets.onnx_file import write_classes
from lockstep.system.errors import BackendError

FILE = "model.plan"
MOST_IMAGES = 32
"""The largest batch if batches are of any size."""


def write(wanted: Wanted, folder: Path) -> None:
    """Write `model.plan` and `classes.txt`. Batches are of `batch` images, or of 1 to `MOST_IMAGES`."""
    library = _package("tensorrt")
    logger = library.Logger(library.Logger.ERROR)
    builder = library.Builder(logger)
    network = builder.create_network(1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = library.OnnxParser(network, logger)
    model = wanted.onnx_model()
    if not parser.parse(model.SerializeToString()):
        reasons = "; ".join(str(parser.get_error(number)) for number in range(parser.num_errors))
        raise BackendError(f"TensorRT cannot read the ONNX model: {reasons:.300}")
    config = builder.create_builder_config()
    config.clear_flag(library.BuilderFlag.TF32)  # it is on by default, and rounds the factors of fp32
    profile, side = builder.create_optimization_profile(), wanted.weights.recipe.eval_crop
    shape = (3, side, side) if wanted.bare else (side, side, 3)
    fewest, most = (1, MOST_IMAGES) if wanted.batch is None else (wanted.batch, wanted.batch)
    profile.set_shape(model.graph.input[0].name, (fewest, *shape), (most, *shape), (most, *shape))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BackendError("TensorRT cannot build an engine of the ONNX model; see its messages above")
    folder.mkdir()
    (folder / FILE).write_bytes(bytes(plan))
    write_classes(wanted.weights.classes, folder / "classes.txt")


def answers(wanted: Wanted, folder: Path, images: np.ndarray) -> Answers:
    """Return what TensorRT answers for uint8 images [N, S, S, 3]."""
    library, cuda = _package("tensorrt"), _package("cuda.bindings.runtime")
    runtime = library.Runtime(library.Logger(library.Logger.ERROR))  # must outlive the engine
    engine = runtime.deserialize_cuda_engine((folder / FILE).read_bytes())
    if engine is None:
        raise BackendError("TensorRT cannot load the engine that it has built; see its messages above")

    def run(inputs: np.ndarray) -> Answers:
        found = _computed(library, cuda, engine, inputs)
        values = found["logits" if wanted.bare else "probabilities"]
        return found.get("classes", values.argmax(axis=1)), values

    return wanted.in_batches(images, run)


def _computed(library: Any, cuda: Any, engine: Any, inputs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of an engine by name."""
    context, kinds = engine.create_execution_context(), cuda.cudaMemcpyKind
    names = [str(engine.get_tensor_name(number)) for number in range(engine.num_io_tensors)]
    [taken] = [name for name in names if engine.get_tensor_mode(name) == library.TensorIOMode.INPUT]
    context.set_input_shape(taken, inputs.shape)
    arrays = {
        name: inputs
        if name == taken
        else np.empty(context.get_tensor_shape(name), library.nptype(engine.get_tensor_dtype(name)))
        for name in names
    }
    places = {name: _done(cuda.cudaMalloc(array.nbytes)) for name, array in arrays.items()}
    stream = _done(cuda.cudaStreamCreate())
    try:
        _done(cuda.cudaMemcpy(places[taken], inputs.ctypes.data, inputs.nbytes, kinds.cudaMemcpyHostToDevice))
        for name, place in places.items():
            context.set_tensor_address(name, int(place))
        if not context.execute_async_v3(int(stream)):
            raise BackendError("TensorRT cannot run a batch; see its messages above")
        _done(cuda.cudaStreamSynchronize(stream))
        for name in names:
            if name != taken:
                array = arrays[name]
                _done(cuda.cudaMemcpy(array.ctypes.data, places[name], array.nbytes, kinds.cudaMemcpyDeviceToHost))
    finally:
        for place in places.values():
            cuda.cudaFree(place)
        cuda.cudaStreamDestroy(stream)
    return arrays


def _done(answer: tuple[Any, ...]) -> Any:
    """Return what a function of CUDA returned besides its status. Raises `BackendError` if it failed."""
    status, *values = answer
    if int(status):
        raise BackendError(f"CUDA failed: {status}; see whether the GPU is in use, or use --no-compare")
    return values[0] if values else None


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BackendError(f"exporting to TensorRT needs tensorrt: {TARGETS['tensorrt'].install} ({error})") from None
