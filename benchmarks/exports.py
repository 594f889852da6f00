"""Export weights at full size to every format that can be written here, each with its comparison.

The weights and batch norm statistics of ResNet-50 and ResNeXt101-32x4d are random. Each export is a
separate process: it runs the program in its own runtime on eight images of 224 px, and compares it
with a backend in fp32. The script records the largest difference as a share of the largest logit,
and the seconds of the whole export. Images for int8 are drawn.
"""

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from lockstep.data.textures import draw_data_set
from lockstep.inference.runtimes import open_runtime
from lockstep.inference.targets import TARGETS
from lockstep.models.architectures import model_spec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.weights import LOCKSTEP, Weights, certificate, checkpoint
from measuring import random_tensors, record

MODELS = ("resnet50", "resnext101-32x4d")
PRECISIONS = (
    {"savedmodel": ("fp32", "bf16", "fp16")}
    | dict.fromkeys(("onnx", "triton", "openvino"), ("fp32", "fp16", "int8"))
    | dict.fromkeys(("executorch", "litert"), ("fp32", "int8"))
)
"""The precisions of formats that have others than fp32."""


def prepare(model: str, folder: Path) -> Path:
    """Write random weights, and return the path.

    Blocks add little to their inputs, so that activations stay within float16. The largest logit is
    10: probabilities of 0 and 1 would hide differences.
    """
    recipe = Recipe(model=model, precision="fp32")
    tensors = random_tensors(recipe)
    for block in model_spec(model).list_blocks():
        for name in ("weight", "bias"):
            tensors[f"{block.convs[-1].bn_name}.{name}"] *= np.float32(0.2)
    weights = Weights(recipe, State(0, tensors, {}), (), folder, LOCKSTEP)
    with open_runtime("onnxruntime", weights) as runtime:
        largest = float(np.abs(runtime.predict(certificate.draw_images(recipe.eval_crop))).max())
    for name in ("fc.weight", "fc.bias"):
        tensors[name] *= np.float32(10 / largest)
    path = folder / f"{model}.safetensors"
    checkpoint.write_weights(path, tensors, {"recipe": recipe.fields(), "classes": []})
    return path


def row(source: Path, to: str, precision: str) -> dict[str, Any]:
    """Export weights, and return the figures of the comparison."""
    how: dict[str, Any] = {"precision": None if precision == "fp32" else precision}
    with tempfile.TemporaryDirectory(prefix="lockstep-exports-") as name:
        if precision == "int8":
            draw_data_set(Path(name) / "data", train_images=40, val_images=10)
            # What random weights classify right is chance.
            how["precision"] = lockstep.Int8(Path(name) / "data", images=32, tolerance=100.0)
        began = time.perf_counter()
        comparison = lockstep.load(source).export(Path(name) / "to", to=to, **how)["comparison"]
        seconds = time.perf_counter() - began
    return {
        "largest difference": float(f"{comparison['largest_difference']:.1e}"),
        "bound": comparison["bound"],
        "top-1 agreement": comparison["top1_agreement"],
        "runtime": comparison["runtime"],
        "backend": comparison["backend"],
        "seconds": round(seconds, 1),
    }


def main() -> None:
    rows = {}
    # A new process for each export: two frameworks cannot always share one.
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with pool, tempfile.TemporaryDirectory(prefix="lockstep-exports-") as folder:
        for model in MODELS:
            source = pool.submit(prepare, model, Path(folder)).result()
            for to, target in TARGETS.items():
                for precision in PRECISIONS.get(to, ("fp32",)) if target.runtime() else ():
                    name = f"{model} to {to}, {precision}"
                    rows[name] = pool.submit(row, source, to, precision).result()
                    print(
                        f"{name}: {rows[name]['largest difference']} (bound {rows[name]['bound']})",
                        flush=True,
                    )
    record(
        "exports",
        {
            "what": "comparisons of full-size exports with a backend in fp32, 8 images, 224 px",
            **rows,
        },
    )


if __name__ == "__main__":
    main()
