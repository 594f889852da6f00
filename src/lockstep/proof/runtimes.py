"""The part of `proof/check.py` for each target: it opens the model in its own runtime; and the
writer of `check.py`.

Each function takes the folder of the model. Its source is a part of `check.py`, so it imports the
runtime itself.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.proof import command, diagnosis, record
from lockstep.proof.command import Answer, Prepare, load_package, load_preparation, take_photo
from lockstep.proof.record import CannotCheck


def open_onnx(folder: Path) -> tuple[Prepare, Answer]:
    """Open an ONNX model, or that of Triton's repository, in ONNX Runtime."""
    runtime = load_package("onnxruntime")
    path = folder / "model.onnx"
    if not path.is_file():
        path = folder / "1" / "model.onnx"
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return take_photo, lambda photos: session.run(["probabilities"], {name: photos})[0]


def open_openvino(folder: Path) -> tuple[Prepare, Answer]:
    """Open OpenVINO's model, computed in fp32 or int8."""
    core = load_package("openvino").Core()
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    model = core.compile_model(str(folder / "model.xml"), "CPU", options)
    return load_preparation(folder), lambda squares: model([squares])["probabilities"]


def open_savedmodel(folder: Path) -> tuple[Prepare, Answer]:
    """Open a SavedModel with TensorFlow's loader."""
    tensorflow = load_package("tensorflow")
    model = tensorflow.saved_model.load(str(folder))  # its signatures live as long as it

    def answer(photos: np.ndarray) -> Any:
        images = tensorflow.constant(photos)
        return model.signatures["serving_default"](images=images)["probabilities"].numpy()

    return take_photo, answer


def open_frozen_graph(folder: Path) -> tuple[Prepare, Answer]:
    """Open a frozen graph with TensorFlow."""
    tensorflow = load_package("tensorflow").compat.v1
    definition = tensorflow.GraphDef.FromString((folder / "frozen_graph.pb").read_bytes())
    with tensorflow.Graph().as_default() as graph:
        tensorflow.import_graph_def(definition, name="")
    session = tensorflow.Session(graph=graph)
    return take_photo, lambda photos: session.run("probabilities:0", {"images:0": photos})


def open_litert(folder: Path) -> tuple[Prepare, Answer]:
    """Open a program for phones in LiteRT, or in TensorFlow's interpreter."""
    import warnings

    try:
        interpreters = load_package("ai_edge_litert.interpreter")
    except CannotCheck:
        interpreters = load_package("tensorflow").lite
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's interpreter says that it moves
        interpreter = interpreters.Interpreter(model_path=str(folder / "model.tflite"))
    run = interpreter.get_signature_runner()
    return load_preparation(folder), lambda squares: run(images=squares)["probabilities"]


def open_executorch(folder: Path) -> tuple[Prepare, Answer]:
    """Open a program for phones in ExecuTorch."""
    torch = load_package("torch")
    runtime = load_package("executorch.runtime", "executorch torchao").Runtime.get()
    program = runtime.load_program(folder / "model.pte")

    def answer(squares: np.ndarray) -> Any:
        return program.load_method("forward").execute([torch.tensor(squares)])[1].numpy()

    return load_preparation(folder), answer


def open_torch(folder: Path) -> tuple[Prepare, Answer]:
    """Open a program of PyTorch: TorchScript's, or an exported one."""
    torch = load_package("torch")
    script = folder / "model.pt"
    program = torch.jit.load(str(script)) if script.is_file() else None
    program = program or torch.export.load(folder / "model.pt2").module()
    return take_photo, lambda photos: program(torch.tensor(photos))["probabilities"].numpy()


def open_paddle_inference(folder: Path) -> tuple[Prepare, Answer]:
    """Open a program in Paddle Inference."""
    inference = load_package("paddle").inference
    config = inference.Config(str(folder / "model.json"), str(folder / "model.pdiparams"))
    config.disable_glog_info()
    predictor = inference.create_predictor(config)

    def answer(photos: np.ndarray) -> Any:
        predictor.get_input_handle("images").copy_from_cpu(photos)
        predictor.run()
        return predictor.get_output_handle(predictor.get_output_names()[1]).copy_to_cpu()

    return take_photo, answer


def open_stablehlo(folder: Path) -> tuple[Prepare, Answer]:
    """Open the programs of `jax.export`."""
    jax = load_package("jax")
    exported = load_package("jax.export", "jax flatbuffers")
    programs = {}
    for name in ("resize", "model"):
        content = bytearray((folder / f"{name}.stablehlo").read_bytes())
        programs[name] = jax.jit(exported.deserialize(content).call)
    weights = load_package("safetensors.flax", "safetensors").load_file(
        folder / "weights.safetensors"
    )

    def answer(photos: np.ndarray) -> Any:
        return programs["model"](weights, programs["resize"](photos))["probabilities"]

    return take_photo, answer


def open_timm(folder: Path) -> tuple[Prepare, Answer]:
    """Open a folder with timm and its own preprocessing."""
    torch = load_package("torch")
    timm = load_package("timm")
    image = load_package("PIL.Image")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    settings = timm.data.resolve_model_data_config(model, use_test_size=True)  # as its validate.py
    transform = timm.data.create_transform(**settings)
    return (
        lambda pixels: transform(image.fromarray(pixels))[None].numpy(),
        lambda squares: model(torch.tensor(squares)).detach().numpy(),
    )


def open_transformers(folder: Path) -> tuple[Prepare, Answer]:
    """Open a folder with transformers and its own preprocessing."""
    torch = load_package("torch")
    transformers = load_package("transformers")
    image = load_package("PIL.Image")
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)

    def prepare(pixels: np.ndarray) -> np.ndarray:
        squares: np.ndarray = processor(image.fromarray(pixels), return_tensors="np").pixel_values
        return squares

    return prepare, lambda squares: model(torch.tensor(squares)).logits.detach().numpy()


def open_plan(folder: Path) -> tuple[Prepare, Answer]:
    """Refuse to open a target that only `--url` and `--predictor` check."""
    raise CannotCheck(f"{folder} cannot be opened here; use --url or --predictor")


OPENERS: dict[str, Callable[[Path], tuple[Prepare, Answer]]] = {
    "onnx": open_onnx,
    "triton": open_onnx,
    "openvino": open_openvino,
    "savedmodel": open_savedmodel,
    "frozen-graph": open_frozen_graph,
    "litert": open_litert,
    "executorch": open_executorch,
    "torchscript": open_torch,
    "torch-export": open_torch,
    "paddle-inference": open_paddle_inference,
    "stablehlo": open_stablehlo,
    "timm": open_timm,
    "transformers": open_transformers,
}
"""By target. TensorRT has none: use `--url` or `--predictor`."""
_OWN_IMPORT = re.compile(r"^from lockstep\.[^(\n]*(\([^)]*\))?\n", re.MULTILINE)
_HEAD = '''"""Compare a model of the format {target} with proof.json, and name what differs.

    python proof/check.py                                        # the model, on this machine
    python proof/check.py --url http://HOST:8000/v2/models/NAME  # a server
    python proof/check.py --predictor my_app:classify            # your function: path to answer

Exit codes: 0 if all is right, 1 if something differs, 2 if nothing can be compared.
"""

import sys

if sys.version_info < (3, 10):
    sys.exit("check.py needs Python 3.10 or newer")
try:
    import numpy
    import PIL
except ImportError as error:
    print(f"NumPy or Pillow is missing: pip install numpy Pillow ({{error}})")
    sys.exit(2)
'''
_END = """

if __name__ == "__main__":
    sys.exit(main({opener}))
"""


def check_program(target: str) -> str:
    """Return the text of `check.py` for a format."""
    opener = OPENERS.get(target, open_plan)
    parts = [_HEAD.format(target=target)]
    for module in (record, diagnosis, command):
        source = inspect.getsource(module).split('"""', 2)[2]
        parts.append(_OWN_IMPORT.sub("", source).rstrip() + "\n")
    parts += ["\n\n", inspect.getsource(opener), _END.format(opener=opener.__name__)]
    return "".join(parts)
