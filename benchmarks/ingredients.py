"""Train a small ResNet on small images, each time with one ingredient of the published recipes, to
see what it gives there over the same run without it. The results: benchmarks/notes/ingredients.md.

    python benchmarks/ingredients.py --data DIR --runs RUNS

All runs have the same number of epochs. A difference is between two runs of the same seed, which
see the same images in the same order. Its 95 % interval is Student's, over the seeds; it does not
cover the choice of images. The same command goes on where it was stopped: finished runs in RUNS are
kept, and a run that was stopped resumes.
"""

import os
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import lockstep
from lockstep.models.architectures import ModelSpec
from measuring import make_parser, record

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t of a two-sided interval of 95 %, by the number of seeds."""
MODEL = ModelSpec(
    block="basic", layers=(2, 2, 2, 2), stem_width=16, widths=(16, 32, 64, 128), expansion=1
)
"""A ResNet-18 of a quarter of the width."""
BASE: dict[str, Any] = {
    "model": MODEL,
    "zero_init_last_bn": True,
    "global_batch_images": 64,
    "lr": 0.1,
    "lr_scaling": "none",
    "warmup_epochs": 2.0,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "label_smoothing": 0.0,
    "precision": "fp32",
    "crop_area": (0.35, 1.0),
}
"""Fields of all runs: SGD, a cosine, crops and flips."""
RAND_AUGMENT = {"name": "randaugment", "dialect": "timm", "magnitude": 7, "magnitude_std": 0.5}
LAMB = {
    "optimizer": "lamb",
    "lr": 0.01,
    "weight_decay": 0.02,
    "weight_decay_roles": ["conv_weight", "fc_weight"],
    "optimizer_epsilon": 1e-6,
    "clip_norm": 1.0,
}
INGREDIENTS: dict[str, dict[str, Any]] = {
    "base": {},
    "label smoothing": {"label_smoothing": 0.1},
    "RandAugment": {"augmentations": [RAND_AUGMENT | {"increasing": True}]},
    "random erasing": {"augmentations": [{"name": "random_erasing", "probability": 0.25}]},
    "MixUp and CutMix": {"mixup_alpha": 0.2, "cutmix_alpha": 1.0},
    "binary cross-entropy": {"loss": "binary_cross_entropy", "class_reduction": "sum"},
    "stochastic depth": {"stochastic_depth": 0.1},
    "moving average": {"ema_decay": 0.99},
    "repeated augmentation": {"repeated_augmentation": 3},
    "LAMB": LAMB,
}
INGREDIENTS["A2"] = {
    **LAMB,
    "loss": "binary_cross_entropy",
    "target_threshold": 0.2,
    "stochastic_depth": 0.05,
    "mixup_alpha": 0.1,
    "cutmix_alpha": 1.0,
    "repeated_augmentation": 3,
    "augmentations": INGREDIENTS["RandAugment"]["augmentations"],
}
"""What a run has that the base has not, by ingredient. "A2" has what `resnet50-rsb-a2` adds."""


def main() -> None:
    arguments = parse_arguments()
    accuracies = {}
    for name in arguments.ingredients:
        accuracies[name] = [train(arguments, name, seed) for seed in range(arguments.seeds)]
    record(
        arguments.name,
        {
            "epochs": arguments.epochs,
            "image_size": arguments.size,
            "seeds": arguments.seeds,
            "base": {key: str(value) for key, value in BASE.items()},
            "ingredients": {
                name: {"changes": INGREDIENTS[name], **compare(values, accuracies["base"])}
                for name, values in accuracies.items()
            },
        },
    )


def parse_arguments() -> Namespace:
    parser = make_parser(__doc__, "Folders train/<class> and val/<class> of small images.")
    parser.add_argument("--runs", type=Path, required=True, help="Where the runs are kept.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=32, help="Image size in pixels.")
    parser.add_argument("--seeds", type=int, default=3, choices=T_95)
    parser.add_argument("--ingredients", nargs="+", default=list(INGREDIENTS), choices=INGREDIENTS)
    parser.add_argument("--name", default="ingredients", help="Name of the result.")
    arguments = parser.parse_args()
    if "base" not in arguments.ingredients:
        arguments.ingredients.insert(0, "base")
    return arguments


def train(arguments: Namespace, name: str, seed: int) -> float:
    """Return top-1 in percent at the end of a run, of the moving average if there is one."""
    classes = sum(1 for folder in (arguments.data / "train").iterdir() if folder.is_dir())
    settings = {"logits": classes, "epochs": arguments.epochs, "image_size": arguments.size}
    settings |= {"eval_resize": arguments.size, "eval_crop": arguments.size, "seed": seed}
    recipe = lockstep.Recipe(**BASE | settings).replace(**INGREDIENTS[name])
    out = arguments.runs / f"{name.replace(' ', '-')}-{seed}"
    execution = lockstep.Execution(
        loader_threads=1, loggers=(), keep_checkpoints=1, evaluate_every_epochs=arguments.epochs
    )
    report = lockstep.train(recipe, arguments.data, out, execution=execution)
    scores = report["final"]
    top1 = scores.get("ema", scores["trained"])["top1_percent"]
    print(f"{name} {seed}: {top1:.2f}", flush=True)
    return float(top1)


def compare(values: list[float], base: list[float]) -> dict[str, Any]:
    """Return an ingredient's accuracies next to the base's, in percent, seed by seed."""
    differences = [value - other for value, other in zip(values, base, strict=True)]
    half = T_95[len(values)] * statistics.stdev(differences) / len(values) ** 0.5
    mean = statistics.mean(differences)
    return {
        "top1_percent": [round(value, 2) for value in values],
        "mean_percent": round(statistics.mean(values), 2),
        "gain_percent": round(mean, 2),
        "gain_interval_percent": [round(mean - half, 2), round(mean + half, 2)],
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
