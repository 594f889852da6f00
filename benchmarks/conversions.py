"""Convert weights at full size to every format, each with a certificate.

The weights and batch norm statistics of ResNet-50 and ResNeXt101-32x4d are random; Keras' format
gets ResNet-50 v1. PyTorch computes the logits of the source, the target's own framework those of
the target; both at 224 px in fp32. The script records the largest and mean difference as a share of
the largest logit, and the seconds of the whole conversion.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import lockstep
from lockstep.recipes import Recipe
from lockstep.weights import checkpoint
from lockstep.weights.certificate import BOUND
from lockstep.weights.target_formats import TARGETS
from measuring import random_tensors, record

MODELS = ("resnet50", "resnext101-32x4d")
NAMES = {
    "safetensors": "to.safetensors",
    "torchvision": "to.pth",
    "keras": "to.weights.h5",
    "nvidia-pytorch": "to.pth.tar",
}


def row(model: str, to: str) -> dict[str, Any]:
    """Convert a model to a format, and return the figures of its certificate."""
    # NVIDIA's TensorFlow model pads as SAME; other networks get no certificate there.
    recipe = Recipe(
        model=model, precision="fp32", padding="same" if to == "nvidia-tensorflow" else "symmetric"
    )
    with tempfile.TemporaryDirectory(prefix="lockstep-conversions-") as name:
        source = Path(name) / "from.safetensors"
        target = Path(name) / NAMES.get(to, "to")
        checkpoint.write_weights(
            source, random_tensors(recipe), {"recipe": recipe.fields(), "classes": []}
        )
        began = time.perf_counter()
        certificate = lockstep.load(source).save(target, to=to)["certificate"]
        seconds = time.perf_counter() - began
    return {
        "largest difference": float(f"{certificate['largest_difference']:.1e}"),
        "mean difference": float(f"{certificate['mean_difference']:.1e}"),
        "top-1 agreement": certificate["top1_agreement"],
        "equal tensors": f"{certificate['tensors_equal']} of {certificate['tensors']}",
        "computed by": " and ".join(certificate["engines"].values()),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    rows = {}
    for model in MODELS:
        for to in TARGETS:
            if to != "keras" or model == "resnet50":
                named = "resnet50-v1" if to == "keras" else model
                rows[f"{named} to {to}"] = row(named, to)
                print(
                    f"{named} to {to}: {rows[f'{named} to {to}']['largest difference']}", flush=True
                )
    largest = max(row["largest difference"] for row in rows.values())
    what = (
        "certificates of full-size conversions from Lockstep's safetensors, 8 images, 224 px, fp32"
    )
    record(
        "conversions", {"what": what, "bound": BOUND, "largest difference of all": largest, **rows}
    )


if __name__ == "__main__":
    main()
